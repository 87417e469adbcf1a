"""Load a transformers model without its experts: everything else into memory, of the experts where they lie.

transformers itself loads: its class is asked to leave the experts' stacked parameters out, and takes all other tensors
from a reader that maps nothing. In their place stand meta tensors, so that nothing can read an expert around the cache.
"""

import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor, nn

from replay.devices.expert_file import ExpertFile, StoredModel, write
from replay.devices.store import Bytes
from replay.live.layout import ExpertLayer, InSlot, ShardStore, expert_layers
from replay.live.packing import Packing
from replay.live.shards import Shard, open_shards
from replay.live.sources import Source, sources
from tracer.answers import LoadedModel
from tracer.blaming import blaming
from tracer.models import Found, find_model, notes_of, require_weights
from traces.errors import InputError, located, refuse
from traces.output import check_file, make_folder

IMPLEMENTATION = "moe-expert-cache"
"""The experts implementation that `replay.live` registers with transformers."""


Progress = Callable[[int], AbstractContextManager[Callable[[int], None]]]
"""Shows work of so many pieces while it is entered, and yields what is called with each."""


@dataclass(frozen=True)
class Opened:
    """A model whose experts are elsewhere."""

    loaded: LoadedModel
    layers: list[ExpertLayer]  # in the order of the model's modules
    sources: dict[str, Source]  # of their stacked parameters, by full name
    shards: list[Shard]

    @property
    def dense_bytes(self) -> int:
        model = self.loaded.model
        held = {
            tensor.data_ptr(): tensor.nbytes for tensor in (*model.parameters(), *model.buffers()) if not tensor.is_meta
        }
        return sum(held.values())


@contextmanager
def opened(source: str, dtype: str, name: str | None = None) -> Iterator[Opened]:
    """Load the model without its experts; its files stay open inside. Raise InputError where it cannot be."""
    checkpoint = find_model(source, needs_tokenizer=False)
    kind = _class_of(checkpoint)
    shards: list[Shard] = []
    layers: list[ExpertLayer] = []
    origins: dict[str, Source] = {}

    def load(model: Any, state_dict: Any, files: Any, load_config: Any, expected_keys: Any = None) -> Any:
        is_whole = files and all(str(file).endswith(".safetensors") for file in files)
        refuse((not is_whole, f"{checkpoint.name} is no safetensors checkpoint: its experts cannot be read one by one"))
        layers.extend(expert_layers(model))
        with_experts = model.state_dict()
        own, tensors = open_shards(Path(file) for file in files)
        shards.extend(own)
        wanted = {f"{layer.name}.{row.name}" for layer in layers for row in layer.rows}
        there, others = sources(tensors, model, load_config, wanted)
        origins.update(there)
        if load_config.hf_quantizer:
            for number, layer in enumerate(layers):
                of_rows = {row: origins[f"{layer.name}.{row.name}"] for row in layer.rows}
                layers[number] = replace(layer, packing=Packing(of_rows, layer.experts, model))
        for layer in layers:
            for row in layer.rows:
                del layer.module._parameters[row.name]
        loaded = kind._load_pretrained_model(model, others, None, load_config)
        for layer in layers:
            for row in layer.rows:
                meta = with_experts[f"{layer.name}.{row.name}"]
                layer.module._parameters[row.name] = nn.Parameter(meta, requires_grad=False)
        return loaded

    without_experts: Any = type(
        kind.__name__, (kind,), {"__module__": kind.__module__, "_load_pretrained_model": staticmethod(load)}
    )
    try:
        with blaming(f"cannot load the model {source}"):
            model, loading = without_experts.from_pretrained(
                source, dtype=dtype, ignore_mismatched_sizes=True, output_loading_info=True, **_dequantised(checkpoint)
            )
            require_weights(source, loading)
        model.__class__ = kind
        loaded = LoadedModel(name or checkpoint.name, model.eval(), checkpoint.tokenizer, notes_of(loading))
        yield Opened(loaded, layers, origins, shards)
        for shard in shards:
            shard.require_unchanged()
    finally:
        for shard in shards:
            shard.close()


def _dequantised(checkpoint: Found) -> dict[str, Any]:
    """Return settings with which from_pretrained() dequantises. Raise InputError for a format that it cannot."""
    stated = getattr(checkpoint.config, "quantization_config", None)
    if not stated:
        return {}
    config = transformers.quantizers.auto.AutoQuantizationConfig.from_dict({**stated, "dequantize": True})
    if not getattr(config, "dequantize", False):
        method = stated.get("quant_method")
        read = "only MXFP4, fp8 and compressed-tensors are read"
        raise InputError(f"{checkpoint.name} is quantised by {method}, and {read}: take another one")
    return {"quantization_config": config}


def _class_of(checkpoint: Found) -> Any:
    kinds = checkpoint.auto._model_mapping[type(checkpoint.config)]
    if not isinstance(kinds, tuple | list):
        return kinds
    named = set(getattr(checkpoint.config, "architectures", None) or ())
    return next((kind for kind in kinds if kind.__name__ in named), kinds[0])


@contextmanager
def expert_store(
    model: Opened, layers: list[ExpertLayer], file: Path | None, progress: Progress
) -> Iterator[ShardStore | ExpertFile]:
    """Open where experts are read from: the shards where their layout allows it, else `file`, written if it is missing.

    layers: in the order of execution; progress: is shown while experts are written.
    """
    experts = _in_slots(model, layers)
    if experts is not None:
        yield ShardStore(experts, max(layer.expert_bytes for layer in layers))
        return
    origin = _origin(model, layers)
    stored = StoredModel(model.loaded.name, len(layers), layers[0].experts, max(layer.expert_bytes for layer in layers))
    if file is None:
        caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        digest = hashlib.sha256(origin.encode()).hexdigest()[:16]
        file = caches / "moe-expert-cache" / f"{model.loaded.name.replace('/', '--')}-{digest}.experts"
    if not file.exists():
        count = len(layers) * layers[0].experts
        with located(f"{model.loaded.name}: loading converts its experts, so they are written to a file (--store)"):
            make_folder(file.parent)
            check_file(file)
            with progress(count) as advance:
                write(file, stored, _Converting(model, layers).fill, origin, count, lambda: advance(1))
    with closing(ExpertFile(file, stored)) as written:
        if written.facts.weights != origin:
            raise InputError(f"{file} holds experts of {written.facts.weights}: remove it, or name another --store")
        yield written
        written.require_unchanged()


def _in_slots(model: Opened, layers: list[ExpertLayer]) -> list[InSlot] | None:
    in_slots: list[InSlot] = []
    for layer in layers:
        sources = (model.sources[f"{layer.name}.{row.name}"] for row in layer.rows)
        by_row = [source.rows(row, layer.experts) for source, row in zip(sources, layer.rows, strict=True)]
        if layer.packing:
            by_row = layer.packing.ranges
        if not all(by_row):
            return None
        in_slots += [InSlot.of(layer.stored, own) for own in zip(*by_row, strict=True)]
    return in_slots


class _Converting:
    """Gives experts one after another as loading would make them, one layer in memory at a time."""

    def __init__(self, model: Opened, layers: list[ExpertLayer]) -> None:
        self._model, self._layers = model, layers
        self._layer = -1
        self._made: dict[str, Tensor] = {}

    def fill(self, expert: int, target: Bytes) -> None:
        """Write expert l * E + e as it lies in a slot."""
        layer, number = divmod(expert, self._layers[0].experts)
        rows = self._layers[layer].rows
        if layer != self._layer:
            self._made, self._layer = {}, layer
        for row in rows:
            name = f"{self._layers[layer].name}.{row.name}"
            if name not in self._made:
                model = self._model.loaded.model
                with blaming(f"{name} cannot be made of the checkpoint"):
                    made = self._model.sources[name].converted(model, model.config)
                self._made |= {each: tensor.to(row.dtype) for each, tensor in made.items()}
            stacked, expected = self._made[name], (self._layers[layer].experts, *row.shape)
            if stacked.shape != expected:
                raise InputError(f"{name} has the shape {tuple(stacked.shape)} in the checkpoint, not {expected}")
            content = stacked[number].contiguous()
            np.copyto(target[row.begin : row.begin + row.nbytes], content.view(-1).view(torch.uint8).numpy())


def _origin(model: Opened, layers: list[ExpertLayer]) -> str:
    """Return what the experts are made from, in words that no others share: the files, and the type of the weights."""
    digest = hashlib.sha256()
    for shard in model.shards:
        facts = shard.path.stat()
        digest.update(repr((shard.path.resolve(), facts.st_size, facts.st_mtime_ns)).encode())
    return f"{model.loaded.name} as {str(layers[0].rows[0].dtype).removeprefix('torch.')} ({digest.hexdigest()[:16]})"
