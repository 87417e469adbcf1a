"""The trace on disk: a folder with requests.parquet (one row per request, with its EAMs; while it grows,
requests/part-*.parquet) and routing/part-*.parquet (one row per request and token, in the order of execution).

Every file carries the same metadata, as JSON under one key, so that each can be understood alone. The ids of a token
lie flat as [L * k]; the largest value of the id type means that nothing was routed there.
"""

import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from math import prod
from typing import Annotated, Any

import numpy as np
import pyarrow as pa
from msgspec import Meta
from numpy.typing import NDArray

from traces.errors import InputError, refuse
from traces.facts import parse_json
from traces.typed import typed

VERSION = 1
KEY = b"moe-expert-cache"
REQUESTS = "requests.parquet"
GROWING = "requests"
ROUTING = "routing"

AGGREGATE = "aggregate"
"""The mode of a trace that holds EAMs only: its source counted tokens and kept no sequences."""

Size = Annotated[int, Meta(ge=1, le=2**40)]


@dataclass(frozen=True)
class Picks:
    """What routers picked ahead of time: the best `count` experts at each of `distances` in MoE layers, by score.

    states: what a router is given. "plain": what entered the MoE layer so many layers before, as its own norm left it.
    """

    distances: tuple[Size, ...]
    count: Size
    states: str = "plain"


@dataclass(frozen=True)
class TraceMeta:
    """What holds for a whole trace. Unknown facts are None."""

    model: str
    layers: Size  # L: MoE layers, in the order of execution
    experts: Size  # E: routed experts of a layer
    top_k: Size  # k: experts that a token may choose in a layer
    layer_names: tuple[str, ...]
    expert_bytes: Size | None = None  # of the largest, where layers differ
    layer_expert_bytes: tuple[Size, ...] = ()  # of an expert of each layer, where the source states them
    dtype: str | None = None
    mode: str = "generate"  # what made it: generate, teacher-forced, import, aggregate, synthetic
    revision: str | None = None
    hidden_size: Size | None = None
    expert_intermediate_size: Size | None = None
    expert_hidden_size: Size | None = None  # of what experts read and write, where it is not hidden_size
    expert_matrices: Size = 3  # gate, up and down; 2 without a gate
    lookahead: Picks | None = None  # of the columns of that name; None: it has none
    candidates: Size | None = None  # of a token in a layer, where it has the columns candidates and scores
    tools: dict[str, str] = field(default_factory=dict)  # name of a program or library -> its version
    settings: dict[str, Any] = field(default_factory=dict)  # of what made it: option -> plain value

    def __post_init__(self) -> None:
        most = 1 << 31  # the length of an EAM, which Parquet counts in 31 bits
        possible = 1 <= self.top_k <= self.experts < 65535 and 1 <= self.layers * self.experts < most
        named = len(set(self.layer_names)) == len(self.layer_names) == self.layers
        sizes = len(self.layer_expert_bytes)
        refuse(
            (not possible, f"no model has {self.layers} MoE layers x {self.experts} experts, top-{self.top_k}"),
            ((self.candidates or self.top_k) < self.top_k, "candidates hold fewer experts than a token chooses"),
            (not named, f"{self.layers} MoE layers need as many different layer_names: {self.layer_names}"),
            (sizes not in (0, self.layers), f"layer_expert_bytes has {sizes} sizes for {self.layers} MoE layers"),
        )

    @property
    def largest_expert_bytes(self) -> int | None:
        """Bytes of an expert, of the largest where layers differ."""
        return max(self.layer_expert_bytes, default=self.expert_bytes)

    @property
    def id_type(self) -> np.dtype[np.unsignedinteger]:
        """The type of expert ids: uint8 where E <= 255, else uint16."""
        return np.dtype(np.uint8) if self.experts <= 255 else np.dtype(np.uint16)

    @property
    def sentinel(self) -> int:
        """The id that means: nothing was routed here."""
        return int(np.iinfo(self.id_type).max)

    def stored(self, ids: NDArray[np.integer]) -> NDArray[np.unsignedinteger]:
        """Return ids as a trace stores them. ids: negative where nothing was routed."""
        stored = ids.astype(self.id_type)
        stored[ids < 0] = self.sentinel
        return stored

    def shape(self, column: str) -> tuple[int, ...]:
        """Return the shape of a row of a routing column."""
        if column in ("experts", "weights", "hits"):
            return self.layers, self.top_k
        if column in ("lookahead", "lookahead_scores") and self.lookahead:
            return self.layers, len(self.lookahead.distances), self.lookahead.count
        if column in ("candidates", "scores") and self.candidates:
            return self.layers, self.candidates
        return ()

    def encode(self) -> dict[bytes, bytes]:
        return {KEY: json.dumps({"schema_version": VERSION, **asdict(self)}).encode()}

    @staticmethod
    def decode(metadata: dict[bytes, bytes] | None, where: str) -> "TraceMeta":
        """Return the meta in a Parquet file's metadata; an InputError naming `where` if there is none that fits."""
        if metadata is None or KEY not in metadata:
            raise InputError(f"{where} is not of a trace: its metadata has no {KEY.decode()!r}")
        values = dict(parse_json(metadata[KEY], f"{where}: its metadata"))
        version = values.pop("schema_version", None)
        if version != VERSION:
            raise InputError(f"{where} has schema version {version!r}, this program reads {VERSION}; record it again")
        return typed(TraceMeta, values, f"{where}: its metadata")


FLOAT = pa.float16()

OPTIONAL: dict[str, Callable[[TraceMeta], pa.DataType]] = {
    "weights": lambda meta: pa.list_(FLOAT, prod(meta.shape("weights"))),
    "lookahead": lambda meta: pa.list_(pa.from_numpy_dtype(meta.id_type), prod(meta.shape("lookahead"))),
    "lookahead_scores": lambda meta: pa.list_(FLOAT, prod(meta.shape("lookahead_scores"))),
    "candidates": lambda meta: pa.list_(pa.from_numpy_dtype(meta.id_type), prod(meta.shape("candidates"))),
    "scores": lambda meta: pa.list_(pa.float32(), prod(meta.shape("scores"))),
    "drafted": lambda meta: pa.int16(),
    "hits": lambda meta: pa.list_(pa.int8(), prod(meta.shape("hits"))),
}
"""Columns that a trace's routing files may hold, and their types.

hits: 1 where the engine that was recorded had the expert in its cache, 0 where it had not, -1 where it did not say.
lookahead: [L * distances * picks] what a layer's router picked so many layers before, the best first; the largest value
of the id type where there is no such layer. lookahead_scores: the probability that the router gave to each.
candidates: [L * C] the experts that a token chose, then those to which the router gave the highest scores besides.
scores: [L * C] the logarithm of the probability that the router gave to each.
drafted: of a recording that speculated, the tokens that were drafted behind this one in its forward pass (rule 20); -1:
it was drafted itself, and accepted. `step` numbers such tokens as if they had been decoded one by one.
"""


def routing_schema(meta: TraceMeta, optional: Iterable[str] = ()) -> pa.Schema:
    """Return the columns of routing/part-*.parquet; `optional` names those of OPTIONAL that are there."""
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


def requests_schema(meta: TraceMeta) -> pa.Schema:
    """Return the columns of requests.parquet, by request number."""
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
    return pa.schema(columns, metadata=meta.encode())


def row_bytes(schema: pa.Schema) -> int:
    """Return the bytes of a row in memory, texts left out."""
    bits = 0
    for kind in schema.types:
        if pa.types.is_fixed_size_list(kind):
            bits += kind.list_size * kind.value_type.bit_width
        elif not pa.types.is_string(kind):
            bits += kind.bit_width
    return -(-bits // 8)
