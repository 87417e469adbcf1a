"""Record what a GGUF model routes in llama.cpp: its evaluation callback shows the tensors of each router.

Every layer of every architecture names them alike (`build_moe_ffn` of src/llama-graph.cpp): `ffn_moe_topk-3` and
`ffn_moe_weights-3`, and where weights are normalised or scaled a further name. The last layer computes only the tokens
whose logits are asked for, so they are asked for of all. Layers that do not see the same tokens are an error.
"""

import hashlib
import json
import os
import re
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from ctypes import c_void_p, cast
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from jinja2.exceptions import TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from numpy.typing import NDArray

from tracer.loading import Loading
from tracer.observed import Answer, Answers, Pass, Tokens, Wanted, candidates_of, messages_of
from tracer.routers import NAMED, TRANSFORMS, Routers
from traces.errors import InputError, located, refuse
from traces.llama_library import EVAL, Copied, library
from traces.models.gguf_files import parts
from traces.models.gguf_profile import of_gguf
from traces.schema import TraceMeta

ROUTERS = re.compile(rb"ffn_moe_(?:topk|weights(?:_softmax|_norm|_scaled)?)-(\d+)")

PROBABILITIES = b"ffn_moe_probs-%d"
"""Logits, where weights are a softmax of those of the chosen experts alone."""

KV_TYPES = {"float32": 0, "float16": 1, "bfloat16": 30}
"""Types of keys and values, as ggml numbers them; llama.cpp's own default is float16."""

TOKENS = 256
"""Tokens of a prompt that run at once: their logits are kept, 4 bytes for each word of the vocabulary."""

CONTEXT = 512
"""The least context. One of twice, four times, ... is made for a request that needs it."""

SAMPLES = 256
"""Places of each file, of as many bytes each, by which a resumed recording knows its model again."""


class GgufModel:
    """A GGUF file that llama.cpp has mapped into memory, and its tokenizer."""

    def __init__(self, path: Path, loading: Loading) -> None:
        """Raise InputError for a file that is no MoE model, or that llama.cpp cannot load."""
        refuse(
            (loading.offload, "`offload` is for `model`: llama.cpp maps a GGUF file, and reads what it needs of it"),
            (loading.device not in ("auto", "cpu"), f"`device` {loading.device!r}: of a GGUF file, use auto or cpu"),
        )
        self.profile = of_gguf(str(path))
        self.path, self.loading, self.name = path, loading, self.profile.name
        self.library = library()
        layers = {"n_gpu_layers": 0} if loading.device == "cpu" else {}
        # Without the copy of weights in another layout, which would not fit where the file is mapped.
        self.model = self.library.load(path, use_extra_bufts=False, **layers)
        weakref.finalize(self, self.library.llama_model_free, self.model)
        self._vocabulary = self.library.llama_model_get_vocab(self.model)
        self.words: int = self.library.llama_vocab_n_tokens(self._vocabulary)

    @property
    def context(self) -> int:
        return int(self.library.llama_model_n_ctx_train(self.model))

    def ends(self, token: int) -> bool:
        """Return whether the model ends an answer with this token."""
        return bool(self.library.llama_vocab_is_eog(self._vocabulary, token))

    def prompt_tokens(self, said: Sequence[str], template: bool) -> Tokens:
        source = self.library.llama_model_chat_template(self.model, None) if template else None
        if source is None:
            return self._ids("\n".join(said), special=True)
        marks = {}
        for name in ("bos", "eos"):
            token = getattr(self.library, f"llama_vocab_{name}")(self._vocabulary)
            word = "" if token < 0 else self.library.llama_vocab_get_text(self._vocabulary, token).decode()
            marks[f"{name}_token"] = word
        try:
            return self._ids(_rendered(source.decode(), messages_of(said), marks), special=False)
        except TemplateError as error:
            raise InputError(f"the chat template of {self.name} fails: {error}") from error

    def response_tokens(self, text: str) -> Tokens:
        ids, end = self._ids(text, special=False), self.library.llama_vocab_eos(self._vocabulary)
        return ids if end < 0 or (ids and self.ends(ids[-1])) else [*ids, end]

    def text(self, tokens: Sequence[int]) -> str:
        ids = np.array(tokens, np.int32)
        text = np.empty(256 + 64 * len(ids), np.uint8)
        while True:
            given = (ids.ctypes.data, len(ids), text.ctypes.data, len(text), True, False)
            size = self.library.llama_detokenize(self._vocabulary, *given)
            if size >= 0:
                return text[:size].tobytes().decode("utf-8", "replace")
            text = np.empty(-size, np.uint8)

    @contextmanager
    def observed(self, wanted: Wanted, on_step: Callable[[int], None]) -> "Iterator[GgufRunner]":
        """Probe the model, and yield what lets it answer; gate probabilities are not read."""
        runner = GgufRunner(self, wanted, on_step)
        try:
            runner.probe()
            yield runner
        finally:
            runner.close()

    def _ids(self, text: str, special: bool) -> Tokens:
        """Return the tokens of a text; special: with those that the model's texts begin or end with."""
        encoded = text.encode()
        ids = np.empty(len(encoded) + 8, np.int32)
        given = (encoded, len(encoded), ids.ctypes.data, len(ids), special, True)
        tokens: Tokens = ids[: self.library.llama_tokenize(self._vocabulary, *given)].tolist()
        return tokens


class GgufRunner:
    """Answers one prompt after another, observed, as `tracer.answers.Runner`."""

    alone = False
    notes: Sequence[str] = ()

    def __init__(self, loaded: GgufModel, wanted: Wanted, on_step: Callable[[int], None]) -> None:
        self.loaded = loaded
        self._options, self._on_step = wanted, on_step
        self._picks = wanted.picked(loaded.profile.top_k, loaded.profile.experts)
        self._routers: Routers | None = None
        self._library, self._random = loaded.library, np.random.default_rng(0)
        self._context: int | None = None
        self._size = 0  # of the context, in tokens
        self._wanted: set[bytes] | None = None  # the tensors that are read; None: those of ROUTERS
        self._seen: dict[bytes, list[Copied]] = {}
        self._layers: dict[int, list[bytes]] = {}  # of each block in the order of execution: its ids, its weights
        self._error: BaseException | None = None
        self._callback = EVAL(self._evaluated)

    def probe(self) -> None:
        """Run two tokens to learn the names of the MoE layers' tensors. Raise InputError if the file has others."""
        self.begin(2)
        self._run([0, 1])
        for name in self._seen:
            if found := ROUTERS.fullmatch(name):
                self._layers.setdefault(int(found[1]), [name]).append(name)
        self._layers = {block: [names[0], names[-1]] for block, names in self._layers.items()}
        self._wanted = {name for names in self._layers.values() for name in names}
        model, expected = self.loaded, self.loaded.profile.moe_layers
        read = [b"topk" in ids and b"weights" in weights for ids, weights in self._layers.values()]
        if len(read) != expected or not all(read):
            raise InputError(
                f"{model.name} cannot be recorded: {sum(read)} of {expected} MoE layers show their routing"
            )
        if self._options.scores:
            self._wanted |= {PROBABILITIES % block for block in self._layers}
        if self._picks:
            blocks = list(self._layers)
            self._routers = Routers(model.path, blocks, model.profile.top_k)
            with located(model.name):
                once = {name for name, parts in self._seen.items() if len(parts) == 1}
                self._routers.probe(self._array, once, self._layers)
            self._wanted |= {self._routers.of(block) for block in blocks}

    def close(self) -> None:
        if self._context:
            self._library.llama_free(self._context)
        self._context, self._size = None, 0

    def meta(self) -> TraceMeta:
        profile = self.loaded.profile
        return TraceMeta(
            model=self.loaded.name,
            layers=profile.moe_layers,
            experts=profile.experts,
            top_k=profile.top_k,
            layer_names=tuple(f"blk.{block}" for block in self._layers),
            expert_bytes=profile.expert_bytes,
            dtype=profile.precision,
            hidden_size=profile.hidden_size,
            expert_intermediate_size=profile.expert_intermediate_size,
            expert_hidden_size=profile.expert_hidden_size or None,
            expert_matrices=profile.expert_matrices,
            lookahead=self._picks,
            candidates=self._options.candidates(profile.top_k, profile.experts),
            tools={"moe-expert-cache": version("moe-expert-cache"), **self._library.tools},
        )

    def compute(self) -> dict[str, Any]:
        loading = self.loaded.loading
        kept = "float16" if loading.dtype == "auto" else loading.dtype
        return {"weights_sha256": _fingerprint(self.loaded.path), "kv_dtype": kept, "device": loading.device}

    def seed(self, seed: int) -> None:
        self._random = np.random.default_rng(seed)

    def generate(self, prompts: Sequence[Tokens], limit: int, sampling: Answers) -> list[Answer]:
        return [self._answer(prompt, limit, sampling) for prompt in prompts]

    def force(self, prompts: Sequence[Tokens], responses: Sequence[Tokens]) -> list[Answer]:
        answers = []
        for prompt, response in zip(prompts, responses, strict=True):
            self.begin(len(prompt) + len(response))
            routed = [(self.feed([*prompt, *response[:-1]]), slice(None))]
            self._on_step(len(response))
            answers.append(Answer(prompt, response, routed))
        return answers

    def _answer(self, prompt: Tokens, limit: int, sampling: Answers) -> Answer:
        self.begin(len(prompt) + limit)
        passes, output = [self.feed(prompt)], list[int]()
        while True:
            output.append(self._next(sampling))
            self._on_step(1)
            if self.loaded.ends(output[-1]) or len(output) == limit:
                return Answer(prompt, output, [(part, slice(None)) for part in passes])
            passes.append(self.feed(output[-1:]))

    def begin(self, tokens: int) -> None:
        """Begin a request of at most so many tokens. The context's size depends on it alone, as rotations may on that.

        That is so of models whose positions are scaled in long contexts (LongRoPE).
        """
        size = CONTEXT
        while size < tokens:
            size *= 2
        if size == self._size:
            self._library.llama_memory_clear(self._library.llama_get_memory(self._context), True)
            return
        self.close()
        loading, kept = self.loaded.loading, dict[str, int]()
        usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        threads = loading.threads or usable  # more would wait for each other
        if loading.dtype != "auto":
            kept = dict.fromkeys(("type_k", "type_v"), KV_TYPES[loading.dtype])
            kept |= {"flash_attn_type": 0} if loading.dtype == "float32" else {}
        self._context = self._library.context(
            self.loaded.model,
            n_ctx=size,
            n_batch=TOKENS,
            n_ubatch=TOKENS,
            n_threads=threads,
            n_threads_batch=threads,
            cb_eval=cast(self._callback, c_void_p),
            **kept,
        )
        if not self._context:
            self._fail(f"has no context of {size} tokens")
        self._size = size

    def feed(self, tokens: Tokens) -> Pass:
        """Feed tokens, and return what they were routed to; raises InputError."""
        shown, ahead, scored = [], [], list[NDArray[np.float32]]()
        for first in range(0, len(tokens), TOKENS):
            part = tokens[first : first + TOKENS]
            self._run(part)
            shown.append(self._shown(len(part)))
            ahead.append(self._ahead(len(part)))
            if self._options.scores:
                read = np.stack([self._array(PROBABILITIES % block, np.float32) for block in self._layers], 1)
                scored.append(read if read.min() >= 0 and read.max() <= 1 else TRANSFORMS["softmax"](read))
            if first + TOKENS < len(tokens):
                self._on_step(0)
        ids, weights = (np.concatenate(parts) for parts in zip(*shown, strict=True))
        if not np.isfinite(weights).all():
            self._fail("weighs experts with values that are not finite")
        order = np.argsort(np.where(ids < 0, np.inf, -weights), axis=2, kind="stable")
        ids, weights = (np.take_along_axis(each, order, 2) for each in (ids, weights))
        more: dict[str, Any] = {"weights": weights.astype(np.float16)} if self._options.weights else {}
        if count := self._options.candidates(self.loaded.profile.top_k, self.loaded.profile.experts):
            more["candidates"], more["scores"] = candidates_of(ids, np.concatenate(scored), count)
        if self._picks:
            more["lookahead"], more["lookahead_scores"] = (np.concatenate(part) for part in zip(*ahead, strict=True))
        return Pass(0, ids, **more)

    def _ahead(self, tokens: int) -> tuple[NDArray[np.int32], NDArray[np.float16]]:
        """Return what routers pick ahead of time, and scores, [T, L, distances, picks] each, of what has run."""
        blocks, distances, count = list(self._layers), *((p.distances, p.count) if (p := self._picks) else ((), 0))
        shape = tokens, len(blocks), len(distances), count
        ids, scores = np.full(shape, -1, np.int32), np.zeros(shape, np.float16)
        for place, distance in enumerate(distances):
            for layer, block in enumerate(blocks[distance:], start=distance):
                assert self._routers
                states = self._array(self._routers.of(blocks[layer - distance]), np.float32)
                at = slice(None), layer, place
                ids[at], scores[at] = self._routers.pick(block, states, count)
        return ids, scores

    def _shown(self, tokens: int) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """Return experts, -1 where there is none, and weights, [T, L, k] each, of what has run; raises InputError."""
        profile = self.loaded.profile
        shape = (tokens, len(self._layers), profile.top_k)
        ids, weights = np.full(shape, -1, np.int32), np.zeros(shape, np.float32)
        for layer, (block, names) in enumerate(self._layers.items()):
            index, weight = self._array(names[0], np.int32), self._array(names[1], np.float32)
            rows, k = index.shape
            if rows != tokens or k > profile.top_k or weight.size != index.size:
                most = f"{tokens} tokens and at most {profile.top_k} experts each"
                self._fail(f"shows {index.shape} experts in blk.{block} for {most}")
            ids[:, layer, :k] = index
            weights[:, layer, :k] = weight.reshape(rows, k)
        routed = (ids >= 0) & (ids < profile.experts)
        return np.where(routed, ids, -1), np.where(routed, weights, 0)

    def _array(self, name: bytes, kind: type) -> NDArray[Any]:
        """Return a tensor of what has run, [rows, columns]; it may have run in parts."""
        parts = [part.array(kind) for part in self._seen.get(name, [])]
        return np.concatenate(parts) if parts else np.empty((0, 0), kind)

    def _run(self, tokens: Tokens) -> None:
        """Run at most TOKENS tokens, and keep the tensors that are wanted in `_seen`."""
        self._seen.clear()
        status = self._library.decode(self._context, tokens, every=True)
        if self._error:
            raise self._error
        if status:
            self._fail(f"cannot run {len(tokens)} tokens (status {status})")

    def _evaluated(self, tensor: int, wanted: bool, _: Any) -> bool:
        """Return whether a tensor is wanted; read one that was. An exception cannot pass through the library."""
        try:
            name = self._library.ggml_get_name(tensor)
            if wanted:
                if self._wanted:
                    return name in self._wanted
                return (NAMED if self._picks else ROUTERS).fullmatch(name) is not None
            self._seen.setdefault(name, []).append(self._library.copied(tensor))
        except BaseException as error:
            self._error = error
            return False
        return True

    def _next(self, sampling: Answers) -> int:
        """Return the token that follows the last one."""
        logits = np.ctypeslib.as_array(self._library.llama_get_logits_ith(self._context, -1), (self.loaded.words,))
        if not sampling.temperature:
            return int(logits.argmax())
        drawn = np.exp((logits - logits.max()).astype(np.float64) / sampling.temperature)
        drawn /= drawn.sum()
        order = np.argsort(-drawn, kind="stable")
        before = np.cumsum(drawn[order]) - drawn[order]
        order = order[: max(1, np.count_nonzero(before < sampling.top_p))]
        return int(self._random.choice(order, p=drawn[order] / drawn[order].sum()))

    def _fail(self, reason: str) -> NoReturn:
        raise InputError("; ".join([f"{self.loaded.name} {reason} in llama.cpp", *self._library.errors[:1]]))


def _fingerprint(path: Path) -> str:
    """Hash a sample of a model's files."""
    digest = hashlib.sha256()
    for part in parts(str(path.expanduser())):
        with open(part, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            digest.update(str(size).encode())
            for place in range(SAMPLES):
                file.seek(size * place // SAMPLES)
                digest.update(file.read(SAMPLES))
    return digest.hexdigest()[:16]


def _rendered(source: str, messages: list[dict[str, str]], marks: dict[str, str]) -> str:
    """Return messages as a chat template writes them, with what transformers gives templates besides."""

    def refused(reason: str) -> NoReturn:
        raise TemplateError(reason)

    sandbox = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    sandbox.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False, **options)
    sandbox.globals |= {"raise_exception": refused, "strftime_now": lambda form: datetime.now().strftime(form)}
    return sandbox.from_string(source).render(messages=messages, add_generation_prompt=True, **marks)
