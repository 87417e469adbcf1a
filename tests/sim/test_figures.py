"""Each figure that is printed is found again, under its name, from requests.parquet with pandas alone."""

import io
import re
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
from typer.testing import CliRunner

from sim.commands import app
from terminal import console
from tests.support.tiny import SIZES
from traces.synthetic import synthetic
from traces.writer import write_trace

POLICIES = ("lru", "lfu", "eamc")


def moe_sim(*arguments) -> str:
    return CliRunner().invoke(app, list(map(str, arguments)), catch_exceptions=False).stdout


def swept(folder: Path, *more) -> str:
    options = "--policies", ",".join(POLICIES), "--cache-sizes", "25%", "--workers", "1", "--out", folder / "x"
    return moe_sim("sweep", folder / "tiny", *options, *more)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A trace, and in `x` a sweep of it, whose text is in `printed.txt`."""
    folder = tmp_path_factory.mktemp("figures")
    trace = synthetic(8, tokens=15, layers=3, experts=16, top_k=2, seed=3, prompt_tokens=6)
    write_trace(replace(trace, meta=replace(trace.meta, model="tiny", **SIZES)), folder / "tiny")
    (folder / "printed.txt").write_text(swept(folder), "utf-8")
    return folder


def totals(requests: pd.DataFrame) -> pd.DataFrame:
    """Return by policy what a cell is said to be, of all requests together."""
    weighted = requests.assign(decode_ms=requests["tpot_mean_ms"] * requests["decoded"])
    sums = weighted.groupby("policy", sort=False).sum(numeric_only=True)
    return pd.DataFrame(
        {
            "hits": 100 * sums["hits"] / sums["lookups"],
            "decode hits": 100 * sums["decode_hits"] / sums["decode_lookups"],
            "TPOT ms": sums["decode_ms"] / sums["decoded"],
            "TTFT ms": weighted.groupby("policy", sort=False)["ttft_ms"].mean(),
            "tokens/s": 1000 * sums["decoded"] / (sums["decode_ms"] + sums["ttft_ms"]),
        }
    )


def test_printed_figures_are_totals_of_requests(folder):
    printed = (folder / "printed.txt").read_text("utf-8")
    table = pd.read_csv(io.StringIO(swept(folder, "--resume", "--format", "csv")))
    wanted = totals(pd.read_parquet(folder / "x" / "requests.parquet"))
    shown = table.set_index("policy")
    for policy in POLICIES:
        for name in ("hits", "decode hits", "TPOT ms", "TTFT ms"):
            printed_figure = float(str(shown[name][policy]).rstrip("%"))
            assert printed_figure == pytest.approx(wanted[name][policy], rel=0.006), (policy, name)
    best = str(wanted["TPOT ms"].idxmin())
    assert f"{best} is the fastest at 25%" in printed
    if best != "lru":
        assert f"{100 * (1 - wanted['TPOT ms'][best] / wanted['TPOT ms']['lru']):.0f}% less than under LRU" in printed


def test_printed_differences_are_those_of_the_table(folder):
    wanted = totals(pd.read_parquet(folder / "x" / "requests.parquet"))
    printed = moe_sim("compare", folder / "x", "--policies", ",".join(POLICIES))
    assert printed.count("Choose") + printed.count("chance at 25%") == 1
    for name, unit in (("hits", "points"), ("TPOT ms", "ms .* per token"), ("TTFT ms", "ms .* to the first token")):
        for policy in POLICIES[1:]:
            line = next(line for line in printed.splitlines() if re.match(f"{policy} is .* {unit}", line))
            figure = float(line.split()[2])
            assert figure == pytest.approx(abs(wanted[name][policy] - wanted[name]["lru"]), abs=0.006 * max(figure, 1))


def test_tokens_a_second_are_decoded_tokens(folder):
    wanted = totals(pd.read_parquet(folder / "x" / "requests.parquet"))
    rows = pd.read_parquet(folder / "x" / "results.parquet").set_index("policy")
    assert rows["tokens_per_s"].to_dict() == pytest.approx(wanted["tokens/s"].to_dict())
    assert (rows["tokens_per_s"] < 1000 / rows["tpot_mean_ms"]).all(), "prompts take time too"


def test_tables_are_printed_for_papers_and_figures_written(folder):
    command = "compare", folder / "x", "--policies", ",".join(POLICIES)
    printed = moe_sim(*command, "--format", "csv", "--figure", folder / "x.pdf")
    shown = pd.read_csv(io.StringIO(printed)).set_index(["measure", "cell"])
    wanted = totals(pd.read_parquet(folder / "x" / "requests.parquet"))
    for measure, name in (("hit rate", "hits"), ("time per token", "TPOT ms")):
        for policy in POLICIES[1:]:
            assert shown["more"][measure, policy] == pytest.approx(wanted[name][policy] - wanted[name]["lru"], rel=1e-4)
    assert (folder / "x.pdf").read_bytes().startswith(b"%PDF")
    assert moe_sim(*command, "--format", "md").splitlines()[1].startswith("| --- | --- | ---: |")
    assert r"\toprule" in moe_sim(*command, "--format", "latex")
    refused = CliRunner().invoke(app, [*map(str, command), "--format", "word"])
    assert refused.exit_code == 2
    assert "'latex'" in refused.stderr


def test_long_work_that_nobody_watches_prints_how_much_is_left(capsys, monkeypatch):
    monkeypatch.setattr(console, "EVERY_S", 0.0)
    with console.progress(40, False, "requests run", 10) as advance:
        advance(2)
        advance(3)
    assert capsys.readouterr().err == "15 of 40 requests run, about 1 min left\n"
    with console.progress(40, True, "requests run") as advance:
        advance(5)
    assert capsys.readouterr().err == ""
