"""What a replay puts onto a timeline: on the virtual device, to the nanosecond what the simulator shows of that run."""

import io
import json
import random
from collections import Counter

import pytest
from replay.timeline import ObservedDevice

from replay.cli import main
from sim.engines.simpy_engine import SimpyDevice
from sim.loop.driver import play
from sim.loop.run import Run
from sim.timeline import simulated
from sim.timeline.file import Timeline
from tests.support.replay_runs import draw


def events_of(text):
    return json.loads("[" + text.strip().strip(",") + "]")


def tracks(events, group):
    """Slices by track of the processes of a group: (ts, dur, expert), and what there is of each."""
    processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    found = {}
    for event in events:
        if event["ph"] == "X" and processes[event["pid"]].startswith(group):
            found.setdefault(names[event["tid"]], []).append(event)
    return found


def expert_slices(events):
    return Counter((e["ts"], e["dur"], e["args"]["expert"]) for e in events if "expert" in e["args"] and e["dur"])


@pytest.mark.parametrize("seed", range(40))
def test_on_a_logical_clock_experts_transfers_and_slots_are_those_of_the_simulator(seed):
    case = draw(random.Random(seed).randint)
    plan, file = case, io.StringIO()
    timeline = Timeline(file)
    observed = ObservedDevice(SimpyDevice(case.timing, case.gpu.link), timeline, plan.shape, slots=True)
    log = play(plan, observed, watch=observed.watch)
    observed.finish()
    shape = plan.shape.layers, plan.shape.experts
    run = Run(
        *(
            plan.requests,
            *shape,
            plan.gpu.slots,
            plan.gpu.policy,
            case.timing,
            case.gpu.link,
            plan.cold,
            plan.gpu.experts_per_layer,
        )
    )
    names = [str(i) for i in range(len(plan.requests))]
    simulated.play(run, lambda log: None, timeline, names)
    events = events_of(file.getvalue())
    ours, theirs = tracks(events, "measured"), tracks(events, "simulated")
    computed = [e for e in theirs.get("compute", []) if not e["name"].startswith("stall")]
    assert expert_slices(ours.get("compute", [])) == expert_slices(computed)
    finished = [e for e in theirs.get("link", []) if not e["args"].get("unfinished")]
    assert expert_slices(ours.get("link", [])) == expert_slices(finished)
    for slot in (name for name in theirs if name.startswith("slot ")):
        assert [(e["ts"], e["dur"], e["name"]) for e in ours[slot]] == [
            (e["ts"], e["dur"], e["name"]) for e in theirs[slot]
        ]
    assert len(ours.get("steps", [])) == len(log.step_ns)
    assert sorted(round(e["dur"] * 1_000) for e in ours.get("steps", [])) == sorted(log.step_ns.tolist())


@pytest.mark.parametrize("device", ["virtual", "cpu"])
def test_the_command_shows_measured_and_predicted_in_one_file(device, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    asked = ["moe-replay", "--policy", "eamc", "--device", device, "--requests", "1", "--timeline", "t.json", "-q"]
    monkeypatch.setattr("sys.argv", asked)
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    groups = {e["args"]["name"].partition(":")[0] for e in events if e["name"] == "process_name"}
    assert groups == {"measured", "simulated"}
    assert all(e["ts"] >= 0 and e.get("dur", 0) >= 0 for e in events if e["ph"] != "M")
    assert len(tracks(events, "measured")["steps"]) == len(tracks(events, "simulated")["compute"]) - sum(
        not e["name"].startswith(("decode", "prefill")) for e in tracks(events, "simulated")["compute"]
    )
