"""The trace on disk: a folder with requests.parquet (one row per request, with its EAMs) and
routing/part-*.parquet (one row per request and token, in the order of execution).

Every file carries the same metadata, as JSON under one key, so that each can be understood alone. The ids of
a token lie flat as [L * k]; the largest value of the id type means that nothing was routed there. While a trace
grows, its requests lie in requests/part-*.parquet instead.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from traces.errors import InputError
from traces.facts import LONGEST_NAME, parse_json, short, texts, whole

VERSION = 1
KEY = b"moe-expert-cache"
REQUESTS = "requests.parquet"
GROWING = "requests"
ROUTING = "routing"

AGGREGATE = "aggregate"
"""The mode of a trace that holds EAMs only: its source counted tokens and kept no sequences."""


@dataclass(frozen=True)
class TraceMeta:
    """What holds for a whole trace. Unknown facts are None."""

    model: str
    layers: int  # L: MoE layers, in the order of execution
    experts: int  # E: routed experts of a layer
    top_k: int  # k: experts that a token may choose in a layer
    layer_names: tuple[str, ...]
    expert_bytes: int | None = None
    dtype: str | None = None
    mode: str = "generate"  # what made it: generate, teacher-forced, import, aggregate, synthetic
    revision: str | None = None
    hidden_size: int | None = None
    expert_intermediate_size: int | None = None
    tools: dict[str, str] = field(default_factory=dict)  # name of a program or library -> its version
    settings: dict[str, Any] = field(default_factory=dict)  # of what made it: option -> plain value

    def __post_init__(self) -> None:
        for fact in fields(self):
            value = getattr(self, fact.name)
            if value is not None or fact.default is not None:
                _KINDS[fact.name](fact.name, value)
        if self.top_k > self.experts:
            raise InputError(f"no model has {self.layers} MoE layers x {self.experts} experts, top-{self.top_k}")
        if self.layers * self.experts >= 1 << 31:  # the length of an EAM, which Parquet counts in 31 bits
            raise InputError(f"no model has {self.layers} MoE layers x {self.experts} experts")
        if self.experts >= 65535:
            raise InputError(f"{self.experts} experts in a layer are more than a trace can hold (65534)")
        if len(self.layer_names) != self.layers:
            raise InputError(f"{len(self.layer_names)} layer names for {self.layers} MoE layers")
        if len(set(self.layer_names)) != self.layers:
            raise InputError("two MoE layers have the same name")

    @property
    def id_type(self) -> np.dtype[np.unsignedinteger]:
        """The type of expert ids: uint8 where E <= 255, else uint16."""
        return np.dtype(np.uint8) if self.experts <= 255 else np.dtype(np.uint16)

    @property
    def sentinel(self) -> int:
        """The id that means: nothing was routed here."""
        return int(np.iinfo(self.id_type).max)

    def encode(self) -> dict[bytes, bytes]:
        """The metadata of a Parquet file of this trace."""
        return {KEY: json.dumps({"schema_version": VERSION, **asdict(self)}).encode()}

    @staticmethod
    def decode(metadata: dict[bytes, bytes] | None, where: str) -> "TraceMeta":
        """The meta in a Parquet file's metadata; an InputError naming `where` if there is none that fits."""
        if KEY not in (metadata or {}):
            raise InputError(
                f"{where} is a Parquet file, but not of a trace, since its metadata has no {KEY.decode()!r}: "
                "name a folder that moe-trace wrote"
            )
        assert metadata is not None
        try:
            values = parse_json(metadata[KEY], "it")
            version = values.pop("schema_version")
            if version != VERSION:
                raise InputError(f"schema version {version!r}, this program reads {VERSION}; record it again")
            return TraceMeta(**{**values, "layer_names": texts("layer_names", values["layer_names"])})
        except (InputError, TypeError, KeyError, AttributeError) as error:
            raise InputError(f"{where} has metadata that cannot be understood: {error}") from error


def _tools(what: str, value: Any) -> None:
    if not isinstance(value, dict):
        raise InputError(f"{what} is {value!r}; an object of names and versions is needed")
    texts(what, [*value, *value.values()])


def _settings(what: str, value: Any) -> None:
    if not isinstance(value, dict) or not all(_plain(item) for item in value.values()):
        raise InputError(f"{what} is {value!r}; an object of plain values is needed")
    texts(what, list(value))


def _plain(value: Any) -> bool:
    return value is None or isinstance(value, str | int | float)


MOST = 2**40
"""Of any number of a model: products of larger ones leave the range of 64 bits, and nothing is so large."""

_KINDS: dict[str, Callable[[str, Any], object]] = {
    **dict.fromkeys(("model", "mode", "dtype", "revision"), short),
    **dict.fromkeys(
        ("layers", "experts", "top_k", "expert_bytes", "hidden_size", "expert_intermediate_size"),
        partial(whole, high=MOST),
    ),
    "layer_names": texts,
    "tools": _tools,
    "settings": _settings,
}
"""What each fact of a TraceMeta must be, unless it is unknown."""


OPTIONAL: dict[str, Callable[[TraceMeta], pa.DataType]] = {
    "weights": lambda meta: pa.list_(pa.float16(), meta.layers * meta.top_k),
    "lookahead": lambda meta: pa.list_(pa.from_numpy_dtype(meta.id_type), meta.layers * meta.top_k),
    "gate_probs": lambda meta: pa.list_(pa.float16(), meta.layers * meta.experts),
}
"""Columns that a trace's routing files may hold, and their types."""


def routing_schema(meta: TraceMeta, optional: Iterable[str] = ()) -> pa.Schema:
    """Columns of routing/part-*.parquet; `optional` names those of OPTIONAL that are there."""
    columns = [
        pa.field("request", pa.uint32(), nullable=False),
        pa.field("position", pa.uint32(), nullable=False),
        pa.field("step", pa.uint32(), nullable=False),
        pa.field("phase", pa.uint8(), nullable=False),
        pa.field("token_id", pa.int32()),
        pa.field("experts", pa.list_(pa.from_numpy_dtype(meta.id_type), meta.layers * meta.top_k), nullable=False),
    ]
    columns += [pa.field(name, OPTIONAL[name](meta), nullable=False) for name in OPTIONAL if name in optional]
    return pa.schema(columns, metadata=meta.encode())


def requests_schema(meta: TraceMeta, embedding: int | None = None) -> pa.Schema:
    """Columns of requests.parquet. Row i is the request that routing rows call i.

    embedding: the size of the prompts' embeddings, where the trace has them.
    """
    eam = pa.list_(pa.uint32(), meta.layers * meta.experts)
    columns = [
        pa.field("id", pa.string(), nullable=False),
        pa.field("dataset", pa.string(), nullable=False),
        pa.field("task", pa.string(), nullable=False),
        pa.field("prompt_tokens", pa.uint32()),
        pa.field("output_tokens", pa.uint32(), nullable=False),
        pa.field("arrival_ns", pa.int64()),
        pa.field("mode", pa.string(), nullable=False),
        pa.field("eam_prefill", eam, nullable=False),
        pa.field("eam_decode", eam, nullable=False),
    ]
    if embedding is not None:
        columns.append(pa.field("embedding", pa.list_(pa.float16(), embedding), nullable=False))
    return pa.schema(columns, metadata=meta.encode())


def row_bytes(schema: pa.Schema) -> int:
    """What a row takes in memory, texts left out."""
    bits = 0
    for kind in schema.types:
        if pa.types.is_fixed_size_list(kind):
            bits += kind.list_size * kind.value_type.bit_width
        elif not pa.types.is_string(kind):
            bits += kind.bit_width
    return -(-bits // 8)


def require_columns(found: pa.Schema, wanted: pa.Schema, where: str) -> None:
    """An InputError naming a column that `found` has twice, or the first of `wanted` that it lacks or has otherwise."""
    for name, times in Counter(found.names).items():
        if times > 1:
            raise InputError(f"{where} has the column {name!r} twice: the file was changed; record or import it again")
    for column in wanted:
        index = found.get_field_index(column.name)
        if index < 0:
            raise InputError(f"{where} lacks the column {column.name!r}: it is no part of a trace, or was changed")
        # The name of a list's element ("item" or "element") is no part of the type.
        if not _same_type(found.field(index).type, column.type):
            raise InputError(
                f"{where}: column {column.name!r} is {found.field(index).type}, "
                f"but the metadata calls for {column.type}"
            )


def require_whole(table: pa.Table, wanted: pa.Schema, where: str) -> None:
    """An InputError naming the first column of `table` that holds nulls, but must not by `wanted`, or unfit text."""
    for name in table.column_names:
        if pa.types.is_string(wanted.field(name).type):
            _require_names(name, table.column(name), where)
        if wanted.field(name).nullable:
            continue
        for chunk in table.column(name).chunks:
            if chunk.null_count or (pa.types.is_fixed_size_list(chunk.type) and chunk.flatten().null_count):
                raise InputError(f"{where}: column {name!r} holds nulls, but must be whole")


def _require_names(what: str, column: pa.ChunkedArray, where: str) -> None:
    """Raise InputError unless each text of a column is UTF-8 and no longer than a name."""
    try:
        column.validate(full=True)
    except pa.ArrowInvalid as error:
        raise InputError(f"{where}: column {what!r} holds text that is not UTF-8") from error
    for chunk in column.dictionary_encode().chunks:
        longest = pc.max(pc.utf8_length(chunk.dictionary)).as_py() or 0
        if longest > LONGEST_NAME:
            raise InputError(
                f"{where}: column {what!r} holds a text of {longest} characters: shorten it to {LONGEST_NAME}"
            )


def _same_type(a: pa.DataType, b: pa.DataType) -> bool:
    if pa.types.is_fixed_size_list(a) and pa.types.is_fixed_size_list(b):
        return bool(a.list_size == b.list_size and a.value_type == b.value_type)
    return bool(a == b)
