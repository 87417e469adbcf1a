"""Files as rows: CSV and Parquet, JSON and JSON lines, and binary files with a written specification.

K3 route trace version 1: a header, records of one length, a trailer with a CRC-32 of all before it
(murillo128/k3-out-of-core, route-trace-v1.md). imatrix: a GGUF file with NAME.counts [experts] for each tensor of
experts (llama.cpp, tools/imatrix/imatrix.cpp); its older format, .dat, has means by expert but no counts.
"""

import io
import re
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pandas as pd

from traces.errors import InputError
from traces.facts import parse_json
from traces.importers.source import Source
from traces.importers.words import fact

K3, K3_END = b"K3ROUTE\0", struct.Struct("<8sQII")
K3_RECORD = "magic length ordinal:u8 request:u8 ubatch:u8 phase layer:i4 row token:i4 sequences sequence:i4 k"
TENSOR = re.compile(r"blk\.(\d+)\.ffn_(gate|up|gate_up|down)_exps\.weight\.counts")
CUT = re.compile(r"(\d+)")
ARRAYS = (".npz", ".npy", ".pt")
"""What the names of files of arrays end in (`traces.importers`)."""
OTHER = re.compile(r"readme|license|notice|\.(md|png|py|txt|ipynb|sh|toml)$|^\.", re.IGNORECASE)
"""Files of a folder that are no dumps."""


def files_of(path: Path) -> list[Path]:
    """Return `path`, or the files of the folder `path` and its folders that may be dumps, layer 2 before layer 10."""
    if not path.is_dir():
        return [path]
    found = [one for one in path.rglob("*") if one.is_file() and not OTHER.search(one.name)]
    return sorted(found, key=lambda one: [int(part) if part.isdigit() else part for part in CUT.split(str(one))])


def records_of(path: Path, raw: bytes) -> list[Any]:
    """Return the JSON values of a file: one, those of a list, or one a line. Raises InputError."""
    try:
        value = msgspec.json.decode(raw)
    except msgspec.DecodeError:
        lines = enumerate(filter(bytes.strip, raw.split(b"\n")))
        return [parse_json(line, f"{path} answer {number}") for number, line in lines]
    return value if isinstance(value, list) and value and isinstance(value[0], dict) else [value]


def frame_of(source: Source, path: Path, raw: bytes) -> pd.DataFrame:
    """Return a file that is no JSON as rows. Raises InputError for what is of no known kind."""
    if kind := next((one for one in BINARY.values() if raw.startswith(one.begins)), None):
        return kind.read(source, path, raw)
    if 0 < int.from_bytes(raw[4:8], "little") < 256 and re.match(rb"blk\.\d+\.|output|token_embd", raw[8:32]):
        raise InputError(f"{path} is an imatrix of the older format, with no counts by expert: write it again as GGUF")
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise InputError(f"{path} is of no known kind: {', '.join(KINDS)}") from None
    return _csv(source, path, text)


def _csv(source: Source, path: Path, text: str) -> pd.DataFrame:
    """Return a table of any delimiter; header comments state facts. Without a header: layer, expert, count."""
    lines = text.split("\n", 4096)[:4096]
    _state(source, [line for line in lines if line.startswith("#")])
    head = next((line for line in lines if line.strip() and not line.startswith("#")), "")
    delimiter = max("\t,;|", key=head.count)
    columns, names = head.count(delimiter) + 1, None
    if head.split(delimiter)[0].strip().isdigit():
        names = ["layer", "expert", "count"][:columns]
        if columns not in (2, 3):
            raise InputError(f"{path} has {columns} columns without names: write a line with their names first")
    try:
        return pd.read_csv(io.StringIO(text), sep=delimiter, comment="#", names=names, skipinitialspace=True)
    except ValueError as error:
        raise InputError(f"{path} is no table with columns: {error}") from None


def _state(source: Source, comments: list[str]) -> None:
    """Take what header comments state as `name=value`: facts, and the bytes of the experts of each layer."""
    sizes: dict[int, int] = {}
    for line in comments:
        pairs = dict(re.findall(r"([\w.]+)\s*[=:]\s*(\S+)", line))
        if {"layer", "expert_bytes"} <= pairs.keys():
            sizes[int(pairs["layer"])] = int(pairs["expert_bytes"])
            continue
        for name, value in pairs.items():
            if fact(name) == "model":
                source.stated.setdefault("model", re.sub(r"\.gguf$", "", re.split(r"[/\\]", value)[-1]))
            elif (known := fact(name)) and value.isdigit():
                source.stated.setdefault(known, int(value))
    if sizes:
        source.stated["expert_bytes_by_layer"] = sizes
        source.found.append(f"bytes of an expert of {len(sizes)} layers, from the header")


def _k3(source: Source, path: Path, raw: bytes) -> pd.DataFrame:
    """Return the records of a K3 route trace. Raises InputError where checksum or records are not as specified."""
    mark, count, crc, _ = K3_END.unpack(raw[-K3_END.size :])
    version, length, name = struct.unpack_from("<III", raw, 8)
    if mark != b"K3DONE\0\0" or version != 1 or zlib.crc32(raw[: -K3_END.size]) != crc:
        raise InputError(f"{path} is no complete K3 route trace of version 1: its end or its checksum is wrong")
    experts, k, layers = struct.unpack_from("<III", raw, 16 + length - 12)
    source.stated.update(model=Path(raw[20 : 20 + name].decode()).stem, experts=experts, top_k=k, layers=layers)
    fields = [(part.partition(":")[0], f"<{part.partition(':')[2] or 'u4'}") for part in K3_RECORD.split()]
    record = np.dtype([*fields, ("e", "<i4", k), ("w", "<f4", k)])
    body = raw[16 + length : -K3_END.size]
    held = np.frombuffer(body, record) if len(body) == count * record.itemsize else np.zeros(0, record)
    if len(held) != count or (held["sequences"] != 1).any() or (held["ordinal"] != np.arange(count)).any():
        raise InputError(f"{path}: its {count} records are not in order, of one sequence and {k} experts each")
    source.found.append(f"{path.name}: K3 route trace, {count} records, checksum right")
    frame = pd.DataFrame({role: held[role].astype(np.int64) for role in ("request", "phase", "layer", "token")})
    wide = {f"{name}{j}": held[name][:, j] for name in "ew" for j in range(k)}
    return frame.assign(phase=np.where(frame["phase"] == 1, "prefill", "decode"), **wide)


def _imatrix(source: Source, path: Path, raw: bytes) -> pd.DataFrame:
    """Return the counts of an imatrix: of one of the tensors of each layer, as all count the same tokens."""
    import gguf  # the extra `gguf`

    counted = {int(name[1]): one.data for one in gguf.GGUFReader(path).tensors if (name := TENSOR.fullmatch(one.name))}
    if not counted:
        raise InputError(f"{path} has no counts by expert: it is no imatrix of an MoE model")
    held = [(layer, e, int(n)) for layer, data in sorted(counted.items()) for e, n in enumerate(np.ravel(data))]
    return pd.DataFrame(held, columns=["layer", "expert", "count"])


class Binary(NamedTuple):
    """A kind of binary file."""

    begins: bytes
    read: Callable[[Source, Path, bytes], pd.DataFrame]


BINARY = {
    "Parquet": Binary(b"PAR1", lambda source, path, raw: pd.read_parquet(io.BytesIO(raw))),
    "K3 route trace": Binary(K3, _k3),
    "imatrix": Binary(b"GGUF", _imatrix),
}
KINDS = ("JSON", "JSON lines", "CSV", *BINARY, *ARRAYS)
"""All kinds of files that are read, by the names that people know."""
