"""Write the seeds of the corpus anew: `python -m tests.fuzz.seeds`. They are committed; what fuzzers found stays.

Each is made by what writes its format: this project, or the writers of other tools' formats in `tests.support`.
"""

import gzip
import io
import json
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from numpy.typing import NDArray

from policies.blend.build import build
from policies.core.policy import Shape
from policies.eamc.collection import EamcOptions
from policies.eamc.file import Part, SavedEamc
from policies.prefetch.stride import Predictor
from replay.comparison.record import Record
from replay.devices import expert_file
from replay.report import HEADER
from sim import backtest
from sim.loop.requests import Requests
from sim.profiles import hardware_profile
from sim.tuning.journal import Journal
from sim.tuning.tune import tune
from tests.fuzz.harness import packed
from tests.fuzz.targets import EDIT, GOOD, PART, PROMPT_FILES, TARGETS, WEIGHTS, search
from tests.sim.test_expert_sizes import Gguf, write_gguf
from tests.sim.test_measured import DEMO
from tests.support.command import moe_sim
from tests.support.dumps import KNOWN, MAPPING, passes, sglang_answer, stat, vllm_answer
from tests.support.tiny import PROFILE, SIZES
from traces.schema import KEY, REQUESTS
from traces.writer import write_trace

ROOT = Path(__file__).parents[2]
PROFILES = Path(hardware_profile.__file__).parent
TINY = replace(KNOWN, meta=replace(KNOWN.meta, model="tiny", **SIZES))


def made(folder: Path, write: Callable[[Path], object], name: str = "x") -> bytes:
    """What `write` writes to a file."""
    write(folder / name)
    return (folder / name).read_bytes()


def unzipped(content: bytes) -> bytes:
    """An archive's members, as targets take them."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        return packed({name: archive.read(name) for name in archive.namelist()})


def npy(array: NDArray[Any]) -> bytes:
    """An array as a file."""
    out = io.BytesIO()
    np.save(out, array)
    return out.getvalue()


def parquet(table: pa.Table) -> bytes:
    """A table as a file."""
    out = io.BytesIO()
    pq.write_table(table, out)
    return out.getvalue()


def archives(folder: Path) -> Iterator[tuple[str, bytes]]:
    """Of numpy and torch."""
    phases: dict[str, NDArray[Any]] = {"phase": KNOWN.phase, "position": KNOWN.position}
    none: dict[str, NDArray[Any]] = {}
    for more in (none, phases):
        buffer = io.BytesIO()
        np.savez(buffer, allow_pickle=False, experts=KNOWN.experts, offsets=KNOWN.offsets, **more)
        yield "npz-bytes", buffer.getvalue()
        yield "npz-members", unzipped(buffer.getvalue())
    arrays: dict[str, NDArray[Any]] = {"x": KNOWN.experts.astype(np.int16), "offsets": KNOWN.offsets}
    yield "npy", packed({name: npy(array) for name, array in arrays.items()})
    yield "vllm-npy", npy(KNOWN.experts[:9].astype(np.uint8))
    ones = np.ones((2, 3, 8), np.int64)
    part = Part(ones, np.ones(2, np.int64), ones[:1])
    learned = SavedEamc(Shape(3, 8), EamcOptions(capacity=4), "t", (part, part))
    buffer = io.BytesIO()
    learned.write(buffer)
    yield "eamc-bytes", buffer.getvalue()
    yield "eamc-members", unzipped(buffer.getvalue())
    buffer = io.BytesIO()
    build([("good", Requests(GOOD))], Shape(GOOD.layers, GOOD.num_experts)).write(buffer)
    yield "profile-bytes", buffer.getvalue()
    yield "profile-members", unzipped(buffer.getvalue())
    predictor = Predictor(1, np.zeros((3, 3, 4, 4), np.float32), np.zeros((3, 4), np.float32))
    yield "stride-bytes", made(folder, predictor.save)
    yield "stride-members", unzipped(made(folder, predictor.save))
    held = {"records": [{"a": torch.arange(4), "b": [1, None, "x"], "c": (1.5, True)}], "n": {1: torch.zeros(2, 2)}}
    saved = made(folder, lambda path: torch.save(held, path))
    yield "pt-bytes", saved
    with zipfile.ZipFile(io.BytesIO(saved)) as archive:
        yield "pt-pickle", archive.read("x/data.pkl")


def dumps(folder: Path) -> Iterator[tuple[str, bytes]]:
    """Of servers, and of people."""
    yield "csv", b"layer,expert,count\n" + b"".join(b"%d,%d,%d\n" % (i % 3, i % 8, i + 1) for i in range(24))
    yield "csv", b"".join(b"%d,%d\n" % (i % 3, i % 8) for i in range(24))
    plain, apart = ([vllm_answer(KNOWN, i, apart) for i in range(2)] for apart in (False, True))
    servers = (("vllm", plain), ("vllm", apart), ("sglang", [sglang_answer(KNOWN, i) for i in range(2)]))
    for tool, answered in servers:
        yield f"{tool}-json", json.dumps(answered).encode()
        yield f"{tool}-jsonl", "".join(json.dumps(answer) + "\n" for answer in answered).encode()
    wrapped = {"custom_id": "a", "response": {"body": plain[0]}}
    yield "vllm-jsonl", json.dumps(wrapped).encode()
    small = replace_arrays(passes(KNOWN, MAPPING))
    yield "recorder", json.dumps({**small, "records": small["records"][:3]}).encode()
    yield "recorder", json.dumps(replace_arrays(stat(KNOWN))).encode()
    facts = {"model": "m", "experts": 6, "top_k": 2, "moe_layers": 2, "layer_names": ["a", "b"], "tools": {"x": "1"}}
    listed = [{"id": str(i), "task": "t", "prompt_tokens": 2, "arrival_ns": i} for i in range(3)]
    yield "meta-json", json.dumps({**facts, "phase": "decode", "requests": listed}).encode()
    rows = [
        {"question": "a b", "answer": "c", "category": "x", "id": 1},
        {"question": "d", "answer": 2.5, "category": None, "id": "y"},
    ]
    talk = [{"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]}]
    lines = "\n".join(map(json.dumps, rows)).encode()
    csv = b'question,answer,category\n"a, ""b""",c,x\nd,e,y\n'
    contents = (lines, json.dumps({"data": rows}).encode(), csv, csv.replace(b",", b"\t"), b"one\ntwo\n")
    table = pa.table({"prompt": ["a", "b"], "task": ["x", None]})
    for kind, content in enumerate((*contents, parquet(table), gzip.compress(lines, mtime=0))):
        assert len(PROMPT_FILES) > kind
        yield "prompts", bytes([kind]) + content
    yield "prompts", b"\1" + json.dumps(talk).encode()


def replace_arrays(value: Any) -> Any:
    """The same with lists in place of arrays."""
    if isinstance(value, dict):
        return {key: replace_arrays(one) for key, one in value.items()}
    if isinstance(value, list):
        return [replace_arrays(one) for one in value]
    return value.tolist() if isinstance(value, np.ndarray) else value


def texts(folder: Path) -> Iterator[tuple[str, bytes]]:
    """Files that people write by hand, and what a sweep writes."""
    machine = (PROFILES / "hardware" / "a5000.toml").read_bytes()
    yield "hardware-toml", machine
    yield "hardware-toml", machine + DEMO.encode()
    for name in ("olmoe-1b-7b", "deepseek-v2-lite", "gpt-oss-20b"):
        yield "model-toml", (PROFILES / "models" / f"{name}.toml").read_bytes()
    yield "config-json", (ROOT / "tracer" / "demo" / "model" / "config.json").read_bytes()
    each = (GOOD.steps(i) for i in range(3))
    rows = [(step.request, phase, n) for step in each for phase, n in zip(step.phase, step.tokens, strict=True)]
    played = [",".join(map(str, [*row, *[7] * (len(HEADER) - len(row))])) for row in rows]
    yield "steps-csv", "\r\n".join([",".join(HEADER), *played, ""]).encode()
    yield "backtest-toml", (Path(backtest.__file__).parent / "colibri.toml").read_bytes()
    yield "backtest-toml", (Path(backtest.__file__).parent / "disk.toml").read_bytes()
    write_trace(TINY, folder / "tiny")
    asked = ("--policies", "lru,eamc:capacity=100|300", "--cache-sizes", "25%,8", "--untimed")
    ended = moe_sim("sweep", folder / "tiny", *asked, "--out", "out", "--quiet", cwd=folder)
    assert ended.returncode == 0, ended.stderr
    for name in ("sweep", "winner"):
        yield f"{name}-toml", (folder / "out" / f"{name}.toml").read_bytes().replace(bytes(folder), b"")
    names = ("results.parquet", "requests.parquet")
    yield "results", packed({name: (folder / "out" / name).read_bytes() for name in names})
    record = Record(folder / "compare.json")
    record.begin(device="cpu", machine="a", copy_gb_per_s=1.5)
    record.put("k", {"model": "m", "measured": {"tpot_mean_ms": 1.0}, "errors": {"tpot_mean": 0.5}})
    yield "compare-json", (folder / "compare.json").read_bytes()
    checked = json.loads((ROOT / "replay" / "results" / "disk-2026-11-23.json").read_text())
    told = [cell for cell in checked["cells"] if cell.get("predicted")][:1]
    told += [cell for cell in checked["cells"] if "predicted" not in cell][:1]
    yield "check-json", json.dumps({**checked, "cells": told}).encode()
    for name in ("cases", "cases-tiers"):
        with gzip.open(ROOT / "tests" / "sim" / f"{name}.jsonl.gz", "rb") as lines:
            yield "cases", b"".join(sorted(lines, key=len)[:2])
    journal = Journal(folder)
    tune(search(), journal, lambda played: None)
    yield "journal", journal.path.read_bytes()
    for edit in ((8, 5, 0, 0, 0), (9, 8, 1, 0, 0), (12, 13, 0, 0, 7), (13, 16, 2, 0, -1), (5, 0, 0, 0, 2)):
        yield "results-values", EDIT.pack(*edit)


def weights(folder: Path) -> Iterator[tuple[str, bytes]]:
    """Files of experts."""
    yield "safetensors", WEIGHTS
    yield "weights", WEIGHTS
    index = {"weight_map": {"a": "model.safetensors"}}
    yield "safetensors-index", json.dumps(index).encode()
    tensors: Gguf = {f"blk.0.ffn_{part}_exps.weight": ((2, 1, 256), "Q4_K") for part in ("gate", "up", "down")}
    yield "gguf", made(folder, lambda path: write_gguf(path, tensors, tokens=3), "x.gguf")
    store = made(folder, lambda path: expert_file.write(path, PROFILE, lambda *_: None, "random", 1))
    yield "expert-store", store


def traces(folder: Path) -> Iterator[tuple[str, bytes]]:
    """Of a folder, and edits of it."""
    write_trace(GOOD, folder / "t")
    for kind, name in enumerate((REQUESTS, PART)):
        yield "trace-bytes", bytes([kind]) + (folder / "t" / name).read_bytes()
    yield "trace-meta", GOOD.meta.encode()[KEY]
    for edit in ((12, 2, 0, 0, 3), (13, 4, 1, 0, -1), (12, 5, 2, 1, 99), (0, 3, 0, 0, 0), (10, 0, 0, 0, 1)):
        yield "trace-values", EDIT.pack(*edit)


def main() -> None:
    """Write them."""
    for target in TARGETS.values():
        target.corpus.mkdir(parents=True, exist_ok=True)
        for old in target.corpus.glob("seed-*"):
            old.unlink()
    with tempfile.TemporaryDirectory() as scratch:
        for make in (archives, dumps, texts, weights, traces):
            folder = Path(scratch) / make.__name__
            folder.mkdir()
            for name, content in make(folder):
                corpus = TARGETS[name].corpus
                (corpus / f"seed-{len(list(corpus.glob('seed-*')))}").write_bytes(content)


if __name__ == "__main__":
    main()
