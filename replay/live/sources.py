"""Where a checkpoint's files have the weights of experts: ranges of bytes, by transformers' own rules of conversion.

An expert is one row of each stacked parameter of its layer. A checkpoint has it as rows of stacked tensors, or as
tensors of each expert that loading would stack and concatenate. Where loading would do anything else (transpose,
split, change the type), there are no such ranges, and a store is written once.
"""

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from replay.live.shards import ALIGNMENT, Held, Shard, ShardTensor, lead_of


@dataclass(frozen=True)
class Row:
    """The row of one stacked parameter, of an expert."""

    name: str  # of the parameter in its module
    shape: tuple[int, ...]  # of the row
    dtype: torch.dtype
    begin: int  # byte of the expert

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    def view(self, slot: Tensor, place: int) -> Tensor:
        """Return it as the stacked parameter of a module of one expert. slot: uint8[stride]; place: the row's in it."""
        return slot[place : place + self.nbytes].view(self.dtype).view(1, *self.shape)


def end_of(rows: Sequence[Row]) -> int:
    return rows[-1].begin + rows[-1].nbytes


def add_row(rows: list[Row], name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    begin = -(-end_of(rows) // ALIGNMENT) * ALIGNMENT if rows else 0
    rows.append(Row(name, shape, dtype, begin))


Range = tuple[Shard | Held, int, int]  # bytes that lie together in a file: from where on, and how many

Converter = Any
"""A WeightConverter or WeightRenaming of transformers, imported where it is used, since that takes a second."""

OfExpert = tuple[list[Range], int]
"""Where a row of an expert lies in a checkpoint, and how far behind a multiple of ALIGNMENT in transformers' model."""


@dataclass
class Source:
    """Where loading would take one stacked parameter from: `tensors` by the converter's patterns, in its order."""

    parameter: str  # full name
    converter: Converter
    tensors: dict[str, list[ShardTensor]] = field(default_factory=dict)

    def rows(self, row: Row, experts: int) -> list[OfExpert]:
        """Return where `row` of each expert lies; none where only loading can make it.

        What loading stacks begins at a multiple of ALIGNMENT, what it takes as it is stays where the file is mapped.
        """
        every = [tensor for tensors in self.tensors.values() for tensor in tensors]
        if any(tensor.dtype != row.dtype for tensor in every):
            return []
        kinds, loading = getattr(self.converter, "operations", []), transformers.core_model_loading
        merges = bool(kinds) and isinstance(kinds[0], loading.MergeModulelist) and kinds[0].dim == 0
        rest = kinds[1:] if merges else kinds
        joins = len(rest) == 1 and isinstance(rest[0], loading.Concatenate) and rest[0].dim == 1
        if (rest and not joins) or (len(self.tensors) > 1 and not joins):
            return []
        patterns = [pattern for pattern in self.converter.source_patterns if pattern in self.tensors]
        in_order = [self.tensors[pattern] for pattern in patterns or self.tensors]  # as Concatenate takes them
        shapes = [{each.shape[0 if merges else 1 :] for each in tensors} for tensors in in_order]
        if any(len(of_part) != 1 or () in of_part for of_part in shapes):
            return []
        heights, others = zip(*((shape[0], shape[1:]) for (shape,) in shapes), strict=True)
        if (sum(heights), {*others}) != (row.shape[0], {row.shape[1:]}):
            return []
        parts = [of_each(tensors, experts, merges) for tensors in in_order]
        if any(len(part) != experts for part in parts):
            return []
        width = row.dtype.itemsize
        return [
            (_joined(ranges), lead_of(number * row.nbytes if kinds else ranges[0][1], width))
            for number, ranges in enumerate(zip(*parts, strict=True))
        ]

    def converted(self, model: nn.Module, config: object) -> dict[str, Tensor]:
        """Return what loading makes of the tensors, by full names of parameters."""
        contents = {
            pattern: [(tensor.name, partial(tensor.__getitem__, ...)) for tensor in tensors]
            for pattern, tensors in self.tensors.items()
        }
        return self.made(deepcopy(self.converter), contents, model, config)

    def made(
        self,
        converter: Converter,
        contents: Mapping[str, Sequence[tuple[str, Callable[[], Tensor]]]],
        model: nn.Module,
        config: object,
    ) -> dict[str, Tensor]:
        """Return what a converter makes, by full names of parameters. contents: names and contents, by its patterns."""
        for pattern, tensors in contents.items():
            for name, content in tensors:
                converter.add_tensor(self.parameter, name, pattern, content)
        made: dict[str, Any] = converter.convert(self.parameter, model=model, config=config)
        return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}


def of_each(tensors: list[ShardTensor], experts: int, merges: bool) -> list[Range]:
    """Return where each expert's part lies: a tensor each, or a row of one; of another number of experts, none."""
    if merges:
        return [(tensor.shard, tensor.offset, tensor.nbytes) for tensor in tensors]
    (tensor,) = tensors
    if tensor.shape[:1] != (experts,):
        return []
    size = tensor.nbytes // experts
    return [(tensor.shard, tensor.offset + expert * size, size) for expert in range(experts)]


def _joined(ranges: Sequence[Range]) -> list[Range]:
    """Return ranges of which none lies directly behind another one."""
    joined = [ranges[0]]
    for shard, offset, size in ranges[1:]:
        last, begin, before = joined[-1]
        if (shard, offset) == (last, begin + before):
            joined[-1] = shard, begin, before + size
        else:
            joined.append((shard, offset, size))
    return joined


def sources(
    tensors: dict[str, ShardTensor], model: Any, load_config: Any, wanted: set[str]
) -> tuple[dict[str, Source], dict[str, ShardTensor]]:
    """Divide a checkpoint into the sources of the parameters `wanted`, by full names, and all other tensors.

    As `transformers.core_model_loading.convert_and_load_state_dict_in_model` assigns them.
    """
    mapping, loading = load_config.weight_mapping or [], transformers.core_model_loading
    renamings = [entry for entry in mapping if isinstance(entry, loading.WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, loading.WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    state, prefix = model.state_dict(), model.base_model_prefix
    wanted_sources: dict[str, Source] = {}
    by_target: dict[str, Source] = {}  # of each converter's first pattern
    others: dict[str, ShardTensor] = {}
    for name in sorted(tensors, key=loading.dot_natural_key):
        target, pattern = loading.rename_source_key(name, renamings, converters, prefix, state)
        if target not in state and name in state:
            target, pattern = loading.rename_source_key(name, [], [], prefix, state)
        converter = by_pattern[pattern] if pattern else loading.WeightRenaming(name, target)
        first, *patterns = converter.target_patterns  # a converter makes the parameters of all of them together
        made = wanted.intersection([target, *(target.replace(first, each, 1) for each in patterns)])
        if not made:
            others[name] = tensors[name]
            continue
        source = by_target.setdefault(target, Source(target, converter))
        source.tensors.setdefault(pattern or name, []).append(tensors[name])
        wanted_sources |= dict.fromkeys(made, source)
    return wanted_sources, others
