"""Find a model in a folder or on the hub, load it with its tokenizer, and turn messages into tokens.

This is the one door for checkpoints. Files and code of a model raise any kind of error where they do not fit together;
`blaming` makes one line of each. A checkpoint whose weights are not whole is refused, as its routing would be random.
"""

import atexit
import hashlib
import logging
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from traceback import walk_tb
from typing import TYPE_CHECKING, Any, NamedTuple

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

from tracer.loading import Loading
from traces.errors import InputError

if TYPE_CHECKING:
    from tracer.answers import Runner

SMALL = 50_000_000
"""Parameters below which operations are too small to share among threads, which would wait for each other."""

SLICED = (torch.float32, torch.bfloat16, torch.float16)

ANSWERING = (AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoModelForImageTextToText, AutoModelForMultimodalLM)

TOKENIZER_FILES = ("tokenizer_config.json", "tokenizer.json", "tokenizer.model", "vocab.json", "spiece.model")

OURS = ("tracer.", "replay.", "sim.", "policies.")
"""Packages whose errors are defects of this project."""


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
        """The token that a decoder behind an encoder starts from."""
        named = (
            self.model.generation_config.decoder_start_token_id,
            getattr(self.model.config, "decoder_start_token_id", None),
            self.model.generation_config.bos_token_id,
        )
        return int(next(token for token in named if token is not None))

    def prompt_tokens(self, said: Sequence[str], template: bool) -> list[int]:
        """Return the tokens of texts of user and model in turn: by the chat template if `template`, else as lines."""
        if template:
            roles = cycle(("user", "assistant"))
            return self.chat_tokens([{"role": role, "content": text} for role, text in zip(roles, said, strict=False)])
        return self._ids(text="\n".join(said))

    def chat_tokens(self, messages: list[dict[str, str]]) -> list[int]:
        """The tokens of messages (each a role and a content) that the model is to answer; raises InputError."""
        if not getattr(self.tokenizer, "chat_template", None):
            return self.prompt_tokens([message["content"] for message in messages], template=False)
        with blaming(f"the chat template of {self.name} fails"):
            text = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        return self._ids(text=text, add_special_tokens=False)

    def _ids(self, **options: Any) -> list[int]:
        with blaming(f"the tokenizer of {self.name} fails"):
            return list(self.tokenizer(**options)["input_ids"])

    def response_tokens(self, text: str) -> list[int]:
        """The tokens of an answer, with the end of sequence that the model would have written."""
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

    def embed(self, tokens: Sequence[int]) -> NDArray[np.float16]:
        """The mean of the input embeddings of tokens, float16 [H]."""
        with torch.inference_mode():
            rows = self.model.get_input_embeddings()(torch.tensor([list(tokens)], device=self.device))
        embedding: NDArray[np.float16] = rows[0].float().mean(0).half().cpu().numpy()
        return embedding

    @contextmanager
    def observed(
        self, weights: bool, gate_probs: bool, lookahead: bool, on_step: Callable[[int], None]
    ) -> "Iterator[Runner]":
        """Hook and probe the model, and yield what lets it answer. See `tracer.observed`."""
        from tracer.answers import Runner  # which imports this module
        from tracer.hook import ExpertsHook

        with ExpertsHook(self.model, weights, gate_probs, lookahead) as hook:
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


def load_model(source: str, options: Loading) -> LoadedModel:
    """Load `source`, a folder or a hub id. Raise InputError."""
    name = ("cuda" if torch.cuda.is_available() else "cpu") if options.device == "auto" else options.device
    try:
        device = torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        raise InputError(f"device {name!r} cannot be used here: {str(error).splitlines()[0]}") from error
    found = find_model(source, options.trust_remote_code)
    placement = _offloaded(options, device) if options.offload else {}
    with blaming(f"cannot load the model {source}"):
        loaded: Any = found.auto.from_pretrained(
            source,
            dtype=options.dtype,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
            trust_remote_code=options.trust_remote_code,
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


@contextmanager
def blaming(what: str) -> Iterator[None]:
    """Raise InputError, one line that starts with `what`, for whatever a model's own code raises; our errors stay."""
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


class Found(NamedTuple):
    """A model before any of its weights are read."""

    name: str
    source: str  # a folder or a hub id
    config: Any
    tokenizer: Any  # None: there is none, and none is needed
    auto: Any  # the auto class that loads it


def find_model(source: str, trust_remote_code: bool = False, needs_tokenizer: bool = True) -> Found:
    """Read config and tokenizer of `source`, a folder or a hub id. Raise InputError."""
    _quiet_libraries()
    folder = Path(source)
    if not folder.is_dir() and (source.count("/") > 1 or source.startswith((".", "/", "~"))):
        raise InputError(f"no model at {source}: there is no such folder")
    if not folder.is_dir() and not try_to_load_from_cache(source, "config.json"):  # transformers tries for a minute
        with blaming(f"there is no folder {source}, and the hub cannot be asked for it"), suppress(HfHubHTTPError):
            get_hf_file_metadata(hf_hub_url(source, "config.json"))
    with blaming(f"cannot load the model {source}"):
        try:
            config = AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code)
        except ValueError as error:
            if "trust_remote_code" not in str(error):
                raise
            reason = "comes with code of its own, which runs only with --trust-remote-code"
            raise InputError(f"{source} {reason}") from error
        tokenizer = None
        if needs_tokenizer or not folder.is_dir() or any((folder / file).is_file() for file in TOKENIZER_FILES):
            tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=trust_remote_code)
        name = folder.resolve().name if folder.is_dir() else source
        return Found(name, source, config, tokenizer, _class_for(source, config))


def _class_for(source: str, config: Any) -> Any:
    """Return the auto class that loads a model which answers: that it was saved from, if any. Raise InputError."""
    if "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {}):
        return AutoModelForCausalLM
    fitting: dict[Any, Any] = {
        auto: auto._model_mapping[type(config)] for auto in ANSWERING if type(config) in auto._model_mapping
    }
    if not fitting:
        raise InputError(f"{source} is a {config.model_type}, which transformers cannot let answer a text")
    saved_from = getattr(config, "architectures", None) or []
    return next((auto for auto, kind in fitting.items() if kind.__name__ in saved_from), next(iter(fitting)))


def _quiet_libraries() -> None:
    """Turn off the libraries' warnings and progress bars: what matters of them is in our errors."""
    messages: Any = transformers.utils.logging  # untyped
    messages.set_verbosity_error()
    messages.disable_progress_bar()
    hub_messages: Any = huggingface_hub.logging
    hub_messages.set_verbosity_error()
    logging.getLogger("accelerate").setLevel(logging.ERROR)


def require_weights(source: str, loading: dict[str, Any]) -> None:
    """Raise InputError for a checkpoint that leaves weights as they were drawn at random, and so its routing."""
    missing = {*loading["missing_keys"], *(name for name, *_ in loading["mismatched_keys"])}
    if missing:
        raise InputError(
            f"{source} is no whole checkpoint of its model: {len(missing)} weights are missing or of another shape, "
            f"such as {', '.join(sorted(missing)[:3])}; they would be random"
        )


def notes_of(loading: dict[str, Any]) -> tuple[str, ...]:
    """Return a note of weights for which the model has no place, as of layers that its config.json does not count."""
    surplus = sorted(loading["unexpected_keys"])
    such = f"{len(surplus)} weights of the checkpoint, such as {', '.join(surplus[:3])}"
    return (f"{such}, have no place in the model that its config is of",) if surplus else ()
