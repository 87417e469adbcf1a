"""Load a causal language model and its tokenizer from a hub id or a folder; a failure is told in one line."""

import atexit
import hashlib
import logging
import math
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from itertools import cycle
from pathlib import Path
from traceback import walk_tb
from typing import Any

import huggingface_hub
import numpy as np
import torch
import transformers
from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
from huggingface_hub.errors import HfHubHTTPError
from numpy.typing import NDArray
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForMultimodalLM,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
)

from tracer.hook import ExpertsHook
from tracer.limited import limited
from tracer.sites import Site
from traces.errors import InputError, unknown
from traces.facts import parse_json
from traces.files import plain
from traces.schema import TraceMeta

SMALL = 50_000_000
"""Parameters below which operations are too small to share among threads, which would wait for each other."""

OFFLOADS = ("cpu", "disk")

ANSWERING = (AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoModelForImageTextToText, AutoModelForMultimodalLM)

TEMPLATE_S = 10.0
"""How long a chat template may take."""

TEMPLATE_LETTERS = 1 << 20
"""What a chat template may add, beside repeating what was said."""

MOST_LAYERS = 10_000

DTYPES = ("auto", "float32", "bfloat16", "float16")


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
        """Token ids that end a response."""
        ids = self.model.generation_config.eos_token_id
        ids = getattr(self.tokenizer, "eos_token_id", None) if ids is None else ids
        found = [] if ids is None else ids if isinstance(ids, list) else [ids]
        if not all(isinstance(each, int) for each in found):
            raise InputError(f"{self.name}: eos_token_id is {ids!r}, not a token id or a list of them")
        return list(found)

    @property
    def pad_id(self) -> int:
        """A token id to fill batches with; it is masked, so any will do."""
        pad = getattr(self.tokenizer, "pad_token_id", None)
        return int(pad) if pad is not None else (self.stop_ids or [0])[0]

    @property
    def starts(self) -> dict[str, int]:
        """What an encoder-decoder's answers start with, as its checkpoint says: settings of generate()."""
        if not self.model.config.is_encoder_decoder:
            return {}
        forced = self.model.generation_config.forced_bos_token_id
        return {"decoder_start_token_id": self.decoder_start} | (
            {} if forced is None else {"forced_bos_token_id": forced}
        )

    @property
    def decoder_start(self) -> int:
        """The token that a decoder behind an encoder starts from; raises InputError if none is told."""
        told = (
            self.model.generation_config.decoder_start_token_id,
            getattr(self.model.config, "decoder_start_token_id", None),
            self.model.generation_config.bos_token_id,
        )
        for token in told:
            if token is not None:
                return int(token)
        raise InputError(f"{self.name} does not say what its decoder starts with (decoder_start_token_id)")

    def prompt_tokens(self, said: Sequence[str], template: bool) -> list[int]:
        """The tokens of a conversation, user and model in turn, that the model is to continue with.

        By the tokenizer's chat template, if `template` and it has one; else the texts, a line break between them.
        """
        if template:
            roles = cycle(("user", "assistant"))
            return self.chat_tokens([{"role": role, "content": text} for role, text in zip(roles, said, strict=False)])
        with blaming(f"the tokenizer of {self.name} fails"):
            return list(self.tokenizer("\n".join(said))["input_ids"])

    def chat_tokens(self, messages: list[dict[str, str]]) -> list[int]:
        """The tokens of messages (each a role and a content) that the model is to answer; raises InputError."""
        if not getattr(self.tokenizer, "chat_template", None):
            return self.prompt_tokens([message["content"] for message in messages], template=False)
        what = f"the chat template of {self.name}"
        with blaming(f"{what} fails"), limited(TEMPLATE_S, what):
            text = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        said = sum(len(message["content"]) for message in messages)
        if len(text) > TEMPLATE_LETTERS + 10 * said:
            raise InputError(f"{what} makes {len(text):,} letters of {said:,}: correct it, or leave it out")
        with blaming(f"the tokenizer of {self.name} fails"):
            return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def response_tokens(self, text: str) -> list[int]:
        """The tokens of an answer, with the end of sequence that the model would have written."""
        with blaming(f"the tokenizer of {self.name} fails"):
            if self.model.config.is_encoder_decoder:
                ids = list(self.tokenizer(text_target=text)["input_ids"])
            else:
                ids = list(self.tokenizer(text, add_special_tokens=False)["input_ids"])
        return ids if ids and ids[-1] in self.stop_ids else [*ids, *self.stop_ids[:1]] or ids

    def text(self, tokens: Sequence[int]) -> str:
        """What tokens say, without special ones."""
        return str(self.tokenizer.decode(tokens, skip_special_tokens=True))

    def fingerprint(self, modules: Iterable[torch.nn.Module | None], sample: int | None = None) -> str:
        """Hash the weights of modules, of those that are in memory; sample: about so many numbers of each weight."""
        digest = hashlib.sha256()
        for weight in (weight for module in modules if module is not None for weight in module.parameters()):
            if weight.device.type != "meta" and (sample is None or _is_plain(weight)):
                numbers = weight.detach().flatten()[:: max(1, weight.numel() // sample) if sample else 1]
                digest.update(numbers.float().cpu().numpy().tobytes())
        return digest.hexdigest()[:16]

    def embed(self, tokens: Sequence[int]) -> NDArray[np.float16]:
        """The mean of the input embeddings of tokens, float16 [H]."""
        with torch.inference_mode():
            rows = self.model.get_input_embeddings()(torch.tensor([list(tokens)], device=self.device))
        embedding: NDArray[np.float16] = rows[0].float().mean(0).half().cpu().numpy()
        return embedding


def _is_plain(weight: torch.Tensor) -> bool:
    """Whether a weight is not quantized: what packs its numbers may not let them be sliced."""
    return type(weight.data) is torch.Tensor and weight.dtype in (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Loading:
    """How to load a model."""

    dtype: str = "auto"
    device: str = "auto"
    offload: str | None = None  # where weights go that do not fit onto the device: "cpu" or "disk"
    max_memory: str | None = None  # of the device, such as 8GiB, if weights are offloaded
    offload_folder: Path | None = None  # for weights on disk; None: a temporary one
    trust_remote_code: bool = False


JSON_FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")
"""Files of a model whose damage transformers reports without their names, or passes over."""

OURS = ("tracer.", "replay.", "sim.", "policies.")
"""Packages whose errors are defects of this project."""


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


def load_model(source: str, how: Loading) -> LoadedModel:
    """Load `source`, a folder or a hub id; raises InputError."""
    if how.dtype not in DTYPES:
        raise unknown("dtype", how.dtype, DTYPES)
    if how.offload not in (None, *OFFLOADS):
        raise unknown("place to offload to", how.offload, OFFLOADS)
    if how.offload is None and (how.max_memory or how.offload_folder):
        raise InputError("--max-memory and --offload-folder belong to --offload: say where the rest goes, cpu or disk")
    place = _device(how.device)
    found = find_model(source, how.trust_remote_code)
    with blaming(f"cannot load the model {source}"):
        loaded: Any = found.auto.from_pretrained(
            source,
            dtype=how.dtype,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
            trust_remote_code=how.trust_remote_code,
            **_placing(how, place),
        )
        model, loading = loaded
        require_weights(source, loading)
        require_numbers(source, model)
        model = (model if how.offload else model.to(place)).eval()
    if place.type == "cpu" and model.num_parameters() < SMALL:
        torch.set_num_threads(1)
    return LoadedModel(found.name, model, found.tokenizer, notes_of(loading))


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
    """Tell which option runs code that comes with a model, where transformers asks for it."""
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


def _placing(how: Loading, place: torch.device) -> dict[str, Any]:
    """Settings of from_pretrained() that put onto the device what fits, and offload the rest."""
    if how.offload is None:
        return {}
    if not find_spec("accelerate"):
        raise InputError("--offload needs accelerate: pip install accelerate")
    from accelerate.utils import get_max_memory

    main = "cpu" if place.type == "cpu" else (place.index or 0)
    memory = get_max_memory()
    if how.max_memory is not None:
        memory[main] = how.max_memory
    if how.offload == "disk" and main != "cpu":
        memory["cpu"] = 0
    folder = how.offload_folder
    if folder is None:
        folder = Path(tempfile.mkdtemp(prefix="moe-trace-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return {"device_map": "auto", "max_memory": memory, "offload_folder": str(folder)}


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


def describe(loaded: LoadedModel, hook: ExpertsHook) -> TraceMeta:
    """What a trace says about the model that it was recorded from; `hook` has probed it."""
    sizes = [_expert_bytes(site) for site in hook.sites]
    if len(set(sizes)) > 1:
        hook.notes.append(f"experts have {min(sizes)} to {max(sizes)} bytes; the trace tells of the largest")
    weights = hook.sites[0].weights
    config = loaded.model.config.get_text_config()
    hidden = getattr(config, "hidden_size", None)
    return TraceMeta(
        model=loaded.name,
        layers=len(hook.names),
        experts=hook.experts,
        top_k=hook.top_k,
        layer_names=tuple(hook.names),
        expert_bytes=max(sizes) or None,
        dtype=str(weights[0].dtype).removeprefix("torch.") if weights else None,
        revision=getattr(loaded.model.config, "_commit_hash", None),
        hidden_size=hidden,
        expert_intermediate_size=_inner_size(hook.modules[0], hidden),
        tools={name: version(name) for name in ("moe-expert-cache", "torch", "transformers")},
    )


def _expert_bytes(site: Site) -> int:
    """Bytes of one expert: of weights with an expert per row, and maybe rows beyond E, one row; else a share."""
    stacked = [weight for weight in site.weights if weight.dim() > 2]
    shared = sum(weight.nbytes for weight in site.weights if weight.dim() <= 2)
    return sum(weight[0].nbytes for weight in stacked) + shared // site.experts


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
        if device.type == "meta":
            raise RuntimeError("it computes nothing")
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise InputError(f"device {name!r} cannot be used here: {str(error).splitlines()[0]}") from error
    return device
