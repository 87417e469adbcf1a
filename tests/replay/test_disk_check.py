"""`make disk-check` on a tiny model: its cells, its file, and the limit of the page cache where it can be set."""

import json
import os
from pathlib import Path

import pytest

from replay.comparison.record import Record
from replay.devices.expert_file import write
from replay.devices.store import Stamps
from replay.disk_check import check as disk_check
from replay.disk_check.__main__ import lines
from replay.disk_check.check import Check
from replay.disk_check.mapped import page_cache_of
from sim.profiles.model_profile import model
from traces.errors import InputError

TINY = """
hub_ids = []
moe_layers = 3
experts = 8
top_k = 2
hidden_size = 64
expert_intermediate_size = 48
expert_bytes_per_parameter = 2.0
heads = 4
head_size = 16
vocabulary = 64
dense_bytes_per_parameter = 2.0
"""


@pytest.fixture
def tiny(tmp_path: Path) -> str:
    path = tmp_path / "tiny.toml"
    path.write_text(TINY)
    return str(path)


def test_every_cell_is_played_predicted_and_told(tmp_path: Path, tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_check, "WITH_PEERS", "tiny")
    monkeypatch.setattr(disk_check, "POLICIES", ("lru", "eamc"))
    told: list[str] = []
    record = Record(tmp_path / "found.json")
    files = tmp_path / "files"
    files.mkdir()
    Check(record, told.append, files, (tiny,), tokens=4).run()
    found = json.loads(record.path.read_text())
    assert (found["device"], bool(found["commit"]), bool(found["machine"])) == ("disk", True, True)
    played = [cell for cell in found["cells"] if "predicted" in cell]
    assert [cell["policy"] for cell in played] == ["lru", "eamc", "lru", "lru", "eamc"]
    for cell in played:
        assert cell["tokens"] == 4
        low, high = cell["predicted_interval_ms"]
        assert 0 < low <= high
        assert cell["measured"]["lookups"] == cell["predicted"]["lookups"]
    (lockstep,) = (cell for cell in played if cell["mode"] == "lockstep")
    for name in ("hits", "late", "misses", "bytes_demand"):
        assert lockstep["measured"][name] == lockstep["predicted"][name]
    others = {cell["mode"]: cell for cell in found["cells"] if "predicted" not in cell}
    assert set(others) == {"on-demand", "page cache"}
    assert "measured" in others["on-demand"]
    assert {row["over"] for row in found["ratios"]} >= {"on-demand"}
    assert len(list(lines(record))) >= 6
    assert list(files.iterdir()) == []
    again: list[str] = []
    Check(Record.open(record.path, resume=True), again.append, files, (tiny,), tokens=4).run()
    assert not any("closed-loop" in line for line in again)


@pytest.mark.skipif(os.geteuid() != 0, reason="a control group takes root")
def test_the_page_cache_keeps_no_more_than_it_may(tmp_path: Path, tiny: str) -> None:
    profile, path = model(tiny), tmp_path / "file"
    write(path, profile, Stamps(24, profile.expert_bytes, 0).write, "random", 24)
    before = Path("/proc/self/cgroup").read_text()
    try:
        with page_cache_of(64 << 20, path):
            inside = Path("/proc/self/cgroup").read_text()
            assert path.read_bytes()
    except InputError as error:
        pytest.skip(str(error))
    assert inside != before
    assert Path("/proc/self/cgroup").read_text() == before


def test_no_room_for_a_file_is_told_and_recorded(tmp_path: Path, tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_check, "disk_usage", lambda _: type("Usage", (), {"free": 1_000}))
    record, told = Record(tmp_path / "found.json"), list[str]()
    Check(record, told.append, tmp_path, (tiny,), tokens=4).run()
    assert [("does not fit" in cell["error"]) for cell in record] == [True]
