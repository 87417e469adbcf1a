"""Load a causal language model and its tokenizer from a hub id or a folder; a failure is told in one line."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from traceback import walk_tb
from typing import Any

import huggingface_hub
import torch
import transformers
from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
from huggingface_hub.errors import HfHubHTTPError
from transformers import AutoModelForCausalLM, AutoTokenizer

from tracer.hook import ExpertsHook
from traces.errors import InputError, unknown
from traces.schema import TraceMeta

SMALL = 50_000_000
"""Parameters below which operations are too small to share among threads, which would wait for each other."""

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


@contextmanager
def blaming(what: str) -> Iterator[None]:
    """Tell in one line that starts with `what` whatever a model's own code raises; our own errors stay as they are.

    Code of transformers, torch and checkpoints raises any kind of error for a model that does not fit together.
    """
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        *_, (innermost, _) = walk_tb(error.__traceback__)
        if innermost.f_globals.get("__name__", "").startswith("tracer."):
            raise
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        if isinstance(error, torch.OutOfMemoryError):
            reason = "out of memory; a smaller --batch-size or --dtype may fit"
        raise InputError(f"{what}: {reason}") from error


def load_model(source: str, dtype: str, device: str) -> LoadedModel:
    """Load `source`, a folder or a hub id, onto `device` (auto: CUDA if there is one); raises InputError."""
    if dtype not in DTYPES:
        raise unknown("dtype", dtype, DTYPES)
    _be_quiet()
    place = _device(device)
    folder = Path(source)
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise InputError(f"{folder} is no model: it has no config.json")
    elif source.count("/") > 1 or source.startswith((".", "/", "~")):
        raise InputError(f"no model at {source}: there is no such folder")
    with blaming(f"cannot load the model {source}"):
        if not folder.is_dir():
            _require_hub(source)
        tokenizer = AutoTokenizer.from_pretrained(source)
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            source, dtype=dtype, ignore_mismatched_sizes=True, output_loading_info=True
        )
        model, loading = loaded
        _require_weights(source, loading)
        model = model.to(place).eval()
    if place.type == "cpu" and model.num_parameters() < SMALL:
        torch.set_num_threads(1)
    return LoadedModel(folder.resolve().name if folder.is_dir() else source, model, tokenizer)


def _be_quiet() -> None:
    """No warnings and no progress bars of the libraries: what matters of them is in our errors."""
    messages: Any = transformers.utils.logging  # untyped
    messages.set_verbosity_error()
    messages.disable_progress_bar()
    hub_messages: Any = huggingface_hub.logging
    hub_messages.set_verbosity_error()


def _require_hub(source: str) -> None:
    """Fail at once, where transformers would try for a minute, if a model is not cached and no hub answers."""
    if not try_to_load_from_cache(source, "config.json"):
        with blaming(f"there is no folder {source}, and the hub cannot be asked for it"), suppress(HfHubHTTPError):
            get_hf_file_metadata(hf_hub_url(source, "config.json"))


def _require_weights(source: str, loading: dict[str, Any]) -> None:
    """Refuse a checkpoint that leaves weights as they were drawn at random: its routing would be random too."""
    missing = {*loading["missing_keys"], *(name for name, *_ in loading["mismatched_keys"])}
    if missing:
        raise InputError(
            f"{source} is no whole checkpoint of its model: {len(missing)} weights are missing or of another shape, "
            f"such as {', '.join(sorted(missing)[:3])}; they would be random"
        )


def describe(loaded: LoadedModel, hook: ExpertsHook) -> TraceMeta:
    """What a trace says about the model that it was recorded from; `hook` has probed it."""
    module = hook.modules[0]
    weights = list(module.parameters())
    # Weights have an expert per row, and maybe rows beyond E; or, flat, the rows of all experts.
    sizes = [w[0].nbytes if w.dim() > 2 else w.nbytes // hook.experts for w in weights]
    config = loaded.model.config.get_text_config()
    hidden = getattr(config, "hidden_size", None)
    return TraceMeta(
        model=loaded.name,
        layers=len(hook.names),
        experts=hook.experts,
        top_k=hook.top_k,
        layer_names=tuple(hook.names),
        expert_bytes=sum(sizes) or None,
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
