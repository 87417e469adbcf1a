"""Find a model in a folder or on the hub, and load it with its tokenizer: the one door for checkpoints."""

import atexit
import logging
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import huggingface_hub
import torch
import transformers
from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
from huggingface_hub.errors import HfHubHTTPError

from tracer.answers import LoadedModel
from tracer.blaming import blaming
from tracer.loading import Loading
from traces.errors import InputError

SMALL = 50_000_000
"""Parameters below which operations are too small to share among threads, which would wait for each other."""

ANSWERING = [f"AutoModelFor{kind}" for kind in ("CausalLM", "Seq2SeqLM", "ImageTextToText", "MultimodalLM")]

TOKENIZER_FILES = ("tokenizer_config.json", "tokenizer.json", "tokenizer.model", "vocab.json", "spiece.model")


def load_model(source: str, options: Loading) -> LoadedModel:
    """Load `source`, a folder or a hub id. Raise InputError."""
    name = ("cuda" if torch.cuda.is_available() else "cpu") if options.device == "auto" else options.device
    try:
        device = torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        raise InputError(f"device {name!r} cannot be used here: {str(error).splitlines()[0]}") from error
    found = find_model(source)
    placement = _offloaded(options, device) if options.offload else {}
    with blaming(f"cannot load the model {source}"):
        loaded: Any = found.auto.from_pretrained(
            source,
            dtype=options.dtype,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
            trust_remote_code=False,
            **placement,
        )
        model, loading = loaded
        require_weights(source, loading)
        model = (model if options.offload else model.to(device)).eval()
    if options.threads or (device.type == "cpu" and model.num_parameters() < SMALL):
        torch.set_num_threads(options.threads or 1)
    return LoadedModel(found.name, model, found.tokenizer, notes_of(loading))


def _offloaded(options: Loading, device: torch.device) -> dict[str, Any]:
    """Return settings of from_pretrained() that put onto the device what fits, and offload the rest."""
    from accelerate.utils import get_max_memory

    main = "cpu" if device.type == "cpu" else (device.index or 0)
    memory = get_max_memory()
    if options.max_memory is not None:
        memory[main] = options.max_memory
    if options.offload == "disk" and main != "cpu":
        memory["cpu"] = 0
    folder = options.offload_folder
    if folder is None:
        folder = Path(tempfile.mkdtemp(prefix="moe-trace-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return {"device_map": "auto", "max_memory": memory, "offload_folder": str(folder)}


class Found(NamedTuple):
    """A model before any of its weights are read."""

    name: str
    config: Any
    tokenizer: Any  # None: there is none, and none is needed
    auto: Any  # the auto class that loads it


def find_model(source: str, needs_tokenizer: bool = True) -> Found:
    """Read config and tokenizer of `source`, a folder or a hub id. Raise InputError."""
    messages: Any = transformers.utils.logging  # what matters of warnings is in our errors
    messages.set_verbosity_error()
    messages.disable_progress_bar()
    hub_messages: Any = huggingface_hub.logging
    hub_messages.set_verbosity_error()
    logging.getLogger("accelerate").setLevel(logging.ERROR)
    folder = Path(source)
    if not folder.is_dir() and (source.count("/") > 1 or source.startswith((".", "/", "~"))):
        raise InputError(f"no model at {source}: there is no such folder")
    if not folder.is_dir() and not try_to_load_from_cache(source, "config.json"):  # transformers tries for a minute
        with blaming(f"there is no folder {source}, and the hub cannot be asked for it"), suppress(HfHubHTTPError):
            get_hf_file_metadata(hf_hub_url(source, "config.json"))
    with blaming(f"cannot load the model {source}"):
        try:
            config = transformers.AutoConfig.from_pretrained(source, trust_remote_code=False)
        except ValueError as error:
            if "trust_remote_code" not in str(error):
                raise
            raise InputError(f"{source} comes with code of its own, which is never run") from error
        tokenizer = None
        if needs_tokenizer or not folder.is_dir() or any((folder / file).is_file() for file in TOKENIZER_FILES):
            tokenizer = transformers.AutoTokenizer.from_pretrained(source, trust_remote_code=False)
        name = folder.resolve().name if folder.is_dir() else source
        return Found(name, config, tokenizer, _class_for(source, config))


def _class_for(source: str, config: Any) -> Any:
    """Return the auto class that loads a model which answers: that it was saved from, if any. Raise InputError."""
    answering: list[Any] = [getattr(transformers, name) for name in ANSWERING]
    fitting = {auto: auto._model_mapping[type(config)] for auto in answering if type(config) in auto._model_mapping}
    if not fitting:
        raise InputError(f"{source} is a {config.model_type}, which transformers cannot let answer a text")
    saved_from = getattr(config, "architectures", None) or []
    return next((auto for auto, kind in fitting.items() if kind.__name__ in saved_from), next(iter(fitting)))


def require_weights(source: str, loading: dict[str, Any]) -> None:
    """Raise InputError for a checkpoint that leaves weights as they were drawn at random, and so its routing."""
    missing = {*loading["missing_keys"], *(name for name, *_ in loading["mismatched_keys"])}
    if missing:
        such = ", ".join(sorted(missing)[:3])
        raise InputError(f"{source} is no whole checkpoint: it lacks {len(missing)} weights, such as {such}")


def notes_of(loading: dict[str, Any]) -> tuple[str, ...]:
    """Return a note of weights for which the model has no place, as of layers that its config.json does not count."""
    surplus = sorted(loading["unexpected_keys"])
    such = f"{len(surplus)} weights of the checkpoint, such as {', '.join(surplus[:3])}"
    return (f"{such}, have no place in the model that its config is of",) if surplus else ()
