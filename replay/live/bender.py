"""Bends the routing of a model that runs now (rule 22): what its routers choose, or what its experts are handed.

`drop` takes experts away between router and experts. The other rules bend the choice where the model's own code makes
it, in the `torch.topk` over all experts: so the weights of what is chosen are those that the router gives it.
"""

from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from policies.core.bent import DROP, Candidates, Commit, Rule, choose_all, committed, ranked, shares_of
from replay.live.next_routers import NextRouters
from traces.errors import InputError
from traces.models.sites import Site, handed

if TYPE_CHECKING:
    from replay.live.model import LiveModel


class Bender:
    """Hooks all MoE layers of a model; `opening` ends it."""

    def __init__(self, rule: Rule, live: "LiveModel", next_routers: NextRouters | None, opening: ExitStack) -> None:
        """Raise InputError for a model whose routers cannot be bent."""
        self._rule, self._live, self._next = rule, live, next_routers
        rule.by(live.hook.top_k)
        for layer, site in enumerate(live.hook.sites):
            handles: list[Any]
            if rule.kind == DROP:
                handles = [site.module.register_forward_pre_hook(partial(self._drop, layer), with_kwargs=True)]
            elif block := site.block or site.router:
                mode = TopK(partial(self._bent, layer), site)
                begun = block.register_forward_pre_hook(mode.begin)
                handles = [begun, block.register_forward_hook(mode.end, always_call=True)]
            else:
                raise InputError(f"`routing`: {site.name} has no router of its own, whose choice could be bent")
            for handle in handles:
                opening.callback(handle.remove)

    def _drop(self, layer: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Hand experts -1 in place of what is dropped."""
        hidden, index, weights = handed(module, args, kwargs)
        ids = index.cpu().numpy().astype(np.int64)[:, None]
        ids = np.where(ids < self._live.run.shape.experts, ids, -1)
        shares = shares_of(ids, weights.float().cpu().numpy()[:, None])
        chosen = self._chosen(layer, Candidates(ids, shares, np.zeros(ids.shape)), ids.shape[-1])
        return (hidden, torch.from_numpy(chosen).to(index), weights), {}

    def _bent(self, layer: int, scores: Tensor, chosen: Tensor) -> Tensor:
        """Return what tokens choose in place of `chosen` [T, k]; scores: [T, E] by which their router ranks experts."""
        if self._next and self._next.trying:
            return chosen
        k = chosen.shape[1]
        others = scores.scatter(-1, chosen, -torch.inf).argsort(dim=-1, descending=True, stable=True)
        order = torch.cat([chosen, others[:, : scores.shape[1] - k]], -1)
        ranks = scores.gather(-1, order).double().cpu().numpy()[:, None]
        ids = np.where(np.isfinite(ranks), order.cpu().numpy()[:, None], -1)
        candidates = ranked(ids, np.where(ids < 0, 0, ranks), k)
        if isinstance(self._rule, Commit):
            assert self._next
            picks = self._next.named.get((layer, self._rule.options.layers))
            if picks is None:
                return chosen
            candidates = committed(ranked(ids[..., :k], ranks[..., :k], k), picks[:, None].astype(np.int64))
        return torch.from_numpy(self._chosen(layer, candidates, k)).to(chosen)

    def _chosen(self, layer: int, candidates: Candidates, k: int) -> NDArray[np.int64]:
        """Return what tokens choose, [T, k]; candidates: of one layer."""
        bending, present = self._live.loop.bending(layer)
        none, chosen = np.zeros((0, 0), np.int64), np.empty((len(candidates.ids), k), np.int64)
        choose_all(bending.over(candidates, k, none, none, np.zeros((0, 0))), present, chosen)
        return chosen


class TopK(TorchFunctionMode):
    """Has what a router chooses bent, while its block runs."""

    def __init__(self, bent: Any, site: Site) -> None:
        """bent: returns what tokens choose, of the scores of all experts and of their own choice."""
        super().__init__()
        self._bent, self._experts = bent, site.experts
        self._is_probability: bool | None = None

    def begin(self, *_: object) -> None:
        self.__enter__()  # type: ignore[no-untyped-call]

    def end(self, *_: object) -> None:
        self.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func not in (torch.topk, Tensor.topk) or args[0].dim() != 2 or args[0].shape[1] != self._experts:
            return result
        scores = args[0].detach()
        if self._is_probability is None:
            self._is_probability = bool(((scores >= 0) & (scores <= 1)).all())
        with torch.no_grad():
            index = self._bent(scores.float().log() if self._is_probability else scores.float(), result.indices)
        return torch.return_types.topk((args[0].gather(-1, index), index))
