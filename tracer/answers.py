"""Let a model answer, or take answers that are given, and attribute every token that it routes to its request.

The first forward pass of a stack is its prefill; pass f after it feeds each row the f-th token that it generated.
A request with n new tokens therefore has prompt + n - 1 routed tokens: the last one is never fed back, and what a
finished row is fed while others continue is not its own. With drafts a request runs alone, and a pass also feeds tokens
that are guessed; those that the model then chose are the request's, the others are dropped. Forced answers run as one
prefill of prompt and answer, which routes each token as decoding it would. An encoder's tokens come first; its
decoder's prompt is the start token.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from importlib.metadata import version
from inspect import signature
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import GenerationConfig

from tracer.hook import ExpertsHook
from tracer.lookup import drafting
from tracer.models import LoadedModel, blaming
from tracer.observed import Answer, Pass, Sampling, Tokens
from traces.errors import InputError
from traces.schema import TraceMeta

SAMPLE = 256
"""Numbers of each weight by which a resumed recording knows its model again, beside the whole routers."""


class Runner:
    """Runs batches of token ids through a model that is observed by `hook`."""

    def __init__(
        self,
        loaded: LoadedModel,
        hook: ExpertsHook,
        on_step: Callable[[int], None],
        on_tokens: Callable[[Tokens], None] = lambda tokens: None,
        draft: int = 0,
    ):
        """`on_step` hears how many tokens a forward pass gave, `on_tokens` which: one a row, for each that it gave.

        draft: tokens that are looked up for each pass that decodes, at most (`tracer.lookup`).
        """
        self.loaded = loaded
        self.hook = hook
        self._on_step = on_step
        self._on_tokens = on_tokens
        self._draft = draft
        self._width = 0  # tokens of each row so far
        self._gave: list[int] = []  # tokens of each row, by pass

    @property
    def alone(self) -> bool:
        return self.hook.alone

    @property
    def notes(self) -> list[str]:
        return [*self.loaded.notes, *self.hook.notes]

    def meta(self) -> TraceMeta:
        """Return the metadata of a trace recorded from this model; the hook has probed it."""
        hook, own = self.hook, self.loaded.model.config
        config = own.get_text_config()
        hidden = getattr(config, "hidden_size", None) or config.d_model
        shapes = [site.shape(hidden) for site in hook.sites]
        width = hook.sites[0].weights[0].element_size()
        sizes = [shape.parameters * width for shape in shapes]
        shape = max(shapes, key=lambda shape: shape.parameters)
        if len(set(sizes)) > 1:
            hook.notes.append(f"experts have {min(sizes)} to {max(sizes)} bytes; the trace has the size of the largest")
        weights = hook.sites[0].weights
        return TraceMeta(
            model=self.loaded.name,
            layers=len(hook.names),
            experts=hook.experts,
            top_k=hook.top_k,
            layer_names=tuple(hook.names),
            expert_bytes=max(sizes) or None,
            dtype=str(weights[0].dtype).removeprefix("torch.") if weights else None,
            revision=getattr(own, "_commit_hash", None),
            hidden_size=hidden,
            expert_intermediate_size=shape.inner,
            expert_hidden_size=None if shape.width == hidden else shape.width,
            expert_matrices=shape.matrices,
            tools={name: version(name) for name in ("moe-expert-cache", "torch", "transformers")},
        )

    def compute(self) -> dict[str, Any]:
        """Return fingerprints of routers and weights, the dtype and the device."""
        loaded = self.loaded
        # which weights are offloaded may differ from run to run, so a sample of the others would, too
        here = all(weight.device.type != "meta" for weight in loaded.model.parameters())
        return {
            "routers_sha256": loaded.fingerprint(site.router for site in self.hook.sites),
            "weights_sha256": loaded.fingerprint([loaded.model], sample=SAMPLE) if here else None,
            "compute_dtype": str(loaded.model.dtype).removeprefix("torch."),
            "device": loaded.device.type,
        }

    def seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def generate(self, prompts: Sequence[Tokens], limit: int, sampling: Sampling) -> list[Answer]:
        """Let the model answer until its end of sequence or for `limit` tokens; raises InputError."""
        ids, mask = self._padded(prompts, left=True)
        config = answer_config(self.loaded, limit, sampling, self._draft)
        model, start = self.loaded.model, 1 if self.hook.stacks == 2 else ids.shape[1]
        self._width, self._gave = start, []
        with self._running(ids), without_own_config(model), drafting(model) if self._draft else nullcontext():
            everything = model.generate(
                input_ids=ids, attention_mask=mask, generation_config=config, stopping_criteria=[self._stepped]
            )
        firsts, news = everything[:, :start].tolist(), everything[:, start:].tolist()
        answers = []
        for row, (prompt, first, new) in enumerate(zip(prompts, firsts, news, strict=True)):
            ends = (n for n, token in enumerate(new, start=1) if token in self.loaded.stop_ids or n == limit)
            if (n := next(ends, 0)) == 0:
                raise InputError(f"{self.loaded.name} stopped early: neither at an end nor after {limit} tokens")
            own = slice((row + 1) * ids.shape[1] - len(prompt), (row + 1) * ids.shape[1])
            self._require_one_by_one(ids.shape, n)
            gave = zip(self._decoder_passes, self._gave, strict=True)
            routed = [(part, slice(row, row + kept)) for part, kept in gave][:n]
            drafted = [count for of, kept in self.drafts for count in (of, *[-1] * kept)] if self._draft else None
            if self.hook.stacks == 2:
                encoded = [(part, own) for part in self.hook.passes if part.stack == 0]
                answers.append(Answer(prompt + first, new[:n], encoded + routed, drafted))
            else:
                answers.append(Answer(prompt, new[:n], [(routed[0][0], own), *routed[1:]], drafted))
        return answers

    @property
    def drafts(self) -> list[tuple[int, int]]:
        """Return of each pass that decoded how many tokens were drafted for it, and how many of these it accepted."""
        later = zip(self._decoder_passes[1:], self._gave[1:], strict=False)  # one that failed gave nothing
        return [(len(part.ids) - 1, gave - 1) for part, gave in later]

    def force(self, prompts: Sequence[Tokens], responses: Sequence[Tokens]) -> list[Answer]:
        """Feed prompt and response in one forward pass. Padding is on the right, where causal models do not look."""
        model, encoded = self.loaded.model, self.hook.stacks == 2
        heads = [[self.loaded.decoder_start]] * len(prompts) if encoded else prompts
        decoded = [[*head, *response[:-1]] for head, response in zip(heads, responses, strict=True)]
        fed = [prompts, decoded] if encoded else [decoded]
        padded = [self._padded(rows, left=False) for rows in fed]
        ids, mask = padded[0]
        given: dict[str, Any] = {"decoder_input_ids": padded[1][0]} if encoded else {}
        if "logits_to_keep" in signature(model.forward).parameters:
            given["logits_to_keep"] = 1
        with self._running(ids):
            model(input_ids=ids, attention_mask=mask, use_cache=False, **given)
        self._on_step(sum(map(len, responses)))
        if [part.stack for part in self.hook.passes] != list(range(self.hook.stacks)):
            raise InputError(f"{self.loaded.name} runs its layers several times for one forward pass")
        answers = []
        for row, (prompt, head, response) in enumerate(zip(prompts, heads, responses, strict=True)):
            routed = []
            for part, rows, (tokens, _) in zip(self.hook.passes, fed, padded, strict=True):
                first = row * tokens.shape[1]
                routed.append((part, slice(first, first + len(rows[row]))))
            answers.append(Answer([*prompt, *head] if encoded else prompt, response, routed))
        return answers

    def _padded(self, rows: Sequence[Tokens], left: bool) -> tuple[Tensor, Tensor]:
        """Ids and mask, [rows, longest] each."""
        width = max(map(len, rows))
        ids = np.full((len(rows), width), self.loaded.pad_id)
        mask = np.zeros((len(rows), width), np.int64)
        for row, tokens in enumerate(rows):
            own = slice(width - len(tokens), None) if left else slice(None, len(tokens))
            ids[row, own] = tokens
            mask[row, own] = 1
        return torch.from_numpy(ids).to(self.loaded.device), torch.from_numpy(mask).to(self.loaded.device)

    @contextmanager
    def _running(self, ids: Tensor) -> Iterator[None]:
        self.hook.clear()
        what = f"{self.loaded.name} cannot be run on {len(ids)} prompts of {ids.shape[1]} tokens"
        with torch.inference_mode(), blaming(what):
            yield

    def _stepped(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        """A stopping criterion that stops nothing: it tells of the step."""
        new = input_ids[:, self._width :]
        self._width = input_ids.shape[1]
        self._gave.append(new.shape[1])
        self._on_step(new.numel())
        for column in new.T.tolist():
            self._on_tokens(column)
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)

    @property
    def _decoder_passes(self) -> list[Pass]:
        return [part for part in self.hook.passes if part.stack == self.hook.stacks - 1]

    def _require_one_by_one(self, shape: torch.Size, n: int) -> None:
        """Raise InputError if the stack that decodes did not run a prefill, and then a token a row or what it kept."""
        rows, width = shape
        first = rows if self.hook.stacks == 2 else rows * width
        fed, gave = [len(part.ids) for part in self._decoder_passes], self._gave
        fits = len(fed) == len(gave) and fed[0] == first and sum(gave) >= n
        if not fits or any(
            each < kept if self._draft else each != rows for each, kept in zip(fed[1:], gave[1:], strict=True)
        ):
            raise InputError(
                f"{self.loaded.name} does not run a prefill and then one token at a time, "
                "so its tokens cannot be attributed"
            )


def answer_config(loaded: LoadedModel, limit: int, sampling: Sampling, draft: int = 0) -> Any:
    """Return how a model answers, as transformers' generation config; draft: tokens looked up for each pass."""
    return _config(
        max_new_tokens=limit,
        num_beams=1,
        use_cache=True,
        disable_compile=True,
        eos_token_id=loaded.stop_ids or None,
        pad_token_id=loaded.pad_id,
        prompt_lookup_num_tokens=draft or None,
        **sampling.settings,
        **loaded.starts,
    )


def _config(**settings: Any) -> Any:
    untyped: Any = GenerationConfig
    return untyped(**settings)


@contextmanager
def without_own_config(model: Any) -> Iterator[None]:
    """Hide the checkpoint's generation config: generate() would mix its limits, penalties and stop strings in."""
    own, model.generation_config = model.generation_config, _config()
    try:
        yield
    finally:
        model.generation_config = own
