"""`make live-check` on a tiny model: each of its parts, and what they come to."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import pytest

from replay.comparison.record import Record
from replay.live import check as live_check
from replay.live.check import ACCELERATE, ALONE, CACHED, LIVE, REPLAY, TURNS, Check
from tests.replay.test_disk_check import TINY


def test_each_part_is_run_and_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[int] = []

    @contextmanager
    def limited(size: int, files: Path) -> Iterator[None]:
        limits.append(size)
        yield

    monkeypatch.setattr(live_check, "page_cache_of", limited)
    monkeypatch.setattr(live_check, "DEMO_TOKENS", 3)
    monkeypatch.setattr(live_check, "ROUNDS", 2)
    profile, files = tmp_path / "olmoe-1b-7b.toml", tmp_path / "files"
    profile.write_text(TINY.replace("vocabulary = 64", "vocabulary = 256"))
    files.mkdir()
    check = Check(Record(tmp_path / "found.json"), files, str(profile), tokens=4)
    check.run()
    found = json.loads((tmp_path / "found.json").read_text())
    cells = {cell["mode"]: cell for cell in found["cells"]}
    assert set(cells) == {LIVE, REPLAY, ACCELERATE, CACHED, ALONE}
    assert all(cell["measured"]["tpot_mean_ms"] > 0 for cell in cells.values())
    live = cells[LIVE]
    assert (live["tokens"], live["policy"], live["cache_fraction"]) == (3, "eamc-blend", 0.25)
    parts = 2 * TURNS + 1
    assert limits[1:] == [live["checkpoint_bytes"] // 2] * parts == [cells[ACCELERATE]["memory_bytes"]] * parts
    for cell in (live, cells[REPLAY]):
        assert cell["measured"]["tpot_mean_ms"] == median(cell["turns_ms"])
        assert len(cell["turns_ms"]) == TURNS
    ratios = check.ratios()
    assert ratios["live over replay"] == pytest.approx(
        live["measured"]["tpot_mean_ms"] / cells[REPLAY]["measured"]["tpot_mean_ms"]
    )
    assert list(files.iterdir()) == []
