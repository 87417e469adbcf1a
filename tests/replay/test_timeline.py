"""What a replay puts onto a timeline: what the device did, and what was predicted of it."""

import io
import json
import random
from collections import Counter
from itertools import pairwise

import pytest

from sim.timeline.file import Timeline
from sim.timeline.observer import TimelineObserver
from sim.timeline.window import WHOLE
from tests.support.devices import AnyOrder, Watch
from tests.support.driven import play
from tests.support.replay_runs import draw
from tests.support.timelines import Shown, nests, parsed
from traces import demo_trace


@pytest.mark.parametrize("tail_bytes", [0, 1, 4])
def test_on_a_device_that_ends_in_any_order_every_part_and_piece_is_shown_in_its_order(tail_bytes):
    for seed in range(60):
        run, file = draw(random.Random(seed).randint), io.StringIO()
        names = [f"request {i}" for i in range(len(run.requests))]
        watch = Watch.of(run, tail_bytes)
        timeline = Timeline(file)
        observer = TimelineObserver(timeline, run, "measured", names, WHOLE)
        log = play(run, AnyOrder(watch, seed), observer=observer)
        observer.close()
        shown = Shown(parsed(f"[{file.getvalue()}]"))
        assert {name.partition(":")[0] for name in shown.processes.values()} == {"measured"}
        for slices in shown.tracks.values():
            assert all(one.lasted >= 0 for one in slices)
            nests(slices)
        steps = shown.steps
        assert len(steps) == len(log.step_ns)
        looked_up = Counter(part.args["lookup"] for _, _, parts in steps for part in parts if "lookup" in part.args)
        assert looked_up == Counter(hit=log.hits.sum(), late=log.late.sum(), miss=log.misses.sum())
        assert all(before.ended <= after.began for before, after in pairwise(shown.tracks["link"]))
        whole = [one for one in shown.tracks["link"] if one.args["bytes_so_far"] == one.args["bytes_of_expert"]]
        arrived = [one for one in whole if not one.args.get("unfinished")]
        loaded = [one for slices in shown.slots.values() for one in slices if one.name.startswith("ready")]
        assert {one.args["expert"] for one in loaded} == {one.args["expert"] for one in arrived}
        assert sum(one.args["transfer"] == "late" for one in arrived) <= log.late.sum()


@pytest.mark.parametrize("device", ["virtual", "cpu"])
def test_the_command_shows_measured_and_predicted_in_one_file(device, command, tmp_path):
    asked = ("--trace", str(demo_trace()), "--policy", "eamc", "--device", device, "--requests", "1", "-q")
    assert command(*asked, "--timeline", "t.json") == (0, "", "")
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    assert all(e["ts"] >= 0 and e.get("dur", 0) >= 0 for e in events if e["ph"] != "M")
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    groups = {name.partition(":")[0] for name in names.values()}
    assert groups == {"measured", "simulated"}
    shown = {
        group: [(e["name"], e["ts"], e["dur"]) for e in events if e["ph"] == "X" and names[e["pid"]].startswith(group)]
        for group in groups
    }
    steps = {
        group: [name for name, _, _ in slices if name.startswith(("prefill", "decode"))]
        for group, slices in shown.items()
    }
    assert steps["measured"] == steps["simulated"]
    assert steps["measured"]
    if device == "virtual":
        assert shown["measured"] == shown["simulated"], "one clock, one device"
