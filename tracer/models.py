"""Load a causal language model and its tokenizer, and turn messages into tokens."""

import atexit
import hashlib
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from numpy.typing import NDArray

from tracer.checkpoints import blaming, find_model, notes_of, require_weights
from traces.errors import InputError, unknown
from traces.typed import Option

SMALL = 50_000_000
"""Parameters below which operations are too small to share among threads, which would wait for each other."""

PANEL = "Running the model"

OFFLOADS = ("cpu", "disk")

SLICED = (torch.float32, torch.bfloat16, torch.float16)

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
def _loaded(module: torch.nn.Module) -> Iterator[None]:
    """Hold the weights of a module in memory that accelerate has offloaded."""
    with ExitStack() as held:
        for part in module.modules():
            if hasattr(part, "_hf_hook"):
                from accelerate.utils import align_module_device

                held.enter_context(align_module_device(part))
        yield


@dataclass(frozen=True)
class Loading:
    """How to load a model."""

    dtype: Annotated[str, Option("auto (the checkpoint's), float32, bfloat16 or float16.", PANEL)] = "auto"
    device: Annotated[str, Option("auto, cpu, cuda, cuda:1, ...", PANEL)] = "auto"
    offload: Annotated[str | None, Option("cpu or disk: where weights go that the device cannot hold.", PANEL)] = None
    max_memory: Annotated[str | None, Option("Of the device for weights, such as 8GiB, with --offload.", PANEL)] = None
    offload_folder: Annotated[Path | None, Option("For weights on disk.", PANEL, "a temporary one")] = None
    trust_remote_code: Annotated[bool, Option("Run code that comes with the model.", PANEL)] = False

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise unknown("dtype", self.dtype, DTYPES)
        if self.offload not in (None, *OFFLOADS):
            raise unknown("place to offload to", self.offload, OFFLOADS)
        if self.offload is None and (self.max_memory or self.offload_folder):
            raise InputError(
                "`max_memory` and `offload_folder` belong to `offload`: say where the rest goes, cpu or disk"
            )


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
    if device.type == "cpu" and model.num_parameters() < SMALL:
        torch.set_num_threads(1)
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
