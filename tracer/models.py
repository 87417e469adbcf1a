"""Load a causal language model and its tokenizer from a hub id or a folder; a failure is told in one line."""

from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer

from tracer.hook import ExpertsHook
from traces.errors import InputError, unknown
from traces.schema import TraceMeta

SMALL = 50_000_000
"""Parameters below which operations are too small to share among threads, which would wait for each other."""

UNLOADABLE = (
    OSError,
    ValueError,
    ImportError,
    RuntimeError,
    KeyError,
    AttributeError,
    TypeError,
    SafetensorError,
)
"""What transformers raises for a model or tokenizer that is missing, unreachable, damaged or unknown."""

DTYPES = ("auto", "float32", "bfloat16", "float16")


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to generate."""

    name: str
    model: Any  # transformers.PreTrainedModel
    tokenizer: Any  # transformers.PreTrainedTokenizerBase

    @property
    def stop_ids(self) -> list[int]:
        """Token ids that end a response."""
        ids = self.model.generation_config.eos_token_id
        ids = self.tokenizer.eos_token_id if ids is None else ids
        return [] if ids is None else list(ids) if isinstance(ids, list) else [int(ids)]

    @property
    def pad_id(self) -> int:
        """A token id to fill batches with; it is masked, so any will do."""
        pad = self.tokenizer.pad_token_id
        return int(pad) if pad is not None else (self.stop_ids or [0])[0]


def load_model(source: str, dtype: str, device: str) -> LoadedModel:
    """Load `source`, a folder or a hub id, onto `device` (auto: CUDA if there is one); raises InputError."""
    if dtype not in DTYPES:
        raise unknown("dtype", dtype, DTYPES)
    messages: Any = transformers.utils.logging  # untyped
    messages.set_verbosity_error()
    messages.disable_progress_bar()
    place = _device(device)
    folder = Path(source)
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise InputError(f"{folder} is no model: it has no config.json")
    elif source.count("/") > 1 or source.startswith((".", "/", "~")):
        raise InputError(f"no model at {source}: there is no such folder")
    try:
        tokenizer = AutoTokenizer.from_pretrained(source)
        model: Any = AutoModelForCausalLM.from_pretrained(source, dtype=dtype)
        model = model.to(place).eval()
        if place.type == "cpu" and model.num_parameters() < SMALL:
            torch.set_num_threads(1)
    except torch.OutOfMemoryError as error:
        raise InputError(f"{source} does not fit on {place}: {error}") from error
    except UNLOADABLE as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise InputError(f"cannot load the model {source}: {reason}") from error
    return LoadedModel(folder.resolve().name if folder.is_dir() else source, model, tokenizer)


def describe(loaded: LoadedModel, hook: ExpertsHook) -> TraceMeta:
    """What a trace says about the model that it was recorded from; `hook` has probed it."""
    module = hook.modules[0]
    weights = list(module.parameters())
    config = loaded.model.config.get_text_config()
    hidden = getattr(config, "hidden_size", None)
    return TraceMeta(
        model=loaded.name,
        layers=len(hook.names),
        experts=hook.experts,
        top_k=hook.top_k,
        layer_names=tuple(hook.names),
        expert_bytes=sum(w.nbytes for w in weights) // hook.experts or None,
        dtype=str(weights[0].dtype).removeprefix("torch.") if weights else None,
        mode="generate",
        revision=getattr(loaded.model.config, "_commit_hash", None),
        hidden_size=hidden,
        expert_intermediate_size=_inner_size(module, hidden),
        tools={name: version(name) for name in ("moe-expert-cache", "torch", "transformers")},
    )


def _inner_size(module: torch.nn.Module, hidden: int | None) -> int | None:
    """The inner size of an expert, from its down projection [E, hidden, inner], either way round."""
    down = getattr(module, "down_proj", None)
    if not isinstance(down, torch.Tensor) or down.dim() != 3 or hidden not in down.shape[1:]:
        return None
    return int(down.shape[2] if down.shape[1] == hidden else down.shape[1])


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise InputError(f"device {name!r} cannot be used here: {str(error).splitlines()[0]}") from error
    return device
