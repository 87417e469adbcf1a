"""llama.cpp's C interface, from the library that the package xllamacpp ships: what recording and timing call of it.

The structs that it takes change from build to build, and one of another build would be read wrongly without a word.
So the extra `llama` pins a build, and the values that the library fills in by default are compared with that build's
before anything else is called. Tensors are read by functions alone. The interface stands in llama_library.toml.
"""

import ctypes
import os
from collections.abc import Callable, Sequence
from ctypes import c_bool, c_char_p, c_int, c_int8, c_int32, c_void_p
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from traces.errors import InputError
from traces.files import read_toml

ERROR, CONTINUED = 4, 5
"""Levels of messages."""

EVAL = ctypes.CFUNCTYPE(c_bool, c_void_p, c_bool, c_void_p)
"""Called with each tensor of a graph: whether it is wanted (True), and again when it is computed (False)."""

LOG = ctypes.CFUNCTYPE(None, c_int, c_char_p, c_void_p)

INTERFACE: dict[str, dict[str, list[Any]]] = read_toml(Path(__file__).with_suffix(".toml"))
"""Fields of the two structs of parameters, with their default values, and the functions that are called."""

BEYOND = ("beyond", c_int8 * 256)
"""Room behind the fields, which a build with more of them fills before its defaults are compared."""


def _fields(struct: str) -> list[tuple[str, Any]]:
    return [*((name, getattr(ctypes, f"c_{kind}")) for name, (kind, *_) in INTERFACE[struct].items()), BEYOND]


class ModelParams(ctypes.Structure):
    """How a model is loaded."""

    _fields_ = _fields("model")


class ContextParams(ctypes.Structure):
    """How a model is run."""

    _fields_ = _fields("context")


class Batch(ctypes.Structure):
    """Tokens of one sequence, behind those it has; `logits` says which of them give logits."""

    _fields_ = [
        ("n_tokens", c_int32),
        ("token", c_void_p),
        *((name, c_void_p) for name in ("embd", "pos", "n_seq_id", "seq_id")),
        ("logits", c_void_p),
    ]


KINDS = {
    "none": None,
    "floats": ctypes.POINTER(ctypes.c_float),
    "log": LOG,
    "model": ModelParams,
    "context": ContextParams,
    "batch": Batch,
}
"""Types of results and arguments beside those of ctypes."""


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
        for name, kinds in INTERFACE["functions"].items():
            function = getattr(self._functions, name)
            types = [KINDS[kind] if kind in KINDS else getattr(ctypes, f"c_{kind}") for kind in kinds]
            function.restype, function.argtypes = types[0], types[1:]
            setattr(self, name, function)
        self.tools = {"xllamacpp": version("xllamacpp"), "llama.cpp": self.llama_version().decode()}
        require_layout(self.llama_model_default_params(), "model", self.tools)
        require_layout(self.llama_context_default_params(), "context", self.tools)
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


def require_layout(found: ctypes.Structure, struct: str, tools: dict[str, str]) -> None:
    """Raise InputError for default values that are not those of the build whose layout this is."""
    for name, (_, *default) in INTERFACE[struct].items():
        value = default[0] if default else None
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
