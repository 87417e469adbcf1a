"""`moe-sim board`: LRU and Belady are the ends, figures are a sweep's, walls are walls, and a file is run again."""

import re
from contextlib import chdir
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from benchmarks.board_page import also, page
from policies.core.spec import parse
from sim import sweep
from sim.board.cases import HITS, MACHINES, QUARTER, SIZES, Case, cards_of, cases_of, every
from sim.board.result import KNOWABLE, Result, entry, read, sentences, write
from sim.board.running import Board
from sim.loaded import TimedRun, load
from sim.sweeps import grid
from tests.support.browser import CHROMIUM, opened
from tests.support.command import moe_sim

OWN = """
from policies import ScorePolicy

class Mine(ScorePolicy):
    def observe(self, event):
        self.keep[0] *= 0.995
        self.keep[0, event.experts] += 1
"""
NAME = "mine.py:Mine"
COUNTED, TIMED = "switch-base-8", "qwen3-30b-a3b"
WALLS = [machine.wall for machine in MACHINES]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder of an own policy with its result and page, and what the command printed."""
    folder = tmp_path_factory.mktemp("board")
    (folder / "mine.py").write_text(OWN)
    done = moe_sim("board", NAME, f"--traces={COUNTED},{TIMED}", "--workers=1", "--out=mine.toml", cwd=folder)
    assert done.returncode == 0, done.stderr
    with chdir(folder):
        Path("mine.html").write_text(page(read(Path("mine.toml"), trust=True), "this"), "utf-8")
    return folder, done.stdout


def test_an_own_policy_is_ranked_by_what_sweeps_find(made: tuple[Path, str]) -> None:
    folder, printed = made
    found = read(folder / "mine.toml", trust=True)
    mine = found.policies[NAME]
    for end, value in (("lru", 0), ("belady", 1)):
        assert set(found.policies[end].score.values()) == {value}
        assert found.policies[end].worst == value
    own = f"{folder / 'mine.py'}:Mine"
    by_trace = []
    for name in (COUNTED, TIMED):
        swept = sweep(cards_of([name])[0].folder, [own], SIZES, untimed=True).frame
        assert mine.figures[HITS][f"{name} cold"] == pytest.approx(list(swept.hit_rate), abs=1e-8)
        shares = found.shares(NAME)[f"{name} cold"]
        assert shares == pytest.approx(list(swept.gap_hits), abs=1e-4)
        by_trace.append(fmean(shares))
    assert mine.score[HITS] == pytest.approx(fmean(by_trace), abs=1e-6)
    slower, saved = [], {}
    for machine in MACHINES:
        given: dict[str, Any] = {"hardware": machine.hardware, "host_memory": machine.host_memory}
        given |= {"expert_sizes": "bf16", "predictor_us": {own: mine.overhead_us}}
        swept = sweep(cards_of([TIMED])[0].folder, ["lru", own], SIZES, **given).frame
        ms, base = (swept[swept.policy == each].tpot_mean_ms.to_numpy() for each in (own, "lru"))
        assert mine.figures[machine.wall] == {f"{TIMED} cold": pytest.approx(list(ms), abs=1e-6)}
        best = found.policies["belady"].figures[machine.wall][f"{TIMED} cold"]
        saved[machine.wall] = (1 - ms / base).mean() / (1 - best / base).mean()
        slower += list(100 * (ms / base - 1))
    assert {wall: mine.score[wall] for wall in WALLS} == pytest.approx(saved, abs=1e-5)
    assert mine.slower == pytest.approx(max(slower), abs=0.01)
    assert (
        mine.slowest == f"{TIMED} cold {WALLS[slower.index(max(slower)) // 4]} {SIZES[slower.index(max(slower)) % 4]}"
    )
    assert mine.digest == sha256(OWN.encode()).hexdigest()
    assert mine.overhead_us > 0
    assert mine.memory_mib > 0
    texts = sentences(found)
    assert printed.splitlines()[: len(texts)] == texts
    assert all(len(line.rstrip()) <= 80 for line in printed.splitlines()[len(texts) :])


def test_a_file_is_run_again_to_the_digit(made: tuple[Path, str], tmp_path: Path) -> None:
    folder, _ = made
    found = read(folder / "mine.toml", trust=True)
    mine = found.policies[NAME]
    ms = (0.5, *mine.figures["disk"][f"{TIMED} cold"][1:])
    changed = replace(mine, figures={**mine.figures, "disk": {f"{TIMED} cold": ms}})
    write(replace(found, policies={**found.policies, NAME: changed}), folder / "changed.toml", overwrite=True)
    check = ("board", "--check", "changed.toml", "--workers=1")
    assert "--trust-folder" in moe_sim(*check, cwd=folder).stderr  # it names a file of Python
    done = moe_sim(*check, "--trust-folder", cwd=folder)
    assert done.returncode == 1
    now = mine.figures["disk"][f"{TIMED} cold"][0]
    assert f"policies {NAME} figures disk {TIMED} cold 0 is 0.5 in the file, and {now} now" in done.stderr


def test_the_named_wall_is_the_busiest_under_lru() -> None:
    for case in cases_of(cards_of()):
        if case.machine:
            loaded = load(case.experiment)
            assert isinstance(loaded, TimedRun)
            (summary,) = grid.summed(loaded, parse("lru"), [loaded.slots(QUARTER)], lambda requests: None)
            row = summary.row()
            busy = {wall: row[f"{wall}_busy_ms"] or 0 for wall in WALLS}
            assert max(busy, key=lambda wall: busy[wall]) == case.machine.wall, (case.start, busy)


def test_gains_are_paired_over_requests_as_compare_pairs_them() -> None:
    (card,) = cards_of(["gpt-oss-20b"])
    runs = Board.of([card], ["lfu"])
    found = replace(runs, cases=runs.cases[:2], tables=runs.tables[:2]).run()
    lfu = found.policies["lfu"]
    assert found.requests == {"gpt-oss-20b cold": {HITS: 20}, "gpt-oss-20b warm": {HITS: 19}}
    for start, options in (("gpt-oss-20b cold", {"cold": True}), ("gpt-oss-20b warm", {"warmup_requests": 1})):
        given: dict[str, Any] = {"untimed": True, **options}
        swept = sweep(card.folder, ["lru", "lfu"], [QUARTER], **given)
        assert lfu.figures[HITS][start][2] == pytest.approx(swept.frame.hit_rate[1], abs=1e-8)
        (one,) = (each for each in swept.compare("lru") if each.measure.name == "hit_rate")
        middle, low, high = lfu.gains[HITS][start][2]
        assert middle == pytest.approx(one.more, abs=1e-4)
        assert low < middle < high
        assert (low, high) == pytest.approx((one.low, one.high), abs=0.3), "the bootstrap of tables draws fewer"


def test_each_trace_counts_alike_however_many_starts_it_has() -> None:
    def figures(**hits: tuple[float, ...]) -> dict[str, dict[str, tuple[float, ...]]]:
        return {HITS: {name.replace("_", " "): values for name, values in hits.items()}}

    measured = {
        "lru": figures(a_cold=(0.2, 0.4), a_warm=(0.2, 0.4), b_cold=(0.5, 0.5)),
        "belady": figures(a_cold=(0.4, 0.6), a_warm=(0.4, 0.6), b_cold=(0.6, 0.5)),
        "mine": figures(a_cold=(0.3, 0.5), a_warm=(0.3, 0.3), b_cold=(0.6, 0.4)),
    }
    mine = entry(measured, "mine", {}, digest="", oracle=False, overhead_us=0.0, memory_mib=0.0)
    assert mine.score[HITS] == pytest.approx(((0.5 + 0.5 + 0.5 - 0.5) / 4 + 1) / 2)
    assert mine.worst == pytest.approx(-0.5)


def test_policies_that_ship_are_entered_once_and_found_by_their_systems() -> None:
    names = every()
    assert len({parse(name) for name in names}) == len(names)
    assert {"lru", "lrfu", "eamc", "eamc-blend", "belady", "eamc-code"} <= set(names)
    assert also("lru") == ["llama.cpp (--moe-cache-mib)"]
    assert also("class-lru") == ["llama.cpp (--moe-cache-mib, later)"]
    smallest = min((load(Case(card, False).experiment) for card in cards_of()), key=lambda each: each.all_experts)
    for name in names:
        smallest.require(parse(name), smallest.slots(SIZES[0]))


def test_the_page_needs_no_network_and_begins_with_the_answer(made: tuple[Path, str]) -> None:
    folder, printed = made
    text = (folder / "mine.html").read_text("utf-8")
    summary = text.split('<div class="summary">')[1].split("</div>")[0]
    assert re.findall("<p>(.*?)</p>", summary)[0] == printed.splitlines()[0]
    assert not re.search(r"""(src|href)\s*=\s*["']?(https?:)?//""", text.replace("xlink:href", "href"))
    headings = re.findall("<h2>(.*?)</h2>", text)
    assert headings[:4] == ["Ranking", "How far the ceiling is", "How sure it is", f"{COUNTED} cold: hits"]
    assert f"{TIMED} cold: time" in headings
    assert f"{COUNTED} cold: time" not in headings


PROBE = """<script>
const found = {wide: document.documentElement.scrollWidth, screen: innerWidth, tables: [], drawn: 0};
for (const svg of document.querySelectorAll("figure svg")) found.drawn += svg.getBoundingClientRect().height > 50;
for (const table of document.querySelectorAll("table.sortable")) {
  const column = () => [...table.tBodies[0].rows].map(row => Number(row.cells[2].textContent));
  const box = table.parentElement, before = column(), button = table.tHead.rows[0].cells[2].querySelector("button");
  button.click(); const up = column(); button.click(); const down = column();
  found.tables.push({before, up, down, scrolls: box.scrollWidth > box.clientWidth});
}
document.title = JSON.stringify(found);
</script>"""


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")
def test_in_a_browser_its_tables_sort_and_scroll_on_a_narrow_screen(made: tuple[Path, str], tmp_path: Path) -> None:
    text = (made[0] / "mine.html").read_text("utf-8")
    # headless windows have a least width: a frame has any
    (tmp_path / "probed.html").write_text(text.replace("</body>", f"{PROBE}</body>"), "utf-8")
    found = opened(tmp_path / "probed.html", 400)
    assert found["wide"] <= found["screen"], "the page itself does not scroll sideways"
    assert found["drawn"] == 1
    ranking, *others = found["tables"]
    assert ranking["scrolls"]
    assert len(others) == 4
    for table in others:
        assert table["up"] == sorted(table["before"])
        assert table["down"] == table["up"][::-1]


def test_a_board_of_its_leader_alone_says_so() -> None:
    hits = {"lru": 0.5, "belady": 0.6, KNOWABLE: 0.58}
    measured: dict[str, Any] = {name: {HITS: {"a cold": (rate,)}} for name, rate in hits.items()}
    found = Result(
        version=1,
        traces={"a": ""},
        requests={"a cold": {HITS: 1}},
        policies={
            name: entry(measured, name, {}, digest="", oracle=name != "lru", overhead_us=0.0, memory_mib=0.0)
            for name in measured
        },
    )
    assert sentences(found) == [
        "lru leads: it gets 0% of what can be known, the 80.0% of the gap from LRU to Belady in hits that who knows "
        "the next 4 tokens closes with eamc-blend behind. That is 0.0% of the gap."
    ]
