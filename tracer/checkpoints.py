"""Find a model in a folder or on the hub, and refuse one whose files are damaged or whose weights are not whole."""

import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from traceback import walk_tb
from typing import Any

import huggingface_hub
import torch
import transformers
from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
from huggingface_hub.errors import HfHubHTTPError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForMultimodalLM,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
)

from traces.errors import InputError
from traces.facts import parse_json
from traces.files import plain

ANSWERING = (AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoModelForImageTextToText, AutoModelForMultimodalLM)

MOST_LAYERS = 10_000
"""Of a model that is built."""

JSON_FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")
"""Files of a model whose damage transformers reports without their names, or passes over."""

RUST = "pyo3_runtime"
"""Module of what is raised where code in Rust, such as tokenizers, panics: no Exception."""

OURS = ("tracer.", "replay.", "sim.", "policies.")
"""Packages whose errors are defects of this project."""


@contextmanager
def blaming(what: str) -> Iterator[None]:
    """Raise InputError, one line that starts with `what`, for whatever a model's own code raises; our errors stay.

    Code of transformers, torch and checkpoints raises any kind of error for a model that does not fit together.
    """
    try:
        yield
    except InputError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__module__ != RUST:
            raise
        *_, (innermost, _) = walk_tb(error.__traceback__)
        if innermost.f_globals.get("__name__", "").startswith(OURS):
            raise
        lines = (str(error).strip() or type(error).__name__).splitlines()
        reason = " ".join(lines[: 2 if lines[0].endswith(":") else 1])
        if isinstance(error, torch.OutOfMemoryError):
            reason = "out of memory; a smaller --batch-size or --dtype may fit"
        raise InputError(f"{what}: {reason}") from error


@dataclass(frozen=True)
class Found:
    """A model that was found, before any of its weights are read."""

    name: str
    source: str  # a folder or a hub id
    config: Any
    tokenizer: Any  # None: there is none, and none is needed
    auto: Any  # the auto class that loads it


def find_model(source: str, trust_remote_code: bool = False, needs_tokenizer: bool = True) -> Found:
    """Read config and tokenizer of `source`, a folder or a hub id; raises InputError."""
    _be_quiet()
    folder = Path(source)
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise InputError(f"{folder} is no model: it has no config.json")
        for file in folder.iterdir():
            if not file.is_dir():
                plain(file)
        for name in JSON_FILES:
            if (folder / name).is_file() and not isinstance(_json(folder / name), dict):
                raise InputError(f"{folder / name} is no JSON object: it is damaged; get it again")
    elif source.count("/") > 1 or source.startswith((".", "/", "~")):
        raise InputError(f"no model at {source}: there is no such folder")
    with blaming(f"cannot load the model {source}"):
        if not folder.is_dir():
            _require_hub(source)
        own_code = {"trust_remote_code": trust_remote_code}
        with _naming_the_flag(source):
            config = AutoConfig.from_pretrained(source, **own_code)
        _require_finite(source, config.to_dict())
        if (layers := getattr(config.get_text_config(), "num_hidden_layers", 0)) > MOST_LAYERS:
            raise InputError(f"the config of {source} has {layers} layers: at most {MOST_LAYERS:,} are built")
        tokenizer = None
        if needs_tokenizer or _has_tokenizer(folder):
            tokenizer = AutoTokenizer.from_pretrained(source, **own_code)
        name = folder.resolve().name if folder.is_dir() else source
        return Found(name, source, config, tokenizer, _class_for(source, config))


def _json(path: Path) -> Any:
    try:
        return parse_json(path.read_bytes(), str(path))
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from error


def _has_tokenizer(folder: Path) -> bool:
    """Whether there are a tokenizer's files, or may be; a model that is fed with token ids needs none."""
    files = ("tokenizer_config.json", "tokenizer.json", "tokenizer.model", "vocab.json", "spiece.model")
    return not folder.is_dir() or any((folder / file).is_file() for file in files)


UNLIMITED = "time_step_limit"
"""The one number of a config (of Mamba layers) that may be infinite."""


def _require_finite(source: str, held: Any, key: str = "") -> None:
    """InputError naming a number of the config that is NaN or infinite: such a model routes by nonsense."""
    if isinstance(held, dict):
        for name, value in held.items():
            if name != UNLIMITED:
                _require_finite(source, value, f"{key}.{name}" if key else str(name))
    elif isinstance(held, list | tuple):
        for value in held:
            _require_finite(source, value, key)
    elif isinstance(held, float) and not math.isfinite(held):
        raise InputError(f"the config of {source} has {key} {held}: a finite number is needed")


@contextmanager
def _naming_the_flag(source: str) -> Iterator[None]:
    """Raise InputError that names the option which runs code of a model, where transformers asks for it."""
    try:
        yield
    except ValueError as error:
        if "trust_remote_code" not in str(error):
            raise
        raise InputError(f"{source} comes with code of its own, which runs only with --trust-remote-code") from error


def _class_for(source: str, config: Any) -> Any:
    """The auto class that loads a model which answers text: the one that the checkpoint was saved from, if it does."""
    if "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {}):
        return AutoModelForCausalLM
    fitting: dict[Any, Any] = {
        auto: auto._model_mapping[type(config)] for auto in ANSWERING if type(config) in auto._model_mapping
    }
    if not fitting:
        raise InputError(f"{source} is a {config.model_type}, which transformers cannot let answer a text")
    architectures = getattr(config, "architectures", None)
    saved_from = architectures if isinstance(architectures, list) else []
    return next((auto for auto, kind in fitting.items() if kind.__name__ in saved_from), next(iter(fitting)))


def _be_quiet() -> None:
    """No warnings and no progress bars of the libraries: what matters of them is in our errors."""
    messages: Any = transformers.utils.logging  # untyped
    messages.set_verbosity_error()
    messages.disable_progress_bar()
    hub_messages: Any = huggingface_hub.logging
    hub_messages.set_verbosity_error()
    logging.getLogger("accelerate").setLevel(logging.ERROR)


def _require_hub(source: str) -> None:
    """Fail at once, where transformers would try for a minute, if a model is not cached and no hub answers."""
    if not try_to_load_from_cache(source, "config.json"):
        with blaming(f"there is no folder {source}, and the hub cannot be asked for it"), suppress(HfHubHTTPError):
            get_hf_file_metadata(hf_hub_url(source, "config.json"))


def require_weights(source: str, loading: dict[str, Any]) -> None:
    """Refuse a checkpoint that leaves weights as they were drawn at random: its routing would be random too."""
    missing = {*loading["missing_keys"], *(name for name, *_ in loading["mismatched_keys"])}
    if missing:
        raise InputError(
            f"{source} is no whole checkpoint of its model: {len(missing)} weights are missing or of another shape, "
            f"such as {', '.join(sorted(missing)[:3])}; they would be random"
        )


def notes_of(loading: dict[str, Any]) -> tuple[str, ...]:
    """Return a note of weights for which the model has no place, as of layers that its config.json does not count."""
    surplus = sorted(loading["unexpected_keys"])
    if not surplus:
        return ()
    such = ", ".join(surplus[:3])
    return (
        f"{len(surplus)} weights of the checkpoint, such as {such}, have no place in the model that its config is of",
    )


def require_numbers(source: str, model: torch.nn.Module) -> None:
    """Refuse a checkpoint with a weight that is NaN, or infinite: it would route by nonsense. Meta tensors pass."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_meta or not tensor.is_floating_point() or not tensor.numel():
            continue
        least, most = (float(each) for each in torch.aminmax(tensor.detach()))
        is_weight = isinstance(tensor, torch.nn.Parameter)  # of buffers, masks are infinite
        if math.isnan(least) or (is_weight and math.inf in (-least, most)):
            raise InputError(f"{source}: {name} holds values that are not finite: the checkpoint is damaged")
