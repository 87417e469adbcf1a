"""Files as other people published them: read whole, and equal to what a few lines that know the format read."""

import gzip
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from traces import DECODE, PREFILL, Trace
from traces.importers import Options, Source, read_dump
from traces.writer import write_traces

FOREIGN = Path(__file__).parents[2].parent / "shared" / "foreign"
pytestmark = pytest.mark.skipif(not FOREIGN.is_dir(), reason=f"other people's files are not at {FOREIGN}")


def read(path: str, folder: Path, **options: Any) -> tuple[Trace, Source]:
    """Import a file, write it, and return it as it is read again."""
    source = Source.of(FOREIGN / path, None, Options(**options), None)
    write_traces(read_dump(source), folder / "t", overwrite=True)
    return Trace.read(folder / "t", ("weights", "token_id") if not options.get("top_k") else ()), source


def lines(path: str) -> Iterator[Any]:
    content = (FOREIGN / path).read_bytes()
    yield from map(json.loads, (gzip.decompress(content) if path.endswith(".gz") else content).splitlines())


def names(source: Source) -> list[str]:
    return [finding.name for finding in source.findings]


def test_waste(tmp_path: Path) -> None:
    trace, source = read("waste-kimi/trace_kimi_300.jsonl", tmp_path)
    told = np.array([line["layers"] for line in lines("waste-kimi/trace_kimi_300.jsonl")])
    assert np.array_equal(trace.experts, told)
    assert (trace.experts[1:, :, :, None] == trace.experts[:-1, :, None, :]).any(3).mean() == pytest.approx(
        0.336, abs=5e-4
    )
    assert names(source) == ["sorted ids"]


def test_bigmoeonedge(tmp_path: Path) -> None:
    trace, source = read("bigmoeonedge/qwen.route.csv.gz", tmp_path)
    told = np.full((156, 48, 6), trace.sentinel)
    sizes = {}
    for line in gzip.decompress((FOREIGN / "bigmoeonedge/qwen.route.csv.gz").read_bytes()).decode().splitlines():
        if found := re.match(r"# layer=(\d+) expert_bytes=(\d+)", line):
            sizes[int(found[1])] = int(found[2])
        elif line[0].isdigit():
            _, _, step, layer, slot, expert, *_ = line.split(",")
            told[int(step), int(layer), int(slot)] = int(expert)
    assert np.array_equal(trace.experts, told)
    assert trace.phase.tolist() == [PREFILL] * 28 + [DECODE] * 128
    assert trace.meta.layer_expert_bytes == tuple(sizes[layer] for layer in range(48))
    assert trace.num_experts == 128
    assert names(source) == ["lowered top-k", "last token only"]


def test_flame_moe(tmp_path: Path) -> None:
    trace, source = read("flame-moe-290m/encoder", tmp_path)
    assert (len(trace.requests), trace.layers, trace.num_experts, trace.top_k) == (32, 25, 64, 6)
    assert np.diff(trace.offsets).tolist() == [64] * 32
    assert trace.meta.layer_names[:9:8] == ("layers.2", "layers.10")
    file = next((FOREIGN / "flame-moe-290m/encoder").glob("*layer7_*"))
    told = np.loadtxt(gzip.decompress(file.read_bytes()).decode().splitlines(), delimiter=",", skiprows=1)[:, 2:]
    chosen = np.zeros_like(told)
    np.put_along_axis(chosen, trace.experts[:, 5].astype(np.int64), 1, axis=1)
    assert np.array_equal(chosen, told != 0)
    assert names(source) == ["equal layers"]  # layers 2 to 9 are there three times, but for two


@pytest.mark.parametrize("schema", ["r3", "r4_decode", "r4_decode_weighted"])
def test_jlens(schema: str, tmp_path: Path) -> None:
    path = f"jlens/{schema}.sample.jsonl"
    trace, source = read(path, tmp_path)
    if schema == "r3":
        told = [np.array([each["topk_experts"] for each in line["layers"]]).transpose(1, 0, 2) for line in lines(path)]
        assert np.array_equal(trace.experts, np.concatenate(told))
        assert trace.phases == "prefill"
    else:
        held = [np.array([each["topk_experts"] for each in line["router_layers"]]) for line in lines(path)]
        assert np.array_equal(trace.experts, np.stack(held))
        assert trace.token_id is not None
        assert trace.token_id.tolist() == [line["generated_token_id"] for line in lines(path)]
        assert trace.phases == "decode"
    assert trace.requests["id"].tolist() == ["code_py_01", "code_py_02"]
    assert (trace.layers, trace.num_experts, trace.top_k) == (40, 256, 8)
    assert trace.weights is not None
    assert not source.findings


def test_stratamoe(tmp_path: Path) -> None:
    trace, source = read("stratamoe", tmp_path)
    told = json.loads((FOREIGN / "stratamoe/router-trace.v2.json").read_bytes())["selections"]
    assert np.array_equal(trace.experts, told)
    assert trace.num_experts == 8
    assert not source.findings


def test_vllm_moe_logger(tmp_path: Path) -> None:
    path = "vllm-moe-logger/moe_layer8.jsonl.gz"
    told = np.array([line["topk_ids"] for line in lines(path) if line["type"] == "route"])
    trace, source = read(path, tmp_path)
    assert np.array_equal(trace.experts[:, 0], told)
    assert trace.meta.layer_names == ("layers.8",)
    assert trace.num_experts == 60
    assert names(source) == ["constant block", "restarted index"]
    assert "rows 0 to 8447" in source.findings[0].what
    fixed, _ = read(path, tmp_path, fix=True)
    assert np.array_equal(fixed.experts[:, 0], told[8_448:])
    both, _ = read("vllm-moe-logger", tmp_path)
    assert np.array_equal(both.experts[:, 1], told)


def test_counts(tmp_path: Path) -> None:
    trace, _ = read("krasis-heatmaps/qwen235b_heatmap.json", tmp_path, top_k=8)
    told = json.loads((FOREIGN / "krasis-heatmaps/qwen235b_heatmap.json").read_bytes())
    counts = trace.eams(DECODE)[0]
    assert {f"{layer},{e}": counts[layer, e] for layer, e in zip(*np.nonzero(counts), strict=True)} == told
    trace, source = read("flash-moe-profile/qwen3-coder-next-4bit.json", tmp_path, top_k=10)
    assert trace.eams(DECODE)[0].sum(axis=1)[:3].tolist() == [5465, 4491, 5397]
    assert any("the prompts in which an expert was used" in note for note in source.notes)


def test_k_beside_counts_is_how_many_experts_a_token_has(tmp_path: Path) -> None:
    layers = [{"layer": i, "heat": [3, 1, 0, 4], "coactivation": [[0] * 4] * 4} for i in range(2)]
    for content in ({"k": 2, "heat": [[3, 1, 0, 4]] * 2}, {"k": 2, "layers": layers}):
        (tmp_path / "co.json").write_text(json.dumps(content))
        trace, _ = read(str(tmp_path / "co.json"), tmp_path)
        assert trace.top_k == 2
        assert trace.eams(DECODE)[0].tolist() == [[3, 1, 0, 4]] * 2
