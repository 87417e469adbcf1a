"""Let a model answer, or take answers that are given, and attribute every token that it routes to its request.

The first pass of a stack is its prefill; pass f after it feeds each row the f-th token that it generated. The last one
of n is never fed back, and what a finished row is fed is not its own. With drafts, guessed tokens that the model then
chose are the request's. Forced answers run as one prefill of prompt and answer. An encoder's tokens come first.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from importlib.metadata import version
from inspect import signature
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import transformers
from torch import Tensor

from tracer.blaming import blaming
from tracer.hook import ExpertsHook
from tracer.lookup import drafting
from tracer.observed import Answer, Answers, Pass, Tokens, Wanted, messages_of
from traces.errors import InputError
from traces.schema import TraceMeta

SAMPLE = 256
"""Numbers of each weight by which a resumed recording knows its model again, beside the whole routers."""


SLICED = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to generate."""

    name: str
    model: Any  # transformers.PreTrainedModel
    tokenizer: Any  # transformers.PreTrainedTokenizerBase; None: it is fed with token ids
    notes: tuple[str, ...] = ()  # what the user should know of how it was loaded

    @property
    def device(self) -> torch.device:
        """Where inputs go; weights that are offloaded come to them."""
        device: torch.device = self.model.device
        return torch.device("cpu") if device.type == "meta" else device

    @property
    def context(self) -> int | None:
        """Tokens of a request, prompt and answer, that a model without an encoder is made for, if it says so."""
        config = self.model.config.get_text_config()
        return None if config.is_encoder_decoder else getattr(config, "max_position_embeddings", None)

    @property
    def stop_ids(self) -> list[int]:
        ids = self.model.generation_config.eos_token_id
        ids = getattr(self.tokenizer, "eos_token_id", None) if ids is None else ids
        return [] if ids is None else list(ids) if isinstance(ids, list) else [ids]

    @property
    def pad_id(self) -> int:
        """A token id to fill batches with; it is masked, so any will do."""
        pad = getattr(self.tokenizer, "pad_token_id", None)
        return int(pad) if pad is not None else (self.stop_ids or [0])[0]

    @property
    def starts(self) -> dict[str, int | None]:
        """What an encoder-decoder's answers start with, as its checkpoint says: settings of generate()."""
        if not self.model.config.is_encoder_decoder:
            return {}
        forced = self.model.generation_config.forced_bos_token_id
        return {"decoder_start_token_id": self.decoder_start, "forced_bos_token_id": forced}

    @property
    def decoder_start(self) -> int:
        """The token that a decoder behind an encoder starts from."""
        named = (
            self.model.generation_config.decoder_start_token_id,
            getattr(self.model.config, "decoder_start_token_id", None),
            self.model.generation_config.bos_token_id,
        )
        return int(next(token for token in named if token is not None))

    def prompt_tokens(self, said: Sequence[str], template: bool) -> list[int]:
        """Return the tokens of texts of user and model in turn: by the chat template if `template`, else as lines."""
        if not (template and getattr(self.tokenizer, "chat_template", None)):
            return self._ids(text="\n".join(said))
        with blaming(f"the chat template of {self.name} fails"):
            text = self.tokenizer.apply_chat_template(messages_of(said), add_generation_prompt=True, tokenize=False)
        return self._ids(text=text, add_special_tokens=False)

    def _ids(self, **options: Any) -> list[int]:
        with blaming(f"the tokenizer of {self.name} fails"):
            return list(self.tokenizer(**options)["input_ids"])

    def response_tokens(self, text: str) -> list[int]:
        """Return the tokens of an answer, with the end of sequence that the model would have written."""
        encoded = self.model.config.is_encoder_decoder
        ids = self._ids(text_target=text) if encoded else self._ids(text=text, add_special_tokens=False)
        return ids if ids and ids[-1] in self.stop_ids else [*ids, *self.stop_ids[:1]] or ids

    def text(self, tokens: Sequence[int]) -> str:
        return str(self.tokenizer.decode(tokens, skip_special_tokens=True))

    def fingerprint(self, modules: Iterable[torch.nn.Module | None], sample: int | None = None) -> str:
        """Hash the weights of modules, those offloaded by accelerate too; sample: about so many numbers of each."""
        digest = hashlib.sha256()
        for module in modules:
            if module is not None:
                with _loaded(module):
                    for weight in module.parameters():
                        # what packs the numbers of a quantized weight may not let them be sliced
                        plain = type(weight.data) is torch.Tensor and weight.dtype in SLICED
                        if weight.device.type != "meta" and (sample is None or plain):
                            numbers = weight.detach().flatten()[:: max(1, weight.numel() // sample) if sample else 1]
                            digest.update(numbers.float().cpu().numpy().tobytes())
        return digest.hexdigest()[:16]

    @contextmanager
    def observed(self, wanted: Wanted, on_step: Callable[[int], None]) -> "Iterator[Runner]":
        """Hook and probe the model, and yield what lets it answer. See `tracer.observed`."""
        with ExpertsHook(self.model, wanted) as hook:
            with blaming(f"{self.name} cannot be run"):
                hook.probe()
            yield Runner(self, hook, on_step)


@contextmanager
def _loaded(module: torch.nn.Module) -> Iterator[None]:
    """Hold the weights of a module in memory that accelerate has offloaded."""
    with ExitStack() as held:
        for part in module.modules():
            if hasattr(part, "_hf_hook"):
                from accelerate.utils import align_module_device

                held.enter_context(align_module_device(part))
        yield


@dataclass
class Runner:
    """Runs batches of token ids through a model that is observed by `hook`."""

    loaded: LoadedModel
    hook: ExpertsHook
    on_step: Callable[[int], None]  # hears how many tokens a forward pass gave
    on_tokens: Callable[[Tokens], None] = lambda tokens: None  # hears which: one a row, for each that it gave
    draft: int = 0  # tokens that are looked up for each pass that decodes, at most (`tracer.lookup`)
    _width: int = 0  # tokens of each row so far
    _gave: Sequence[int] = ()  # tokens of each row, by pass

    @property
    def alone(self) -> bool:
        """Return whether others in a batch would change a request's routing."""
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
            lookahead=hook.picks,
            candidates=hook.wanted.candidates(hook.top_k, hook.experts),
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

    def generate(self, prompts: Sequence[Tokens], limit: int, sampling: Answers) -> list[Answer]:
        """Let the model answer until its end of sequence or for `limit` tokens; raises InputError."""
        ids, mask = self._padded(prompts, left=True)
        config = _config(
            max_new_tokens=limit,
            num_beams=1,
            use_cache=True,
            disable_compile=True,
            eos_token_id=self.loaded.stop_ids or None,
            pad_token_id=self.loaded.pad_id,
            prompt_lookup_num_tokens=self.draft or None,
            **sampling.settings,
            **self.loaded.starts,
        )
        model, start = self.loaded.model, 1 if self.hook.stacks == 2 else ids.shape[1]
        own_config = patch.object(model, "generation_config", _config())  # its limits and penalties would be mixed in
        self._width, self._gave = start, list[int]()
        with self._running(ids), own_config, drafting(model) if self.draft else nullcontext():
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
            drafted = [count for of, kept in self.drafts for count in (of, *[-1] * kept)] if self.draft else None
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
        self.on_step(sum(map(len, responses)))
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
        self._gave = [*self._gave, new.shape[1]]
        self.on_step(new.numel())
        for column in new.T.tolist():
            self.on_tokens(column)
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
            each < kept if self.draft else each != rows for each, kept in zip(fed[1:], gave[1:], strict=True)
        ):
            raise InputError(f"{self.loaded.name} does not decode token by token: its tokens cannot be attributed")


def _config(**settings: Any) -> Any:
    untyped: Any = transformers.GenerationConfig
    return untyped(**settings)
