"""One known routing in the forms that engines write it comes back as it was, or one line says which name is missing."""

import csv
import gzip
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from tests.support.command import run
from tests.support.dumps import known, rows
from tracer.commands import main
from traces import PREFILL, InputError, Trace
from traces.importers import Options, import_dump
from traces.importers.files import KINDS
from traces.importers.words import FORMATS, KNOWN

EXAMPLES = Path(__file__).parent / "formats"

TRACE = known(requests=3, tokens=6, prompt=5, layers=3, experts=8)
L, K = TRACE.layers, TRACE.top_k
WEIGHTS = np.sort(np.random.default_rng(3).random(TRACE.experts.shape), axis=2)[..., ::-1].astype(np.float16)
Record = dict[str, Any]


def tokens() -> Iterator[tuple[int, int, int, bool]]:
    """(request, token in it, row, whether it is of the prompt)."""
    for r in range(len(TRACE.requests)):
        for t, row in enumerate(range(int(TRACE.offsets[r]), int(TRACE.offsets[r + 1]))):
            yield r, t, row, bool(TRACE.phase[row] == PREFILL)


def long(slot: str | None = "slot", first_layer: int = 0) -> list[Record]:
    """A row for each expert."""
    return [
        {
            "request_id": f"r{r}",
            "phase": "prefill" if prompt else "decode",
            "token_idx": t,
            "layer": layer + first_layer,
        }
        | ({slot: j} if slot else {})
        | {"expert": int(TRACE.experts[row, layer, j]), "weight": float(WEIGHTS[row, layer, j])}
        for r, t, row, prompt in tokens()
        for layer in range(L)
        for j in range(K)
    ]


def cells(**names: str) -> list[Record]:
    """A row for each token and layer, the experts as a list."""
    names = {
        "request": "req_id",
        "token": "token_idx",
        "phase": "phase",
        "layer": "layer",
        "expert": "topk_ids",
    } | names
    return [
        {
            names["request"]: f"r{r}",
            names["token"]: t,
            names["phase"]: "prompt" if prompt else "generation",
            names["layer"]: layer,
            names["expert"]: TRACE.experts[row, layer].tolist(),
            "topk_weights": WEIGHTS[row, layer].tolist(),
        }
        for r, t, row, prompt in tokens()
        for layer in range(L)
    ]


def by_token(key: str = "layers", flat: bool = False) -> list[Record]:
    made = []
    for r, t, row, prompt in tokens():
        ids = TRACE.experts[row].tolist()
        record: Record = {"seq_id": f"r{r}", "pos": t, "is_prefill": prompt}
        made.append(record | ({f"l{i}": one for i, one in enumerate(ids)} if flat else {key: ids}))
    return made


def by_request(order: str = "token,layer") -> list[Record]:
    made = []
    for r in range(3):
        ids = rows(TRACE, r)
        held = ids if order == "token,layer" else ids.transpose(1, 0, 2)
        phases = TRACE.phase[TRACE.offsets[r] : TRACE.offsets[r + 1]]
        counts = {"num_layers": L, "num_tokens": len(ids)}
        made.append({"prompt_id": f"r{r}", **counts, "phase": phases.tolist(), "routed_experts": held.tolist()})
    return made


def table(records: list[Record], delimiter: str = ",", lists: str = ";", comments: str = "") -> bytes:
    """A CSV of records; lists: how ids are put together, or "[" as Python prints a list."""
    file = io.StringIO()
    file.write(comments)
    writer = csv.DictWriter(file, list(records[0]), delimiter=delimiter)
    writer.writeheader()
    for record in records:
        texts = {
            name: (str(one) if lists == "[" else lists.join(map(str, one))) if isinstance(one, list) else one
            for name, one in record.items()
        }
        writer.writerow(texts)
    return file.getvalue().encode()


def lines(records: list[Record]) -> bytes:
    return "".join(json.dumps(record) + "\n" for record in records).encode()


def without(records: list[Record], *names: str) -> list[Record]:
    return [{name: one for name, one in record.items() if name not in names} for record in records]


def shuffled(records: list[Record], by: str | None = None) -> list[Record]:
    order = np.random.default_rng(0).permutation(len(records))
    return sorted(records, key=lambda record: record[by]) if by else [records[i] for i in order]


def reordered(records: list[Record]) -> list[Record]:
    names = sorted(records[0], reverse=True)
    return [{name: record[name] for name in names} for record in records]


def renamed(records: list[Record], **names: str) -> list[Record]:
    return [{names.get(name, name): one for name, one in record.items()} for record in records]


def wide(dense: bool = False) -> list[Record]:
    """Experts in columns e0, e1, ..., or a weight for each of all experts."""
    made = []
    for record in cells():
        ids, weights = record.pop("topk_ids"), record.pop("topk_weights")
        if dense:
            chosen = dict(zip(ids, weights, strict=True))
            made.append(record | {f"expert_{e}": chosen.get(e, 0.0) for e in range(8)})
        else:
            made.append(record | {f"e{j}": e for j, e in enumerate(ids)} | {f"w{j}": w for j, w in enumerate(weights)})
    return made


def nested(flat: bool = False) -> list[Record]:
    made = []
    for r, t, row, prompt in tokens():
        layers: Any = [
            {
                "layer": layer,
                "topk_experts": TRACE.experts[row, layer].tolist(),
                "topk_probs": WEIGHTS[row, layer].tolist(),
            }
            for layer in range(L)
        ]
        record: Record = {"prompt_id": f"r{r}", "position": t, "phase": "prefill" if prompt else "decode"}
        if flat:
            record |= {f"layers.{one['layer']}.{name}": one[name] for one in layers for name in one if name != "layer"}
        else:
            record["router_layers"] = layers
        made.append(record)
    return made


def document() -> bytes:
    """One JSON of requests of tokens of layers of experts with weights."""
    made: list[Record] = [{"id": f"r{r}", "request_id": f"r{r}", "tokens": []} for r in range(3)]
    for r, t, row, prompt in tokens():
        layers = {
            f"layer_{layer}": [
                {"expert_id": int(e), "weight": float(w)}
                for e, w in zip(TRACE.experts[row, layer], WEIGHTS[row, layer], strict=True)
            ]
            for layer in range(L)
        }
        made[r]["tokens"].append({"token_index": t, "phase": "prefill" if prompt else "decode", "layers": layers})
    return json.dumps({"model": "some/model", "num_experts": 8, "requests": made}, indent=1).encode()


def parquet(records: list[Record]) -> bytes:
    content = io.BytesIO()
    pd.DataFrame(records).to_parquet(content)
    return content.getvalue()


FORMS: dict[str, tuple[str, bytes]] = {
    "long, slots": ("a.csv", table(long())),
    "long, no slots": ("a.csv", table(long(slot=None))),
    "long, other names": (
        "a.csv",
        table(renamed(long("rank"), request_id="seq", token_idx="pos", layer="blk", expert="expert_id", weight="prob")),
    ),
    "long, columns in another order": ("a.csv", table(reordered(long()))),
    "long, by layer": ("a.csv", table(shuffled(long(), "layer"))),
    "long, rows shuffled": ("a.csv", table(shuffled(long()))),
    "long, tabs": ("a.tsv", table(long(), "\t")),
    "long, comments and gzip": ("a.csv.gz", gzip.compress(table(long(), comments="# v1\n# model=x n_expert=8\n"))),
    "long, JSON lines": ("a.jsonl", lines(long())),
    "long, Parquet": ("a.parquet", parquet(long())),
    "cells, Parquet": ("a.parquet", parquet(cells())),
    "lists 1;5": ("a.csv", table(cells())),
    "lists [1, 5]": ("a.csv", table(cells(), lists="[")),
    "lists 1 5": ("a.csv", table(cells(), lists=" ")),
    "cells, JSON lines": ("a.jsonl", lines(cells())),
    "cells, other names, by layer": (
        "b.jsonl",
        lines(shuffled(cells(request="rid", token="pos", layer="layer_idx", expert="selected_experts"), "layer_idx")),
    ),
    "cells, a list": ("a.json", json.dumps(cells()).encode()),
    "cells, metadata first": (
        "a.jsonl",
        lines([{"type": "meta", "model_id": "m", "top_k": K, "num_experts": 8}, *cells()]),
    ),
    "wide": ("a.csv", table(wide())),
    "wide, JSON lines": ("a.jsonl", lines(wide())),
    "wide, a weight for each expert": ("a.csv", table(wide(dense=True))),
    "a token a line": ("a.jsonl", lines(by_token())),
    "a token a line, other key": ("a.jsonl", lines(by_token("experts"))),
    "a token a line, l0 to l2": ("a.jsonl", lines(by_token(flat=True))),
    "a token a row, l0 to l2": ("a.csv", table(by_token(flat=True))),
    "a request a line": ("a.jsonl", lines(by_request())),
    "a request a line, layers first": ("a.jsonl", lines(by_request("layer,token"))),
    "nested": ("a.jsonl", lines(nested())),
    "nested, flattened keys": ("a.jsonl", lines(nested(flat=True))),
    "one document": ("a.json", document()),
}


def routed(trace: Trace) -> None:
    """Claim that a trace has the routing of TRACE, in whatever order a choice is."""
    assert np.array_equal(np.sort(trace.experts, axis=2), np.sort(TRACE.experts, axis=2))
    assert np.array_equal(trace.offsets, TRACE.offsets)
    assert np.array_equal(trace.phase, TRACE.phase)
    assert (trace.layers, trace.num_experts, trace.top_k) == (L, 8, K)


@pytest.mark.parametrize("form", FORMS)
def test_a_form_comes_back_as_the_routing_it_was_made_from(form: str, tmp_path: Path) -> None:
    name, content = FORMS[form]
    (tmp_path / name).write_bytes(content)
    made, _ = import_dump(tmp_path / name, options=Options(experts=8))
    if "shuffled" in form:  # requests come in the order in which they are first seen
        made = made.select(np.argsort(made.requests["id"].to_numpy()))
    routed(made)
    if made.weights is not None:
        assert np.array_equal(made.experts, TRACE.experts)
        assert np.allclose(made.weights, WEIGHTS, atol=1e-3)


@pytest.mark.parametrize("named", [True, False])
def test_a_layer_a_file_is_one_trace(named: bool, tmp_path: Path) -> None:
    folder = tmp_path / "dump"
    folder.mkdir()
    for layer in range(L):
        own = [record for record in cells() if record["layer"] == layer]
        own = without(own, "layer") if named else own
        (folder / (f"moe_layer{layer}.jsonl.gz" if named else f"{layer}.jsonl.gz")).write_bytes(
            gzip.compress(lines(own))
        )
    routed(import_dump(folder, options=Options(experts=8))[0])


def test_a_request_a_file_is_one_trace(tmp_path: Path) -> None:
    folder = tmp_path / "dump"
    folder.mkdir()
    for r in range(3):
        own = [record for record in long() if record["request_id"] == f"r{r}"]
        (folder / f"part{r}.csv").write_bytes(table(without(own, "request_id")))
    made, _ = import_dump(folder, options=Options(experts=8))
    routed(made)
    assert made.requests["id"].tolist() == ["part0", "part1", "part2"]


@pytest.mark.parametrize(
    ("records", "message"),
    [
        (without(long(), "layer"), "--columns layer=NAME.*there are: request_id"),
        (without(cells(), "topk_ids", "topk_weights"), "no experts in .*--columns expert=NAME; there are: "),
        ([{"data": record["layers"]} for record in by_token()], "--columns"),
        ([{"experts": by_request()[0]["routed_experts"]}], "--axes token,layer or --axes layer,token"),
        (renamed(long(), phase="stage", layer="phase"), "neither prefill nor decode|layer"),
    ],
)
def test_what_is_missing_is_one_line_that_says_how_to_give_it(
    records: list[Record], message: str, tmp_path: Path
) -> None:
    (tmp_path / "a.jsonl").write_bytes(lines(records))
    with pytest.raises(InputError, match=message) as error:
        import_dump(tmp_path / "a.jsonl", options=Options(experts=8))
    assert "\n" not in str(error.value)


def test_lists_without_names_are_tokens_of_layers(tmp_path: Path) -> None:
    held = [record["layers"] for record in by_token()]
    (tmp_path / "a.jsonl").write_bytes(lines(held))
    (tmp_path / "b.json").write_text(json.dumps(held))
    for name, axes in (("a.jsonl", None), ("b.json", "token,layer")):
        made, _ = import_dump(tmp_path / name, options=Options("decode", experts=8, axes=axes))
        assert np.array_equal(made.experts, TRACE.experts)


def test_ids_and_layers_that_count_from_1_are_right(tmp_path: Path) -> None:
    records = [
        {**record, "layer": record["layer"] + 1, "topk_ids": [e + 1 for e in record["topk_ids"]]} for record in cells()
    ]
    (tmp_path / "a.jsonl").write_bytes(lines(records))
    made, notes = import_dump(tmp_path / "a.jsonl", options=Options(experts=8))
    routed(made)
    assert made.meta.layer_names == ("layers.1", "layers.2", "layers.3")
    assert "expert ids run from 1 to 8: they are taken as 0 to 7" in notes


def test_zstd_and_a_split_folder_of_rows_are_read(tmp_path: Path) -> None:
    import pyarrow as pa

    (tmp_path / "d").mkdir()
    for part in range(2):  # the layers of the same tokens, apart
        own = [record for record in cells() if (record["layer"] == 0) == (part == 0)]
        with pa.output_stream(str(tmp_path / "d" / f"p{part}.jsonl.zst"), compression="zstd") as file:
            file.write(lines(own))
    routed(import_dump(tmp_path / "d", options=Options(experts=8))[0])


def test_an_imatrix_is_its_counts_and_the_older_format_has_none(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf", reason="the extra gguf is not installed")
    writer = gguf.GGUFWriter(tmp_path / "i.gguf", "imatrix")
    counts = np.random.default_rng(0).integers(1, 90, (3, 8)).astype(np.float32)
    for layer in range(3):
        for tensor in ("ffn_gate_exps", "ffn_down_exps"):
            writer.add_tensor(f"blk.{layer + 1}.{tensor}.weight.counts", counts[layer][:, None])
            writer.add_tensor(f"blk.{layer + 1}.{tensor}.weight.in_sum2", np.ones((8, 4), np.float32))
        writer.add_tensor(f"blk.{layer + 1}.attn_q.weight.counts", np.ones((1, 1), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    made, _ = import_dump(tmp_path / "i.gguf", options=Options("prefill", top_k=2))
    assert np.array_equal(made.eams(PREFILL)[0], counts)
    assert made.meta.layer_names == ("layers.1", "layers.2", "layers.3")
    name = b"blk.0.ffn_gate_exps.weight"
    (tmp_path / "i.dat").write_bytes(b"\1\0\0\0" + len(name).to_bytes(4, "little") + name + bytes(40))
    with pytest.raises(InputError, match="no counts by expert: write it again as GGUF"):
        import_dump(tmp_path / "i.dat")


def test_counts_of_ranks_are_added_when_told_to(tmp_path: Path) -> None:
    folder = tmp_path / "d"
    folder.mkdir()
    for rank in range(2):  # as SGLang 0.4.4 writes them
        text = "".join(f"{layer},{e},{rank + 5 * e}\n" for layer in (3, 4) for e in range(4))
        (folder / f"expert_distribution_rank{rank}_timestamp17{rank}.csv").write_text(
            "layer_id,expert_id,count\n" + text
        )
    with pytest.raises(InputError, match=r"2 ranks counted differently.*--fix"):
        import_dump(folder, options=Options("decode", top_k=2))
    made, _ = import_dump(folder, options=Options("decode", top_k=2, fix=True))
    assert made.eams(1)[0].tolist() == [[1, 11, 21, 31]] * 2
    assert made.meta.layer_names == ("layers.3", "layers.4")


def test_tierinfers_passes_are_a_prompt_and_its_tokens() -> None:
    """A made file in its words: a line a pass and layer, `decode` the pass, layer 0 dense."""
    file = EXAMPLES / "tierinfer.jsonl"
    made, _ = import_dump(file, options=Options(experts=8))
    told = [json.loads(line) for line in file.read_text().splitlines()]
    for layer in range(3):
        ids = [one for line in told if line["layer"] == layer + 1 for one in line["experts"]]
        assert np.array_equal(made.experts[:, layer], ids)
    assert made.phase.tolist() == [PREFILL] * 5 + [1] * 3
    assert made.meta.layer_names == ("layers.1", "layers.2", "layers.3")


PAGE = (Path(__file__).parents[2] / "docs/howto/import-any-trace.md").read_text(encoding="utf-8")
TESTS = "".join(file.read_text(encoding="utf-8") for file in Path(__file__).parent.glob("test_importer*.py"))


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_has_an_example_that_a_test_reads_and_a_place_in_the_docs(name: str) -> None:
    example = FORMATS[name].example
    assert name in PAGE
    repository = example.partition(",")[0].rpartition("/")[2]
    assert "/" in example or (EXAMPLES / example).is_file()
    assert repository in TESTS


READ_BY = {
    "test_a_form_comes_back_as_the_routing_it_was_made_from": ("JSON", "JSON lines", "CSV", "Parquet"),
    "test_an_imatrix_is_its_counts_and_the_older_format_has_none": ("imatrix",),
    "test_the_phases_of_an_npz_are_kept_and_need_no_option": (".npz",),
    "test_an_npy_has_its_offsets_beside_it_or_in_the_json": (".npy",),
    "test_requests_in_one_batch_are_told_apart_by_their_positions": (".pt",),
}
"""Tests that import a file of each kind."""


def test_every_kind_of_file_has_a_test_and_a_place_in_the_docs() -> None:
    assert sorted(kind for kinds in READ_BY.values() for kind in kinds) == sorted(KINDS)
    for test, kinds in READ_BY.items():
        assert f"def {test}(" in TESTS
        assert all(kind in PAGE for kind in kinds)


def test_the_help_of_import_lists_every_kind_of_file_and_every_format() -> None:
    printed = " ".join(run(main, "import", "--help").stdout.replace("│", " ").split())
    for name in (*KINDS, *KNOWN):
        assert name in printed
