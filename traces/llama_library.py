"""llama.cpp's C interface, from the library that the package xllamacpp ships: what recording and timing call of it.

The structs that it takes change from build to build, and one of another build would be read wrongly without a word.
So the extra `llama` pins a build, and the values that the library fills in by default are compared with that build's
before anything else is called. Tensors are read by functions alone. Source: include/llama.h and ggml.h at b11549.
"""

import ctypes
import os
from collections.abc import Callable, Sequence
from ctypes import POINTER, c_bool, c_char_p, c_float, c_int, c_int8, c_int32, c_int64, c_size_t, c_uint32, c_void_p
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from traces.errors import InputError

ERROR, CONTINUED = 4, 5
"""Levels of messages."""

EVAL = ctypes.CFUNCTYPE(c_bool, c_void_p, c_bool, c_void_p)
"""Called with each tensor of a graph: whether it is wanted (True), and again when it is computed (False)."""

LOG = ctypes.CFUNCTYPE(None, c_int, c_char_p, c_void_p)

MODEL: list[tuple[str, Any, Any]] = [
    ("devices", c_void_p, None),
    ("tensor_buft_overrides", c_void_p, None),
    ("n_gpu_layers", c_int32, -1),  # all that fit
    ("split_mode", c_int, 1),
    ("load_mode", c_int, -1),  # mmap, where the system has it
    ("lazy_mode", c_int, 1),
    ("main_gpu", c_int32, 0),
    ("tensor_split", c_void_p, None),
    ("progress_callback", c_void_p, None),
    ("progress_callback_user_data", c_void_p, None),
    ("kv_overrides", c_void_p, None),
    ("vocab_only", c_bool, False),
    ("check_tensors", c_bool, False),
    ("use_extra_bufts", c_bool, True),  # copies weights into layouts that are faster to compute with
    ("no_host", c_bool, False),
    ("no_alloc", c_bool, False),
    ("load_mtp", c_bool, False),
]

CONTEXT: list[tuple[str, Any, Any]] = [
    ("n_ctx", c_uint32, 512),
    ("n_batch", c_uint32, 2048),
    ("n_ubatch", c_uint32, 512),
    ("n_seq_max", c_uint32, 1),
    ("n_rs_seq", c_uint32, 0),
    ("n_outputs_max", c_uint32, 0),  # n_batch
    ("n_outputs_max_per_seq", c_uint32, 1),
    ("n_threads", c_int32, 4),
    ("n_threads_batch", c_int32, 4),
    ("ctx_type", c_int, 0),
    ("rope_scaling_type", c_int, -1),
    ("pooling_type", c_int, -1),
    ("attention_type", c_int, -1),
    ("flash_attn_type", c_int, -1),  # where it is possible; 0: off
    ("rope_freq_base", c_float, 0),
    ("rope_freq_scale", c_float, 0),
    ("yarn_ext_factor", c_float, -1),
    ("yarn_attn_factor", c_float, -1),
    ("yarn_beta_fast", c_float, -1),
    ("yarn_beta_slow", c_float, -1),
    ("yarn_orig_ctx", c_uint32, 0),
    ("defrag_thold", c_float, -1),
    ("cb_eval", c_void_p, None),
    ("cb_eval_user_data", c_void_p, None),
    ("type_k", c_int, 1),  # a ggml_type
    ("type_v", c_int, 1),
    ("moe_cache_size", c_size_t, 0),
    ("abort_callback", c_void_p, None),
    ("abort_callback_data", c_void_p, None),
    ("embeddings", c_bool, False),
    ("offload_kqv", c_bool, True),
    ("no_perf", c_bool, True),
    ("op_offload", c_bool, True),
    ("swa_full", c_bool, True),
    ("kv_unified", c_bool, False),
    ("samplers", c_void_p, None),
    ("n_samplers", c_size_t, 0),
    ("ctx_other", c_void_p, None),
]
"""Fields, types and default values of the two structs of parameters."""

BEYOND = ("beyond", c_int8 * 256)
"""Room behind the fields, which a build with more of them fills before its defaults are compared."""


class ModelParams(ctypes.Structure):
    """How a model is loaded."""

    _fields_ = [*((name, kind) for name, kind, _ in MODEL), BEYOND]


class ContextParams(ctypes.Structure):
    """How a model is run."""

    _fields_ = [*((name, kind) for name, kind, _ in CONTEXT), BEYOND]


class Batch(ctypes.Structure):
    """Tokens of one sequence, behind those it has; `logits` says which of them give logits."""

    _fields_ = [
        ("n_tokens", c_int32),
        ("token", c_void_p),
        *((name, c_void_p) for name in ("embd", "pos", "n_seq_id", "seq_id")),
        ("logits", c_void_p),
    ]


TEXT = (c_void_p, c_char_p, c_int32, c_void_p, c_int32, c_bool, c_bool)

FUNCTIONS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "ggml_backend_tensor_get": (None, (c_void_p, c_void_p, c_size_t, c_size_t)),
    "ggml_get_name": (c_char_p, (c_void_p,)),
    "ggml_nbytes": (c_size_t, (c_void_p,)),
    "ggml_nelements": (c_int64, (c_void_p,)),
    "ggml_nrows": (c_int64, (c_void_p,)),
    "llama_backend_init": (None, ()),
    "llama_context_default_params": (ContextParams, ()),
    "llama_decode": (c_int32, (c_void_p, Batch)),
    "llama_detokenize": (c_int32, (c_void_p, c_void_p, c_int32, c_void_p, c_int32, c_bool, c_bool)),
    "llama_free": (None, (c_void_p,)),
    "llama_get_logits_ith": (POINTER(c_float), (c_void_p, c_int32)),
    "llama_get_memory": (c_void_p, (c_void_p,)),
    "llama_init_from_model": (c_void_p, (c_void_p, ContextParams)),
    "llama_log_set": (None, (LOG, c_void_p)),
    "llama_memory_clear": (None, (c_void_p, c_bool)),
    "llama_model_chat_template": (c_char_p, (c_void_p, c_char_p)),
    "llama_model_default_params": (ModelParams, ()),
    "llama_model_free": (None, (c_void_p,)),
    "llama_model_get_vocab": (c_void_p, (c_void_p,)),
    "llama_model_load_from_file": (c_void_p, (c_char_p, ModelParams)),
    "llama_model_n_ctx_train": (c_int32, (c_void_p,)),
    "llama_tokenize": (c_int32, TEXT),
    "llama_version": (c_char_p, ()),
    "llama_vocab_bos": (c_int32, (c_void_p,)),
    "llama_vocab_eos": (c_int32, (c_void_p,)),
    "llama_vocab_get_text": (c_char_p, (c_void_p, c_int32)),
    "llama_vocab_is_eog": (c_bool, (c_void_p, c_int32)),
    "llama_vocab_n_tokens": (c_int32, (c_void_p,)),
}
"""What is called, with the types of what it returns and of its arguments."""


class Copied(NamedTuple):
    """The bytes of a tensor. What happens between two layers meets cold caches: numpy's part comes after the pass."""

    raw: Any
    size: int
    rows: int
    columns: int

    def array(self, kind: type) -> NDArray[Any]:
        """Return numbers of 4 bytes, [rows, columns], which may be columns of a wider tensor."""
        stride = (self.size - 4 * self.columns) // (self.rows - 1) if self.rows > 1 else self.size
        return np.ndarray((self.rows, self.columns), kind, self.raw, strides=(stride, 4))


class Library:
    """The library, loaded: its functions are attributes. `errors` are the lines that it has complained in."""

    def __init__(self) -> None:
        import xllamacpp  # the extra `llama`

        self._functions = ctypes.CDLL(xllamacpp.xllamacpp.__file__)
        for name, (result, arguments) in FUNCTIONS.items():
            function = getattr(self._functions, name)
            function.restype, function.argtypes = result, arguments
            setattr(self, name, function)
        self.tools = {"xllamacpp": version("xllamacpp"), "llama.cpp": self.llama_version().decode()}
        require_layout(self.llama_model_default_params(), MODEL, self.tools)
        require_layout(self.llama_context_default_params(), CONTEXT, self.tools)
        self.errors: list[str] = []
        self._log = LOG(self._logged)
        self.llama_log_set(self._log, None)
        self.llama_backend_init()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        raise AttributeError(name)  # for the types: all attributes but these are functions

    def load(self, path: Path, **settings: Any) -> int:
        """Return the model of a GGUF file, for `llama_model_free`. Raise InputError where llama.cpp cannot load it."""
        self.errors.clear()
        model: int = self.llama_model_load_from_file(
            os.fsencode(path.expanduser()), _with(self.llama_model_default_params(), settings)
        )
        if not model:
            raise InputError(f"llama.cpp cannot load {path}: {'; '.join(self.errors[:1])}")
        return model

    def context(self, model: int, **settings: Any) -> int:
        """Return a context of a model, for `llama_free`; 0: there is none, and `errors` says why."""
        self.errors.clear()
        return self.llama_init_from_model(model, _with(self.llama_context_default_params(), settings)) or 0

    def decode(self, context: int | None, tokens: Sequence[int], every: bool = False) -> int:
        """Run tokens behind those of a context, with the logits of every one or the last; return a status, 0: done."""
        ids, wanted = np.array(tokens, np.int32), np.ones(len(tokens), np.int8)
        self.errors.clear()
        logits = wanted.ctypes.data if every else None
        return int(self.llama_decode(context, Batch(n_tokens=len(ids), token=ids.ctypes.data, logits=logits)))

    def copied(self, tensor: int) -> "Copied":
        """Return the content of a tensor as it is now."""
        size, count, rows = self.ggml_nbytes(tensor), self.ggml_nelements(tensor), self.ggml_nrows(tensor)
        raw = ctypes.create_string_buffer(size)
        self.ggml_backend_tensor_get(tensor, raw, 0, size)
        return Copied(raw, size, rows, count // rows)

    def _logged(self, level: int, text: bytes, _: Any) -> None:
        if level == ERROR:
            self.errors.append(text.decode("utf-8", "replace").strip())


def _with(settings: ctypes.Structure, stated: dict[str, Any]) -> ctypes.Structure:
    for name, value in stated.items():
        setattr(settings, name, value)
    return settings


def require_layout(found: ctypes.Structure, fields: list[tuple[str, Any, Any]], tools: dict[str, str]) -> None:
    """Raise InputError for default values that are not those of the build whose layout this is."""
    for name, _, value in fields:
        if getattr(found, name) != value:
            raise InputError(
                f"this llama.cpp ({', '.join(' '.join(tool) for tool in tools.items())}) has another layout of its "
                f"parameters than the one that is known here: {name} is {getattr(found, name)!r} by default, not "
                f"{value!r}; install the extra again: pip install 'moe-expert-cache[llama]'"
            )


@cache
def library() -> Library:
    """Return the library. Raise ModuleNotFoundError without the extra, InputError for another build."""
    return Library()
