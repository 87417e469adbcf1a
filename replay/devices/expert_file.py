"""The experts of a model in one file, for a disk that is read past the operating system's page cache.

The container is safetensors (github.com/huggingface/safetensors, "Format"): tensors `expert.0`, `expert.1`, ... of U8,
laid out as `replay.model.network.Network.weights` and filled up to a multiple of 4,096 bytes, where O_DIRECT wants each
to begin. The metadata names the model, has a CRC-32 of each. With `--dedup N`, e, e + N, ... share one.
"""

import json
import os
import struct
import zlib
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Annotated, NamedTuple
from weakref import finalize

import msgspec

from replay.devices.lanes import PAGE, page_up
from replay.devices.store import Bytes, anonymous
from sim.probe.disk import open_direct
from traces.errors import InputError
from traces.models.profile import ModelProfile
from traces.models.safetensors_files import header_of
from traces.output import replacing

FORMAT = "moe-expert-cache experts 1"
CHECKSUM = "{:08x}"

Fill = Callable[[int, Bytes], None]  # writes an expert's bytes into a buffer of its size, uint8[n]


Positive = Annotated[int, msgspec.Meta(ge=1)]


@dataclass(frozen=True)
class Facts:
    """What a file says of itself: safetensors' metadata, all of it text there."""

    format: str
    model: str  # the model profile's name
    weights: str  # where they are from
    experts: Positive  # of the model, in all MoE layers
    distinct: Positive  # in the file
    expert_bytes: Positive  # of one; of the largest where layers differ
    checksums: str  # eight hexadecimal digits an expert
    command: str = ""  # that wrote it
    layer_bytes: str = ""  # of an expert of each layer, where they differ: whole numbers with commas

    @property
    def sizes(self) -> list[int]:
        layers = list(map(int, self.layer_bytes.split(","))) if self.layer_bytes else [self.expert_bytes]
        return [size for size in layers for _ in range(self.distinct // len(layers))]

    @property
    def places(self) -> list[int]:
        """Return where each expert in the file begins, from the first one's beginning, and where the last one ends."""
        return list(accumulate(map(page_up, self.sizes), initial=0))


class DirectFile:
    """An open file; past_cache: whether its bytes come from the disk at every read, past the system's page cache."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file, self.past_cache = open_direct(path)
        self._close = finalize(self, os.close, self._file)
        self._stamp = self._stamped()

    def read_at(self, target: memoryview, offset: int) -> int:
        """Read into `target`; return how many bytes. Raise InputError for an error of the disk."""
        try:
            return os.preadv(self._file, [target], offset)
        except OSError as error:
            raise InputError(f"{self.path} cannot be read: {error.strerror}") from error

    def read_pages(self, target: memoryview, offset: int, needed: int) -> None:
        """Read whole pages from `offset` on into `target`. Raise InputError where `needed` bytes are not there."""
        begin = 0
        while begin < needed:
            got = self.read_at(target[begin:], offset + begin)
            whole = got if begin + got >= needed else got // PAGE * PAGE  # else at the file's end
            if not whole:
                raise InputError(f"{self.path} is cut off at byte {offset + begin + got}")
            begin += whole

    def _stamped(self) -> tuple[int, int]:
        facts = os.fstat(self._file)
        return facts.st_size, facts.st_mtime_ns

    def require_unchanged(self) -> None:
        """Raise InputError if the file was written to since it was opened."""
        if self._stamped() != self._stamp:
            raise InputError(
                f"{self.path} was changed while it was read: what was computed with it may be wrong; start the command "
                "again"
            )

    def close(self) -> None:
        self._close()


class ExpertFile(DirectFile):
    """An open file of experts (an `ExpertSource`), of which the first one begins at byte `begin`."""

    def __init__(self, path: Path, model: "StoredModel | ModelProfile") -> None:
        """Raise InputError if the file is missing, cut off, or is of another model."""
        try:
            self.facts, self.begin = _header(path, model)
        except (OSError, ValueError) as error:
            raise InputError(f"{path} is no file of experts of {model.name} (moe-replay store): {error}") from error
        self.expert_bytes, self.distinct = self.facts.expert_bytes, self.facts.distinct
        self.stride = page_up(self.expert_bytes)
        self._sizes, self._places = self.facts.sizes, self.facts.places
        super().__init__(path)

    def bytes_of(self, expert: int) -> int:
        return self._sizes[expert % self.distinct]

    def read(self, expert: int, first: int, last: int, slot: Bytes) -> None:
        """Read whole pages: those that begin at or behind `first`, and before `last`."""
        begin, end = page_up(first), min(page_up(last), page_up(self.bytes_of(expert)))
        at = self.begin + self._places[expert % self.distinct] + begin
        self.read_pages(slot.data[begin:end], at, end - begin)

    def holds(self, expert: int, content: Bytes) -> bool:
        place = expert % self.distinct * 8
        return CHECKSUM.format(zlib.crc32(content.data)) == self.facts.checksums[place : place + 8]


class StoredModel(NamedTuple):
    """What a file of experts states of their model."""

    name: str
    moe_layers: int
    experts: int  # of a layer
    expert_bytes: int
    differing_bytes: tuple[int, ...] = ()  # of an expert of each layer


def write(
    path: Path,
    model: "StoredModel | ModelProfile",
    fill: Fill,
    weights: str,
    distinct: int,
    on_written: Callable[[], None] = lambda: None,
    overwrite: bool = True,
    command: str = "",
) -> None:
    """Write a file whole or not at all: the bytes of `distinct` experts, as `fill` gives them; on_written: after each.

    weights: where they are from, in words. Raise InputError where the disk has not enough space, where experts of
    several sizes would share bytes, and without `overwrite` where a file is there by then.
    """
    experts, sizes = model.moe_layers * model.experts, ",".join(map(str, model.differing_bytes))
    if sizes and distinct != experts:
        raise InputError(f"experts of {model.name} differ in size and share none: leave `dedup` out")
    unknown = "0" * 8 * distinct
    facts = Facts(FORMAT, model.name, weights, experts, distinct, model.expert_bytes, unknown, command, sizes)
    begin, buffer, checksums = len(_header_of(facts)), anonymous(page_up(model.expert_bytes)), list[str]()
    with replacing(path, overwrite=overwrite) as part, part.open("wb") as file:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, begin + facts.places[-1])
        file.seek(begin)
        for expert, size in enumerate(facts.sizes):
            fill(expert, buffer[:size])
            buffer[size:] = 0
            checksums.append(CHECKSUM.format(zlib.crc32(buffer[:size].data)))
            file.write(buffer[: page_up(size)].data)
            on_written()
        file.seek(0)
        file.write(_header_of(replace(facts, checksums="".join(checksums))))
        file.flush()
        os.fsync(file.fileno())


def command_of(path: Path) -> str:
    """Return the command that wrote a file of experts; nothing where another program did."""
    return str(header_of(path)[0]["__metadata__"].get("command", ""))


def _header_of(facts: Facts) -> bytes:
    """Return the length of the header and the header, filled up with spaces to whole pages."""
    stated = {name: str(value) for name, value in asdict(facts).items() if value != ""}
    header: dict[str, object] = {"__metadata__": stated}
    for expert, (begin, end) in enumerate(pairwise(facts.places)):
        header[f"expert.{expert}"] = {"dtype": "U8", "shape": [end - begin], "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    length = page_up(8 + len(text)) - 8
    return struct.pack("<Q", length) + text.ljust(length)


def _header(path: Path, model: "StoredModel | ModelProfile") -> tuple[Facts, int]:
    """Return the facts that a file states, and where its experts begin. Raise ValueError where they are not so."""
    header, begin = header_of(path)
    facts = msgspec.convert(header.get("__metadata__"), Facts, strict=False)
    experts = model.moe_layers * model.experts
    if facts.format != FORMAT or len(facts.checksums) != 8 * facts.distinct:
        raise ValueError("it is of another version")
    sizes = ",".join(map(str, model.differing_bytes))
    held, wanted = facts.layer_bytes or str(facts.expert_bytes), sizes or str(model.expert_bytes)
    if (facts.model, facts.experts, held) != (model.name, experts, wanted):
        raise ValueError(
            f"it holds {facts.model} ({facts.weights}): {facts.experts} experts of {_in_words(held)}; "
            f"{model.name} has {experts} of {_in_words(wanted)}"
        )
    if path.stat().st_size != begin + facts.places[-1]:
        raise ValueError("it is cut off")
    return facts, begin


def _in_words(layer_bytes: str) -> str:
    sizes = list(map(int, layer_bytes.split(",")))
    return f"{sizes[0]} bytes" if len(sizes) == 1 else f"{min(sizes)} to {max(sizes)} bytes by layer"
