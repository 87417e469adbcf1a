"""The experts of a model in one file, for a disk that is read past the operating system's page cache.

The container is safetensors (github.com/huggingface/safetensors, "Format"): tensors `expert.0`, `expert.1`, ... of type
U8, each an expert in the layout of `replay.model.network.Network.weights` (gate, up and down, or up and down), and what
fills it up to a multiple of 4,096 bytes, so that each expert begins at such a multiple: what O_DIRECT asks for. The
metadata says which model it is, and has a CRC-32 of each expert. Experts e, e + N, e + 2N, ... share the tensor of e
where the file holds N of them (`moe-replay store --dedup N`).
"""

import json
import os
import struct
import zlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec

from replay.devices.lanes import PAGE, page_up
from replay.devices.store import Bytes, anonymous
from sim.profiles.model_profile import ModelProfile
from sim.profiles.safetensors_files import header_of
from traces.errors import InputError, located
from traces.output import replacing

FORMAT = "moe-expert-cache experts 1"
CHECKSUM = "{:08x}"
READ_BYTES = 16 << 20
"""Of a read, where a whole file is read."""

Fill = Callable[[int, Bytes], None]
"""Writes an expert's bytes into a buffer, uint8[expert_bytes]."""


Positive = Annotated[int, msgspec.Meta(ge=1)]


@dataclass(frozen=True)
class Facts:
    """What a file says of itself: safetensors' metadata, all of it text there."""

    format: str
    model: str  # the model profile's name
    weights: str  # where they are from
    experts: Positive  # of the model, in all MoE layers
    distinct: Positive  # in the file
    expert_bytes: Positive
    checksums: str  # eight hexadecimal digits an expert


class ExpertFile:
    """An open file of experts (an `ExpertStore`), of which the first one begins at byte `begin`.

    past_cache: whether its bytes come from the disk at every read.
    """

    def __init__(self, path: Path, model: "StoredModel | ModelProfile") -> None:
        """Raise InputError if the file is missing, cut off, or is of another model."""
        self.path = path
        with located(str(path)):
            if not path.is_file():
                raise InputError("there is no such file; moe-replay store writes one")
            self.facts, self.begin = _header(path)
            _require(self.facts, model)
        self.expert_bytes, self.distinct = self.facts.expert_bytes, self.facts.distinct
        self.stride = stride_of(self.expert_bytes)
        if path.stat().st_size != self.begin + self.nbytes:
            raise InputError(f"{path} is cut off: write it again with moe-replay store")
        self._file, self.past_cache = open_past_cache(path)
        self._stamp = stamp(self._file)

    def read(self, expert: int, first: int, last: int, slot: Bytes) -> None:
        """Read whole pages: those that begin at or behind `first`, and before `last`."""
        begin, end = page_up(first), min(page_up(last), self.stride)
        at, target = self.begin + expert % self.distinct * self.stride, slot.data
        while begin < end:
            got = read_at(self.path, self._file, target[begin:end], at + begin)
            begin += got if begin + got >= end else got // PAGE * PAGE
            if got < PAGE and begin < end:
                raise InputError(f"{self.path}: expert {expert} is cut off: the file has shrunk while it was read")

    def holds(self, expert: int, content: Bytes) -> bool:
        place = expert % self.distinct * 8
        return CHECKSUM.format(zlib.crc32(content.data)) == self.facts.checksums[place : place + 8]

    @property
    def nbytes(self) -> int:
        return self.distinct * self.stride

    def require_unchanged(self) -> None:
        """Raise InputError if the file was written to since it was opened."""
        require_unchanged(self.path, self._file, self._stamp)

    def close(self) -> None:
        os.close(self._file)


def stride_of(expert_bytes: int) -> int:
    """Return the bytes from one expert's beginning to the next one's."""
    return page_up(expert_bytes)


class StoredModel(NamedTuple):
    """What a file of experts states of their model."""

    name: str
    moe_layers: int
    experts: int  # of a layer
    expert_bytes: int


def write(
    path: Path,
    model: "StoredModel | ModelProfile",
    fill: Fill,
    weights: str,
    distinct: int,
    on_written: Callable[[], None] = lambda: None,
    overwrite: bool = True,
) -> None:
    """Write a file whole or not at all.

    fill: gives the bytes of each expert. weights: where they are from, in words. distinct: how many experts the file
    holds, at least 1. on_written: called after each. Raise InputError where the disk has not enough space, and without
    `overwrite` where a file is there by then.
    """
    size, stride = model.expert_bytes, stride_of(model.expert_bytes)
    facts = Facts(FORMAT, model.name, weights, model.moe_layers * model.experts, distinct, size, "0" * 8 * distinct)
    begin, buffer, checksums = len(_header_of(facts)), anonymous(stride), list[str]()
    with replacing(path, overwrite=overwrite) as part, part.open("wb", buffering=0) as file:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, begin + distinct * stride)
        file.seek(begin)
        for expert in range(distinct):
            fill(expert, buffer[:size])
            checksums.append(CHECKSUM.format(zlib.crc32(buffer[:size].data)))
            _write_all(file.fileno(), buffer.data)
            on_written()
        file.seek(0)
        _write_all(file.fileno(), _header_of(replace(facts, checksums="".join(checksums))))
        os.fsync(file.fileno())


def _write_all(file: int, content: bytes | memoryview) -> None:
    left = memoryview(content)
    while left:
        left = left[os.write(file, left) :]


def _header_of(facts: Facts) -> bytes:
    """Return the length of the header and the header, filled up with spaces to whole pages."""
    stride = stride_of(facts.expert_bytes)
    header: dict[str, object] = {"__metadata__": {name: str(value) for name, value in asdict(facts).items()}}
    for expert in range(facts.distinct):
        offsets = [expert * stride, (expert + 1) * stride]
        header[f"expert.{expert}"] = {"dtype": "U8", "shape": [stride], "data_offsets": offsets}
    text = json.dumps(header, separators=(",", ":")).encode()
    length = page_up(8 + len(text)) - 8
    return struct.pack("<Q", length) + text.ljust(length)


def _header(path: Path) -> tuple[Facts, int]:
    """Return the facts that a file states, and where its experts begin."""
    try:
        header, begin = header_of(path)
        facts = msgspec.convert(header.get("__metadata__"), Facts, strict=False)
    except (InputError, msgspec.ValidationError) as error:
        raise InputError(f"is no file of experts, as moe-replay store writes one: {error}") from error
    if facts.format != FORMAT or len(facts.checksums) != 8 * facts.distinct:
        raise InputError("is not a file of experts of this version: write it again with moe-replay store")
    return facts, begin


def _require(facts: Facts, model: "StoredModel | ModelProfile") -> None:
    """Raise InputError where the file's experts are not the model's."""
    experts = model.moe_layers * model.experts
    if (facts.model, facts.experts, facts.expert_bytes) != (model.name, experts, model.expert_bytes):
        raise InputError(
            f"holds {facts.model} ({facts.weights}): {facts.experts} experts of {facts.expert_bytes} bytes; "
            f"{model.name} has {experts} of {model.expert_bytes}"
        )


def open_past_cache(path: Path) -> tuple[int, bool]:
    """Return a descriptor, and whether what it reads passes by the page cache."""
    if hasattr(os, "O_DIRECT"):
        with suppress(OSError):  # some file systems know it not
            return os.open(path, os.O_RDONLY | os.O_DIRECT), True
    file = os.open(path, os.O_RDONLY)
    with suppress(ImportError, AttributeError, OSError):  # macOS
        import fcntl

        fcntl.fcntl(file, fcntl.F_NOCACHE, 1)  # type: ignore[attr-defined]
        return file, True
    return file, False


def read_at(path: Path, file: int, target: memoryview, offset: int) -> int:
    """Read from the open file into `target`; return how many bytes. Raise InputError for an error of the disk."""
    try:
        return os.preadv(file, [target], offset)
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from error


def stamp(file: int) -> tuple[int, int]:
    """Return what differs once an open file was written to: its size, and when that was."""
    facts = os.fstat(file)
    return facts.st_size, facts.st_mtime_ns


def require_unchanged(path: Path, file: int, before: tuple[int, int]) -> None:
    """Raise InputError if the open file has another `stamp` than before."""
    if stamp(file) != before:
        raise InputError(
            f"{path} was changed while it was read: what was computed with it may be wrong; start the command again"
        )


def read_through(path: Path) -> None:
    """Read a file whole, as lanes will: what lies below a virtual disk may have kept some of it, or none."""
    file, _ = open_past_cache(path)
    memory, at, got = anonymous(READ_BYTES), 0, 1
    try:
        while got and at < os.fstat(file).st_size:
            at += (got := read_at(path, file, memory.data, at))
    finally:
        os.close(file)
