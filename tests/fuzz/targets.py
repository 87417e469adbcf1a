"""The targets: one for each reader of bytes that other people or programs wrote.

Some formats carry checksums, or are compressed, so that a mutated file is refused at once. Of these the content is
fuzzed too: members of archives, and edits of a trace's tables.
"""

import atexit
import io
import json
import struct
import zipfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from shutil import rmtree
from tempfile import TemporaryDirectory, mkdtemp
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from safetensors.numpy import save

from policies.blend.build import build
from policies.core.policy import Shape
from policies.core.spec import parse
from policies.eamc.file import SavedEamc
from policies.prefetch.stride import Predictor
from replay.comparison.record import CONTENT, Record
from replay.devices.expert_file import ExpertFile
from replay.devices.store import anonymous
from replay.gpu_check import draw
from replay.keys import digest_of
from replay.model.weights import Checkpoint
from replay.report import done_before
from sim.backtest import file as backtest
from sim.engines.cases import run_file
from sim.experiment import Experiment
from sim.loop.requests import Requests
from sim.profiles.expert_sizes import expert_bytes_by_layer
from sim.profiles.hardware_profile import hardware
from sim.profiles.model_profile import model
from sim.results import compare
from sim.results.compare import SweptRun
from sim.sweeps import config, winner
from sim.tuning.journal import Journal
from sim.tuning.search_space import space_of
from sim.tuning.tune import Halves, Search, tune
from tests.fuzz import checks
from tests.fuzz.harness import Target, members
from tests.support.tiny import PROFILE
from tracer.prompts import Columns, read_prompts
from tracer.torch_dumps import load
from traces.errors import InputError
from traces.files import read_toml
from traces.importers import Options, import_dump
from traces.reader import EXTRA
from traces.schema import KEY, REQUESTS, ROUTING
from traces.shards import Shards
from traces.synthetic import synthetic
from traces.trace import Trace
from traces.writer import write_trace

PART = f"{ROUTING}/part-00000.parquet"


def written(name: str, read: Callable[[Path], object]) -> Callable[[bytes, Path], object]:
    """A reader of one file of that name."""

    def apply(content: bytes, folder: Path) -> object:
        (folder / name).write_bytes(content)
        return read(folder / name)

    return apply


def archived(name: str, read: Callable[[Path], object]) -> Callable[[bytes, Path], object]:
    """A reader of an archive of that name, whose members are fuzzed."""

    def apply(content: bytes, folder: Path) -> object:
        with zipfile.ZipFile(folder / name, "w") as archive:
            for member, held in members(content).items():
                archive.writestr(member or "-", held)
        return read(folder / name)

    return apply


def read_trace(folder: Path) -> None:
    """Whole, and request by request."""
    for i in range(min(100, len((shards := Shards.open(folder)).requests))):
        shards.steps(i)
    Trace.read(folder, EXTRA)


@cache
def good_files() -> dict[str, bytes]:
    """Of a trace, by their names."""
    with TemporaryDirectory() as scratch:
        write_trace(GOOD, Path(scratch) / "t")
        return {name: (Path(scratch) / "t" / name).read_bytes() for name in (REQUESTS, PART)}


def good() -> dict[str, pa.Table]:
    """The tables in them."""
    return {name: pq.read_table(pa.BufferReader(content)) for name, content in good_files().items()}


def read_tables(folder: Path, tables: dict[str, pa.Table]) -> None:
    """A trace of these tables."""
    for name, table in tables.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(table, folder / name)
    read_trace(folder)


def trace_bytes(content: bytes, folder: Path) -> None:
    """One of the two files of a trace; the first byte says which."""
    fuzzed = REQUESTS if content[:1] == b"\0" else PART
    for name, whole in good_files().items():
        (folder / "t" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "t" / name).write_bytes(content[1:] if name == fuzzed else whole)
    read_trace(folder / "t")


def trace_meta(content: bytes, folder: Path) -> None:
    """The JSON in the metadata of both files of a trace."""
    read_tables(folder / "t", {name: table.replace_schema_metadata({KEY: content}) for name, table in good().items()})


EDIT = struct.Struct("<BBBbq")
"""Kind of the edit, column, row, place in a list, value."""


def trace_values(content: bytes, folder: Path) -> None:
    """The tables of a trace, edited."""
    tables = edited([good()[name] for name in (PART, REQUESTS)], content)
    read_tables(folder / "t", dict(zip((PART, REQUESTS), tables, strict=True)))


def edited(whole_tables: Sequence[pa.Table], content: bytes) -> list[pa.Table]:
    """Two tables with edits: each EDIT sets a value, or changes a column. An odd kind is of the second."""
    tables = list(whole_tables)
    whole = content[: min(len(content), 40 * EDIT.size) // EDIT.size * EDIT.size]
    for kind, column, row, place, value in EDIT.iter_unpack(whole):
        table = tables[kind % 2]
        if len(table) and table.num_columns:
            tables[kind % 2] = _edited(table, kind // 2 % 8, column % table.num_columns, row, place, value)
    return tables


def _edited(table: pa.Table, kind: int, i: int, row: int, place: int, value: int) -> pa.Table:
    """A table with one value or one column changed; as it was where Arrow cannot hold that."""
    field, row = table.schema.field(i), row % len(table)
    match kind:
        case 0:
            return table.remove_column(i)
        case 1:
            return table.append_column(field, table.column(i))
        case 2:
            return table.slice(row, max(0, value % (len(table) + 1)))
        case 3:
            return pa.concat_tables([table, table.slice(row)])
    rows = table.column(i).to_pylist()
    if isinstance(rows[row], list):
        rows[row] = list(rows[row])
        rows[row][place % len(rows[row])] = None if kind == 4 else value
    else:
        rows[row] = None if kind == 4 else str(value) if pa.types.is_string(field.type) else value
    try:
        kept = field.type if kind != 5 else None  # whatever type the values have
        return table.set_column(i, pa.field(field.name, kept or pa.array(rows).type), pa.array(rows, kept))
    except (pa.ArrowException, OverflowError, TypeError, ValueError):
        return table


def recorder(content: bytes, folder: Path) -> object:
    """A dump of SGLang's recorder as JSON, whose lists of lists are tensors."""
    try:
        held = json.loads(content, parse_constant=lambda _: 0)
    except (ValueError, RecursionError) as error:
        raise InputError("no dump") from error
    (folder / "x.pt").write_bytes(b"")
    return import_dump(folder / "x.pt", options=Options(top_k=2, layer_map="1-3"), load_pt=lambda _: _tensors(held))


def _tensors(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _tensors(one) for key, one in value.items()}
    if isinstance(value, list) and value and isinstance(value[0], list):
        try:
            return np.array(value)
        except (ValueError, OverflowError):
            return value
    return [_tensors(one) for one in value] if isinstance(value, list) else value


def torch_pickle(content: bytes, folder: Path) -> object:
    """The pickle in a torch file, whose other members are a tensor's."""
    with zipfile.ZipFile(folder / "x.pt", "w") as archive:
        archive.writestr("x/data.pkl", content)
        archive.writestr("x/byteorder", "little")
        archive.writestr("x/data/0", bytes(32))
        archive.writestr("x/version", "3\n")
    return load(folder / "x.pt")


PROMPT_FILES = ("x.jsonl", "x.json", "x.csv", "x.tsv", "x.txt", "x.parquet", "x.jsonl.gz")


def prompts(content: bytes, folder: Path) -> object:
    """A file of prompts; the first byte chooses its kind."""
    path = folder / PROMPT_FILES[content[0] % len(PROMPT_FILES) if content else 0]
    path.write_bytes(content[1:])
    return read_prompts(path, Columns())


def steps(content: bytes, folder: Path) -> object:
    """The steps of a run that was cut off."""
    (folder / "run.json").write_text(json.dumps({"key": "k"}))
    (folder / "per_token.csv").write_bytes(content)
    return done_before(folder, "k", [GOOD.steps(i) for i in range(3)])


def answers(name: str, options: Options, format: str = "auto") -> Callable[[bytes, Path], object]:
    """Answers of a server."""
    return written(name, lambda path: import_dump(path, options=options, format=format))


def npy(content: bytes, folder: Path) -> object:
    """Experts in a .npy, offsets beside it."""
    held = members(content)
    (folder / "x.npy").write_bytes(held.get("x", b""))
    (folder / "x.offsets.npy").write_bytes(held.get("offsets", b""))
    return import_dump(folder / "x.npy")


def meta_json(content: bytes, folder: Path) -> object:
    """The facts beside a dump."""
    np.savez(folder / "x.npz", experts=GOOD.experts, offsets=GOOD.offsets)
    (folder / "meta.json").write_bytes(content)
    return import_dump(folder / "x.npz", meta=folder / "meta.json")


def index(content: bytes, folder: Path) -> object:
    """The index of a folder of weights."""
    (folder / "model.safetensors").write_bytes(WEIGHTS)
    (folder / "model.safetensors.index.json").write_bytes(content)
    checkpoint(folder / "model.safetensors")
    return expert_bytes_by_layer(folder)


def checkpoint(path: Path) -> None:
    """The header of a file of weights, and an expert of them."""
    Checkpoint(path.parent, SMALL).fill(0, np.zeros(SMALL.expert_bytes, np.uint8))


def expert_store(path: Path) -> None:
    """An expert is read where the header fits."""
    store = ExpertFile(path, PROFILE)
    slot = anonymous(store.stride)
    try:
        store.read(0, 0, min(store.stride, 4096), slot)
        store.holds(0, slot[: store.expert_bytes])
    finally:
        store.close()


def asked(path: Path) -> object:
    """A sweep's file, and flags for what it leaves out."""
    flags: dict[str, Any] = {"traces": ["t"], "policies": ["lru"], "cache_sizes": ["25%"], "hardware": ["a5000"]}
    found = config.Sweep.of({**flags, **read_toml(path)})
    return found.cells, found.specs if found.cells < 1000 else None


RESULTS = ("results.parquet", "requests.parquet")


def results(content: bytes, folder: Path) -> list[SweptRun]:
    """The tables of a sweep."""
    held = members(content)
    for name in RESULTS:
        (folder / name).write_bytes(held.get(name, b""))
    return compare.read(folder)


@cache
def good_results() -> tuple[pa.Table, ...]:
    """The tables in the corpus."""
    held = members(TARGETS["results"].seeds()["seed-0"])
    return tuple(pq.read_table(pa.BufferReader(held[name])) for name in RESULTS)


def results_values(content: bytes, folder: Path) -> list[SweptRun]:
    """The tables of a sweep, edited."""
    for name, table in zip(RESULTS, edited(good_results(), content), strict=True):
        pq.write_table(table, folder / name)
    return compare.read(folder)


def record(path: Path) -> str:
    """Finished cells, under the digest that fits them."""
    with suppress(ValueError, RecursionError):
        if isinstance(found := json.loads(path.read_bytes()), dict):
            found.pop(CONTENT, None)
            path.write_text(json.dumps({**found, CONTENT: digest_of(found)}))
    return Record.open(path, resume=True).text()


def profile(path: Path) -> object:
    """What eamc-blend has learned, and a few requests after it."""
    return build([("good", Requests(GOOD))], Shape(GOOD.layers, GOOD.num_experts), path)


@cache
def search() -> Search:
    """One of few trials."""
    policy = parse("eamc")
    space = space_of(policy, Shape(GOOD.layers, GOOD.num_experts), "capacity=5..8:cosine=flat|rows")
    scratch = mkdtemp()
    atexit.register(rmtree, scratch, ignore_errors=True)
    write_trace(GOOD, Path(scratch) / "t")
    return Search(Halves.of(Experiment(f"{scratch}/t", untimed=True)), policy, 4, space, 3, seed=0, workers=1)


def journal(path: Path) -> object:
    """The trials of a search, which is continued."""
    found = Journal(path.parent)
    return tune(search(), found, lambda played: None) if found.trials else found.searched


def drawn(path: Path) -> object:
    """A file of `make gpu-check`, put into words and drawn."""
    return draw.told(path, drawn=True)


GOOD = synthetic(3, 3, 2, 6, 2, seed=0, prompt_tokens=2)

SMALL = replace(PROFILE, moe_layers=2, experts=2, top_k=1, hidden_size=4, expert_intermediate_size=2)

WEIGHTS = save(
    {
        f"model.layers.{layer}.mlp.experts.{expert}.{part}_proj.weight": np.zeros(shape, np.float16)
        for layer in range(2)
        for expert in range(2)
        for part, shape in (("gate", (2, 4)), ("up", (2, 4)), ("down", (4, 2)))
    }
)

TARGETS = {
    target.name: target
    for target in (
        Target("trace-bytes", trace_bytes, checks.a_trace),
        Target("trace-meta", trace_meta, checks.a_trace),
        Target("trace-values", trace_values, checks.a_trace),
        Target("npz-bytes", written("x.npz", import_dump), checks.imported),
        Target("npz-members", archived("x.npz", import_dump), checks.imported),
        Target("npy", npy, checks.imported),
        Target("meta-json", meta_json, checks.imported),
        Target("csv", written("x.csv", lambda path: import_dump(path, options=Options(top_k=2))), checks.imported),
        Target("vllm-json", answers("x.json", Options(experts=8), "vllm"), checks.imported),
        Target("vllm-jsonl", answers("x.jsonl", Options()), checks.imported),
        Target(
            "vllm-npy",
            written("x.npy", lambda path: import_dump(path, options=Options(phase="decode"))),
            checks.imported,
        ),
        Target("sglang-json", answers("x.json", Options(layers=3, top_k=2), "sglang"), checks.imported),
        Target("sglang-jsonl", answers("x.jsonl", Options(layers=3, top_k=2)), checks.imported),
        Target("recorder", recorder, checks.imported),
        Target("pt-bytes", written("x.pt", load)),
        Target("pt-pickle", torch_pickle),
        Target("prompts", prompts, checks.prompts),
        Target("hardware-toml", written("x.toml", lambda path: hardware(str(path))), checks.a_machine),
        Target("model-toml", written("x.toml", lambda path: model(str(path))), checks.a_model),
        Target("config-json", written("config.json", lambda path: model(str(path))), checks.a_model),
        Target("steps-csv", steps),
        Target("sweep-toml", written("sweep.toml", asked)),
        Target("winner-toml", written("winner.toml", lambda path: winner.read(path.parent))),
        Target("backtest-toml", written("x.toml", backtest.read)),
        Target("eamc-bytes", written("x.npz", SavedEamc.read), checks.an_eamc),
        Target("eamc-members", archived("x.npz", SavedEamc.read), checks.an_eamc),
        Target("profile-bytes", written("x.npz", profile)),
        Target("profile-members", archived("x.npz", profile)),
        Target("stride-bytes", written("x.npz", Predictor.load), checks.a_predictor),
        Target("stride-members", archived("x.npz", Predictor.load), checks.a_predictor),
        Target("expert-store", written("experts.safetensors", expert_store)),
        Target(
            "safetensors", written("model.safetensors", lambda path: expert_bytes_by_layer(path.parent)), checks.sizes
        ),
        Target("safetensors-index", index, checks.sizes),
        Target("gguf", written("x.gguf", expert_bytes_by_layer), checks.sizes),
        Target("weights", written("model.safetensors", checkpoint)),
        Target("compare-json", written("compare.json", record)),
        Target("check-json", written("check.json", drawn)),
        Target("results", results, checks.cells),
        Target("results-values", results_values, checks.cells),
        Target("cases", written("cases.jsonl", lambda path: run_file(path, io.StringIO(), "simpy"))),
        Target("journal", written("trials.log", journal)),
    )
}
