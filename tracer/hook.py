"""Observe the routing of a live transformers model: what its MoE layers choose in each forward pass.

`sites` knows how a single layer shows its choice; here the choices of a stack (a decoder, or the encoder before
it) become one record when its forward pass ends. Each layer must choose exactly once in a pass; a model of which
that does not hold is refused with the layer's name. Tensors stay on their device until the end of the pass.
"""

import re
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from tracer.gates import Gate, find_gate, read_gates
from tracer.lookahead import Lookahead
from tracer.nllb import mended
from tracer.observed import Pass, Wanted, candidates_of
from traces.errors import InputError
from traces.models.sites import Site, find_sites
from traces.schema import Picks

PROBE_TOKENS = 24
"""Enough for tokens to choose different experts, so that a wrong reading of a router shows itself."""


class _Choice(NamedTuple):
    """What a layer chose for the tokens of a pass: experts and weights, [T, k] each."""

    site: Site
    experts: Tensor
    weights: Tensor


class ExpertsHook:
    """Observes `model` while entered as a context manager; `probe` first, then each forward pass fills `passes`.

    After `probe`, `names` and `modules` list the MoE layers in the order of execution, the encoder's first, and
    `sites` all that is known of them; `experts` is E, `top_k` the largest k, `stacks` 1 or 2, and `notes` are
    lines that the user should read. Weights, scores and lookahead are recorded if asked for.
    """

    def __init__(self, model: nn.Module, wanted: Wanted | None = None):
        self.model = model
        self.sites = find_sites(model)
        if not self.sites:
            raise InputError(f"{_kind(model)} has no routed experts that can be observed: is it an MoE model?")
        self.experts = 0
        self.top_k = 0
        self.stacks = 2 if getattr(getattr(model, "config", None), "is_encoder_decoder", False) else 1
        self.notes: list[str] = []
        self.passes: list[Pass] = []
        self.wanted = wanted or Wanted()
        self.ahead = Lookahead(self.wanted.lookahead) if self.wanted.lookahead else None  # what tries layers
        self._layers: list[list[Site]] | None = None  # of each stack, in the order of execution
        self._gates: dict[Site, Gate] = {}
        self._seen: list[_Choice] = []
        self._router_outputs: dict[Site, Any] = {}
        self._probed: list[list[_Choice]] = []
        self._open = ExitStack()

    @property
    def names(self) -> list[str]:
        return [site.name for site in self.sites]

    @property
    def modules(self) -> list[nn.Module]:
        return [site.module for site in self.sites]

    @property
    def picks(self) -> Picks | None:
        """What it records of lookahead."""
        return self.wanted.picked(self.top_k, self.experts)

    @property
    def alone(self) -> bool:
        """Whether others in a batch would change a request's routing: by capacity, or an indexer of tokens."""
        indexed = any("Indexer" in type(module).__name__ for module in self.model.modules())
        return indexed or any(site.alone for site in self.sites)

    def __enter__(self) -> "ExpertsHook":
        with ExitStack() as opening:
            self.notes[:] = opening.enter_context(mended(self.model))
            model: Any = self.model
            modules = [model.get_encoder(), model.get_decoder()] if self.stacks == 2 else [model]
            ends = (each.register_forward_hook(partial(self._ended, stack)) for stack, each in enumerate(modules))
            for handle in chain(chain.from_iterable(map(self._attach, self.sites)), ends):
                opening.callback(handle.remove)
            self._open = opening.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._open.close()
        self._forget()

    def probe(self) -> None:
        """Run a few tokens through the model to learn its layers and how to read them; raises InputError."""
        self.clear()
        self._layers, self._probed = None, []
        if self.ahead:
            self.ahead.rehearse()
        tokens = self._probe_tokens()
        decoder = {"decoder_input_ids": tokens} if self.stacks == 2 else {}
        with torch.inference_mode():
            self.model(input_ids=tokens, **decoder)
        if self._seen:
            raise InputError(f"{self._seen[0].site.name} ran outside of {_kind(self.model)}'s forward pass")
        seen = [choice for stack in self._probed for choice in stack]
        self._leave_out_what_never_runs({choice.site for choice in seen})
        _require_each_once(self.sites, seen)
        self.sites = [choice.site for choice in seen]
        self._layers = [[choice.site for choice in stack] for stack in self._probed]
        self._learn(seen)
        self.clear()

    def clear(self) -> None:
        """Forget the passes, and whatever an unfinished forward pass has left."""
        self.passes.clear()
        self._forget()

    def _forget(self) -> None:
        self._seen.clear()
        self._router_outputs.clear()
        if self.ahead:
            self.ahead.clear()

    def _attach(self, site: Site) -> Iterator[Any]:
        """Hook one layer: its choice, and what was asked for besides."""

        def report(index: Tensor, weights: Tensor) -> None:
            if self.ahead and self.ahead.trying:
                self.ahead.answer(index, weights)
            self._seen.append(_Choice(site, index, weights))

        def scored(_: nn.Module, args: Any, output: Any) -> None:
            if self.ahead and self.ahead.trying:
                self.ahead.output = output
            else:
                self._router_outputs[site] = output

        if self.ahead:
            yield from self.ahead.attach(site)
        if (self.wanted.scores or self.ahead) and site.router is not None:
            yield site.router.register_forward_hook(scored)
        yield from site.attach(report)

    def _probe_tokens(self) -> Tensor:
        """Some token ids [1, T] that are words as far as the model's config tells, where its weights are."""
        model: Any = self.model
        special = set(_special_ids(getattr(model, "config", None)))
        embedding = model.get_input_embeddings() if hasattr(model, "get_input_embeddings") else None
        vocabulary = range(min(getattr(embedding, "num_embeddings", PROBE_TOKENS), PROBE_TOKENS + len(special)))
        words = [token for token in vocabulary if token not in special] or [0]
        ids = [words[number % len(words)] for number in range(PROBE_TOKENS)]
        return torch.tensor([ids], device=next((p.device for p in model.parameters() if not p.is_meta), "cpu"))

    def _leave_out_what_never_runs(self, ran: set[Site]) -> None:
        """Drop the layers of towers for images or speech, of which no layer at all runs on text."""
        stacks = {_numberless(site.name) for site in ran}
        idle = [site for site in self.sites if site not in ran and _numberless(site.name) not in stacks]
        if ran and idle:
            self.sites = [site for site in self.sites if site not in idle]
            names = sorted({_numberless(site.name) for site in idle})
            self.notes.append(f"not recorded, because text does not run through them: {', '.join(names)}")

    def _learn(self, seen: list[_Choice]) -> None:
        """E, k, how to read the routers, and that what was asked for is available."""
        for choice in seen:
            site = choice.site
            if self.experts and site.experts != self.experts:
                raise InputError(
                    f"{site.name} has {site.experts} experts, a layer before it {self.experts}: not recorded"
                )
            if not choice.weights.is_meta and not choice.weights.isfinite().all():
                raise InputError(f"{site.name} weighs its experts with values that are not finite: is it damaged?")
            self.experts = site.experts
            self.top_k = max(self.top_k, choice.experts.shape[1])
            if self.wanted.scores:
                output = self._router_outputs.get(site)
                self._gates[site] = find_gate(site, output, choice.experts, choice.weights)
        if self.ahead and self.picks:
            self.ahead.check((choice.site, choice.experts) for choice in seen)
            self.ahead.picks = self.picks.count
            for choice in seen:
                with suppress(InputError):  # then the router's weights are the scores
                    output = self._router_outputs.get(choice.site)
                    self.ahead.gates[choice.site] = find_gate(choice.site, output, choice.experts, choice.weights)

    def _ended(self, stack: int, _: nn.Module, args: Any, output: Any) -> None:
        """The forward pass of a stack has ended: keep what was seen."""
        if self._layers is None:
            self._probed.append(list(self._seen))
            self._seen.clear()
            return
        layers = self._layers[stack]
        if [choice.site for choice in self._seen] != layers:
            _require_each_once(layers, self._seen)
            raise InputError(f"the MoE layers of {_kind(self.model)} run in an order that changes, or others run")
        # a stack whose layers are all dense shows its tokens in what it returns: states [rows, columns, H]
        tokens = len(self._seen[0].experts) if layers else output[0].shape[:2].numel()
        self.passes.append(self._read(stack, layers, tokens))
        self._forget()

    def _read(self, stack: int, layers: list[Site], tokens: int) -> Pass:
        for site, index, _ in self._seen:
            if len(index) != tokens or index.shape[1] > self.top_k:
                raise InputError(
                    f"{site.name} routes {len(index)} tokens, not {tokens}, or to more than {self.top_k} experts"
                )
        ids, weights = self._sorted(tokens)
        more: dict[str, Any] = {"weights": self._placed(stack, weights.half(), 0)} if self.wanted.weights else {}
        if count := self.wanted.candidates(self.top_k, self.experts):
            outputs = [self._router_outputs[site] for site in layers]
            gates = [self._gates[site] for site in layers]
            read = read_gates(gates, outputs, tokens) if layers else torch.empty(tokens, 0, self.experts)
            both = map(torch.from_numpy, candidates_of(ids.cpu().numpy(), read.cpu().numpy(), count))
            for name, values, empty in zip(("candidates", "scores"), both, (-1, 0), strict=True):
                more[name] = self._placed(stack, values, empty)
        if self.ahead and self.picks:
            picked, device = self.picks, ids.device
            shape = tokens, len(layers), len(picked.distances), picked.count
            index, found = torch.full(shape, -1, device=device), torch.zeros(shape, device=device)
            for (site, distance), (chosen, of_them) in self.ahead.chosen.items():
                place = slice(None), layers.index(site), picked.distances.index(distance)
                index[place], found[place] = chosen.to(device), of_them.to(device)
            more["lookahead"] = self._placed(stack, index.int(), -1)
            more["lookahead_scores"] = self._placed(stack, found.half(), 0)
        return Pass(stack, self._placed(stack, ids, -1), **more)

    def _sorted(self, tokens: int) -> tuple[Tensor, Tensor]:
        """Return ids and weights [T, layers, k] of the choices seen, best expert first; nothing routed: -1 and 0."""
        index = _stacked([choice.experts for choice in self._seen], tokens, self.top_k, -1)
        weights = _stacked([choice.weights for choice in self._seen], tokens, self.top_k, 0).float()
        routed = (index >= 0) & (index < self.experts)
        weights, order = weights.masked_fill(~routed, -torch.inf).sort(dim=-1, descending=True, stable=True)
        ids = torch.where(routed, index, -1).gather(-1, order).to(torch.int32)
        return ids, weights.masked_fill(ids < 0, 0)

    def _placed(self, stack: int, layers: Tensor, empty: int) -> NDArray[Any]:
        """Copy [T, layers of the stack, ...] to the host, among the layers of all stacks."""
        part: NDArray[Any] = layers.cpu().numpy()
        assert self._layers is not None
        if len(self.sites) == part.shape[1]:
            return part
        first = sum(len(before) for before in self._layers[:stack])
        whole = np.full((len(part), len(self.sites), *part.shape[2:]), empty, part.dtype)
        whole[:, first : first + part.shape[1]] = part
        return whole


def _require_each_once(sites: list[Site], seen: list[_Choice]) -> None:
    counts = Counter(choice.site for choice in seen)
    for site in sites:
        if counts[site] != 1:
            raise InputError(
                f"{site.name} was called {counts[site]} times in one forward pass: is it compiled or fused?"
            )


def _stacked(layers: list[Tensor], tokens: int, k: int, fill: int) -> Tensor:
    """Layers [T, at most k] each, maybe on several devices, as [T, layers, k]."""
    if not layers:
        return torch.empty(tokens, 0, k)
    if len({(layer.shape[1], layer.device) for layer in layers}) > 1 or layers[0].shape[1] != k:
        device = layers[0].device
        layers = [nn.functional.pad(layer.to(device), (0, k - layer.shape[1]), value=fill) for layer in layers]
    return torch.stack(layers, 1)


def _special_ids(config: Any) -> list[int]:
    """Ids that a config, or a config in it, gives to what is no word: images, padding, ends."""
    if config is None:
        return []
    ids: list[int] = []
    for key, value in vars(config).items():
        if hasattr(value, "to_dict"):
            ids.extend(_special_ids(value))
        elif key.endswith(("token_id", "token_index", "_token")):
            ids.extend(number for number in (value if isinstance(value, list) else [value]) if isinstance(number, int))
    return ids


def _numberless(name: str) -> str:
    """A name in which the number of a layer does not tell: `layers.3.mlp` becomes `layers.*.mlp`."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", f".{name}")[1:]


def _kind(model: nn.Module) -> str:
    return type(model).__name__
