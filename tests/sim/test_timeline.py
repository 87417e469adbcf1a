"""Timelines against the log of the run, its timing and the format's rules."""

import gzip
import io
import itertools
import json
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from policies.core.policy import Shape
from policies.core.spec import parse
from sim.engines import simpy_engine
from sim.loop.device import Completion, Kind
from sim.loop.log import STALLS, Ended, RunLog, joined
from sim.loop.run import Run, gpu_run
from sim.profiles.timing import FixedTiming, Link
from sim.timeline.file import Timeline, writing
from sim.timeline.observer import play as play_onto
from sim.timeline.tracks import ComputeTrack, LinkTrack, Scene
from sim.timeline.window import WHOLE, Window
from tests.support.logs import assert_logs_equal
from tests.support.runs import Drawn, draw_run, draw_tiers_run
from tests.support.timelines import Shown, Slice, nests, ns, parsed
from traces import DECODE, InputError
from traces.synthetic import synthetic

SEEDS = range(240)
TIERS = (*range(110), 136, 289, 298, 376)
"""Seed 136 leaves a read unfinished and the last two pause a prefetch, as few do."""
PLAIN = ("clock+popular:n=2", "sieve", "arc+all", "s3fifo+oracle1", "random+previous")
"""Policies that name their victims in Python, which the generator does not draw."""


def watch(run: Drawn, window: Window = WHOLE) -> tuple[Shown, list[RunLog]]:
    file = io.StringIO()
    timeline = Timeline(file)
    names = [f"request {i}" for i in range(len(run.requests))]

    def play(played: Run, ended: Ended) -> None:
        play_onto(played, ended, timeline, names, window)

    logs = run.on(play)
    return Shown(parsed(f"[{file.getvalue()}]")), logs


def test_stalls_are_one_slice_unless_the_host_did_something_between_them() -> None:
    file = io.StringIO()
    timeline = Timeline(file)
    nothing: Any = None
    track = ComputeTrack(Scene(timeline, timeline.process("measured"), nothing, nothing, lambda: 9_000, 0))
    track.link = LinkTrack(Scene(timeline, 1, nothing, nothing, lambda: 0, 0))
    timeline.open(0)
    track.begin(0)
    for began, ended in ((0, 2_000), (2_000, 3_000), (7_000, 8_000)):
        track.stalled(STALLS.index("demand"), began, ended, -1)
    for kind in (Kind.ROUTER, Kind.HEAD):
        track.submitted(kind)
        track.ended(Completion(kind, -1))
    track.end("decode 0", {})
    found = [event for event in parsed(f"[{file.getvalue()}]") if event["name"] == "stall: demand"]
    assert [(event["ts"], event["dur"]) for event in found] == [(0, 3), (7, 1)]


def drawn(seed: int) -> Drawn:
    run = draw_run(random.Random(seed).randint)
    return run._replace(policy=PLAIN[seed // 10 % len(PLAIN)], one_scale=False) if seed % 10 == 0 else run


@cache
def watched(seed: int) -> tuple[Drawn, Shown, RunLog]:
    run = drawn(seed)
    shown, parts = watch(run)
    return run, shown, log_of(parts)


def log_of(parts: Sequence[RunLog]) -> RunLog:
    """The log of a run, which may have no steps."""
    return joined(parts or [RunLog.of_rows([], 1, [])])


@cache
def watched_tiers(seed: int) -> tuple[Drawn, Shown, RunLog]:
    run = draw_tiers_run(random.Random(seed).randint)
    if seed % 10 == 0:
        placement = run.policy.partition("/")[2] if "model=" not in run.policy else "split"
        run = run._replace(policy=f"{PLAIN[seed // 10 % len(PLAIN)]}/{placement}", one_scale=False)
    shown, parts = watch(run)
    return run, shown, log_of(parts)


def each(check: Callable[[Drawn, Shown, RunLog], None]) -> None:
    for seed in SEEDS:
        run, shown, log = watched(seed)
        try:
            check(run, shown, log)
        except AssertionError as error:
            raise AssertionError(f"drawn({seed}), {run.policy}: {error}") from error


# The run


def test_the_log_is_the_same_with_and_without_a_timeline() -> None:
    for seed in SEEDS:
        run, _, log = watched(seed)
        assert_logs_equal(log, log_of(run.on(simpy_engine.play)))


# The compute stream


def fills_its_steps(run: Drawn, shown: Shown, log: RunLog) -> None:
    """Parts and stalls follow one another without a gap, and sum to what the log says of each step."""
    steps = shown.steps
    assert [step.lasted for step, _, _ in steps] == log.step_ns.tolist()
    clock = 0
    for row, (step, layers, parts) in enumerate(steps):
        assert step.began == clock or (run.users and step.began > clock)
        assert len(layers) == run.shape.layers
        ends = [step.began, *(part.ended for part in parts)]
        assert [part.began for part in parts] == ends[:-1]
        clock = step.ended
        assert ends[-1] == clock
        stalls = [part for part in parts if part.name.startswith("stall: ")]
        by_cause = [sum(part.lasted for part in stalls if part.name == f"stall: {cause}") for cause in STALLS]
        assert by_cause == log.stall_ns[row].tolist()
        assert sum(part.lasted for part in parts) - sum(by_cause) == log.compute_busy_ns[row]
        outcomes = Counter(part.args["lookup"] for part in parts if "lookup" in part.args)
        counted = {"hit": log.hits[row], "late": log.late[row], "miss": log.misses[row] - log.on_host[row]}
        assert {name: outcomes[name] for name in counted} == counted


def takes_the_timings_durations(run: Drawn, shown: Shown, log: RunLog) -> None:
    """Each part lasts what the timing says; each expert of the trace is computed once an event, on its tokens."""
    timing, L = run.timing, run.shape.layers
    laid_out = [(request, step) for request in run.requests for step in range(len(request.tokens))]
    for (request, step), (whole, layers, parts) in zip(laid_out, shown.steps, strict=True):
        tokens, context = int(request.tokens[step]), int(request.context[step])
        assert (whole.args["tokens"], whole.args["context"]) == (tokens, context)
        assert whole.args["request"] == f"request {request.request}"
        bounds = request.offsets[step * L : step * L + L + 1].tolist()
        for number, (layer, first, last) in enumerate(zip(layers, bounds, bounds[1:], strict=False)):
            routed = dict(zip(request.experts[first:last].tolist(), request.counts[first:last].tolist(), strict=True))
            computed = [p for p in parts if p.args.get("layer") == number and "lookup" in p.args]
            assert {p.args["expert"]: p.args["tokens"] for p in computed} == routed
            assert len(computed) == len(routed)
            assert all(p.lasted == timing.expert_ns(p.args["tokens"]) for p in computed)
            assert all(layer.began <= p.began and p.ended <= layer.ended for p in computed)
            assert all(p.args["expert"] == number * run.shape.experts + p.args["expert_in_layer"] for p in computed)
        dense = [p.lasted for p in parts if p.name == "dense"]
        assert dense == [timing.dense_ns(layer, tokens, context) for layer in range(L)]
        combine = timing.combine_ns(tokens)
        assert [p.lasted for p in parts if p.name == "combine"] == [combine] * (L if combine else 0)
        assert [p.lasted for p in parts if p.name == "head"] == [timing.head_ns(tokens)]
    assert len(shown.steps) == len(log.step_ns)


def counts_lookups(run: Drawn, shown: Shown, log: RunLog) -> None:
    counted = [e["args"] for e in shown.counters if e["name"] == "lookups"]
    rows = zip(log.hits.tolist(), log.late.tolist(), log.misses.tolist(), strict=True)
    assert counted == [{"hits": hits, "late": late, "misses": misses} for hits, late, misses in rows]


# The link


def busy_by_step(slices: Sequence[Slice], shown: Shown) -> list[int]:
    """How long they last from the end of the step before to that of each."""
    ends = [step.ended for step, _, _ in shown.steps]
    return [
        sum(max(0, min(one.ended, ended) - max(one.began, began)) for one in slices)
        for began, ended in itertools.pairwise([0, *ends])
    ]


def agrees_on_the_link(run: Drawn, shown: Shown, log: RunLog) -> None:
    """Its slices sum to the log's busy time, step by step; transfers and bytes are the log's."""
    chunks = shown.tracks["link"]
    assert all(a.ended <= b.began for a, b in itertools.pairwise(chunks))
    assert busy_by_step(chunks, shown) == log.link_busy_ns.tolist()
    first = [one for one in chunks if one.args["bytes"] == one.args["bytes_so_far"]]
    started = Counter("demand" if one.args["transfer"] == "demand" else "priority" in one.args for one in first)
    assert started["demand"] == log.demand_transfers.sum()
    assert started[True] == log.prefetch_transfers.sum()
    assert started[False] == log.copies.sum()
    victims = [name for one in chunks if "victim" in one.args for name in one.args["victim"].split(", ")]
    assert victims == [f"L{v // run.shape.experts} e{v % run.shape.experts}" for v in log.evictions.tolist()]
    ended_whole = [one for one in chunks if not one.args.get("unfinished")]
    arrived = [one for one in ended_whole if one.args["bytes_so_far"] == one.args["bytes_of_expert"]]
    assert sum(one.args["transfer"] == "late" for one in arrived) == log.late.sum()
    for one in ended_whole:
        upto, sent = one.args["bytes_so_far"], one.args["bytes"]
        assert one.lasted == run.link.used_ns(upto) - run.link.used_ns(upto - sent)
    assert len(chunks) - len(ended_whole) <= len(run.requests)


# Slots


def agrees_on_slots(run: Drawn, shown: Shown, log: RunLog) -> None:
    """One expert a slot at a time, one slot an expert; evictions, transfers and waste are the log's."""
    slots = shown.slots
    tracks = sum(name.startswith("slot ") for name in shown.threads.values())
    admits = run.run.policy.admits
    staging = run.shape.top_k if admits else 0
    assert run.link.layer_bytes or tracks == sum(run.run.policy.divide(run.shape, run.slots)) + staging
    assert set(slots) <= {f"slot {i}" for i in range(tracks)}
    for slices in slots.values():
        assert all(a.ended <= b.began for a, b in itertools.pairwise(slices))
    everything = [one for slices in slots.values() for one in slices]
    by_expert = defaultdict(list)
    for one in sorted(everything, key=lambda one: (one.began, one.ended)):
        by_expert[one.args["expert"]].append(one)
    for held in by_expert.values():
        assert all(a.ended <= b.began for a, b in itertools.pairwise(held))
    transfers = log.demand_transfers.sum() + log.prefetch_transfers.sum() + log.copies.sum()
    assert sum(one.name.startswith("loading ") for one in everything) == transfers
    in_file = [e for e in shown.events if e["ph"] == "X" and shown.threads[e["tid"]].startswith("slot ")]
    assert [e["args"]["expert"] for e in in_file if "evicted_for" in e["args"]] == log.evictions.tolist()
    assert sum(bool(one.args.get("wasted")) for one in everything) == log.prefetch_wasted.sum()
    loading = sum(one.lasted for one in everything if one.name.startswith("loading "))
    assert loading >= log.link_busy_ns.sum()  # longer where a prefetch was paused


def test_queues_end_empty_and_at_most_two_transfers_are_under_way() -> None:
    seen: Counter[tuple[str, bool]] = Counter()

    def check(run: Drawn, shown: Shown, log: RunLog) -> None:
        for e in shown.counters:
            if e["name"] != "lookups":
                seen[e["name"], e["args"]["n"] > 0] += 1
        under_way = [e["args"]["n"] for e in shown.counters if e["name"] == "transfers under way"]
        assert all(0 <= n <= 2 for n in under_way)
        seen["two under way", True] += 2 in under_way
        demands = [e["args"]["n"] for e in shown.counters if e["name"] == "queued demands"]
        assert demands[-1:] in ([], [0])

    each(check)
    assert all(seen[name, True] > 100 for name in ("queued demands", "queued prefetches", "transfers under way"))
    assert seen["two under way", True] > 4


# Host and disk


def agrees_on_host_and_disk(run: Drawn, shown: Shown, log: RunLog) -> None:
    """Each computes or reads one expert after another, for as long as timing and disk say, and as often as the log."""
    host, disk, E = shown.tracks["host"], shown.tracks["disk"], run.shape.experts
    for slices in (host, disk):
        assert all(a.ended <= b.began for a, b in itertools.pairwise(slices))
    computes, hops = ([one for one in host if (one.name == "hop") is hop] for hop in (False, True))
    assert len(computes) == log.on_host.sum()
    assert all(one.lasted == run.timing.host_ns(one.args["tokens"], one.args["layer"]) for one in computes)
    assert all(one.lasted == run.timing.hop_ns for one in hops)
    assert busy_by_step(computes, shown) == log.host_busy_ns.tolist()
    assert busy_by_step(disk, shown) == log.disk_busy_ns.tolist()
    reads = Counter(one.args["read"] for one in disk)
    assert reads == Counter(demand=log.reads_demand.sum(), prefetch=log.reads_prefetch.sum())
    if run.host:
        ended = [one for one in disk if not one.args.get("unfinished")]
        assert all(one.lasted == run.host.link.used_ns(run.link.bytes_of(one.args["expert"] // E)) for one in ended)


def test_with_tiers_and_users_every_stream_agrees_with_the_log() -> None:
    checks = (fills_its_steps, agrees_on_the_link, agrees_on_slots, agrees_on_host_and_disk)
    seen: Counter[str] = Counter()
    for seed in TIERS:
        run, shown, log = watched_tiers(seed)
        for check in (*checks, is_well_formed):
            check(run, shown, log)
        assert_logs_equal(log, log_of(run.on(simpy_engine.play)))
        seen.update(name.split()[0] for name, slices in shown.tracks.items() if slices)
        seen["unfinished reads"] += any(one.args.get("unfinished") for one in shown.tracks["disk"])
        seen["several victims"] += any(", " in one.args.get("victim", "") for one in shown.tracks["link"])
        for cause in STALLS[:6]:
            seen[f"stall: {cause}"] += any(one.name == f"stall: {cause}" for one in shown.tracks["compute"])
    assert len(seen) == 13
    assert min(seen.values()) >= 4, seen


def test_a_window_cuts_host_and_disk_like_all_else() -> None:
    compared = 0
    for seed in TIERS:
        run, full, _ = watched_tiers(seed)
        ends = [0, *(step.ended for step, _, _ in full.steps if step.args["phase"] == "decode")]
        if len(ends) < 4:
            continue
        part, _ = watch(run, Window(1, len(ends) - 2, stops=False))
        for name in full.threads.values():
            assert clipped(part.tracks[name], ends[1], ends[-2]) == clipped(full.tracks[name], ends[1], ends[-2]), seed
        compared += sum(len(part.tracks[name]) for name in ("host", "disk"))
    assert compared > 500


# The file


def is_well_formed(run: Drawn, shown: Shown, log: RunLog) -> None:
    """What Perfetto asks of an event, and of the slices of a track: they nest, or follow one another."""
    numbers = [*shown.processes, *shown.threads]
    assert len(set(numbers)) == len(numbers)
    assert 0 not in numbers
    for e in shown.events:
        assert e["ph"] in ("X", "C", "M")
        assert e["name"]
        assert e["pid"] in shown.processes
        assert isinstance(e["args"], dict)
        if e["ph"] != "M":
            assert e["ts"] >= 0
        if e["ph"] == "X":
            assert e["dur"] >= 0
            assert e["tid"] in shown.threads
    for slices in shown.tracks.values():
        nests(slices)


CHECKS = (
    *(fills_its_steps, takes_the_timings_durations, counts_lookups),
    *(agrees_on_the_link, agrees_on_slots, is_well_formed),
)


def test_the_timeline_of_every_random_run_agrees_with_its_log() -> None:
    for check in CHECKS:
        each(check)


def test_the_random_runs_show_everything_that_there_is_to_show() -> None:
    seen: Counter[str] = Counter()
    for seed in SEEDS:
        run, shown, _ = watched(seed)
        chunks = shown.tracks["link"]
        seen["chunks"] += any(one.args["bytes"] < one.args["bytes_of_expert"] for one in chunks)
        seen["late"] += any(one.args["transfer"] == "late" for one in chunks)
        seen["unfinished"] += any(one.args.get("unfinished") for one in chunks)
        seen["cut off"] += any(one.args.get("unfinished") for one in chunks[:-1])
        seen["victims"] += any("victim" in one.args for one in chunks)
        seen["wasted"] += any(one.args.get("wasted") for slices in shown.slots.values() for one in slices)
        seen["discarded"] += any(one.args.get("discarded") for slices in shown.slots.values() for one in slices)
        seen["one slot"] += run.slots == 1
        seen["no time"] += any(not one.lasted for one in shown.tracks["compute"])
        for cause in STALLS[:4]:
            seen[f"stall: {cause}"] += any(one.name == f"stall: {cause}" for one in shown.tracks["compute"])
    assert len(seen) == 13
    assert min(seen.values()) >= 4, seen


# Windows


def clipped(slices: Iterable[Slice], opens: int, closes: int) -> Counter[tuple[Any, int, int]]:
    """What remains of them between two moments, by expert; what lasts no time is left out."""
    cut = [(one, max(one.began, opens), min(one.ended, closes)) for one in slices]
    return Counter((one.args.get("expert", one.name), began, ended) for one, began, ended in cut if began < ended)


@pytest.mark.parametrize("decodes", [True, False])
def test_a_window_shows_what_the_whole_timeline_shows_between_its_ends(decodes: bool) -> None:
    compared = stopped = 0
    for seed in SEEDS:
        run, full, log = watched(seed)
        counted = (log.phase == DECODE) == decodes
        moments = [0, *np.cumsum(log.step_ns)[counted].tolist()]
        if len(moments) < 2 or len(np.unique(log.request)) < len(run.requests):
            continue  # nothing decoded; or a request without steps, whose end is no step's
        chance = random.Random(seed)
        first = chance.randrange(len(moments) - 1)
        last = chance.randrange(first + 1, len(moments))
        part, logs = watch(run, Window(first, last, decodes, stops=bool(seed % 2)))
        opens, closes = moments[first], moments[last]
        assert part.threads == full.threads
        for name in full.threads.values():
            assert clipped(part.tracks[name], opens, closes) == clipped(full.tracks[name], opens, closes), (seed, name)
            assert all(opens <= one.began and one.ended <= closes for one in part.tracks[name])
            compared += len(part.tracks[name])
        assert all(opens <= ns(e["ts"]) <= closes for e in part.counters)
        played = log_of(logs)
        if seed % 2 == 0:
            assert_logs_equal(played, log)
        else:
            upto = log.request == log.request[np.flatnonzero(counted)[last - 1]]
            assert len(played.step_ns) == np.flatnonzero(upto)[-1] + 1
            assert played.step_ns.tolist() == log.step_ns[: len(played.step_ns)].tolist()
            stopped += len(logs) < len(run.requests)
    assert compared > 10_000
    assert stopped > 12


def test_times_beyond_a_clock_of_64_bits_are_refused() -> None:
    trace = synthetic(requests=1, tokens=2, layers=2, experts=5, top_k=2, seed=3)
    timing, link = FixedTiming(dense=2**61, expert=2, expert_per_token=1, combine=1, head=3), Link(1, 1, 1, 1)
    run = gpu_run([trace.steps(0)], Shape(2, 5), 4, parse("lru"), timing, link)
    with pytest.raises(InputError, match="64 bits counts in ns"):
        play_onto(run, lambda log: None, Timeline(io.StringIO()), ["a request"])


# Writing


def test_times_are_microseconds_to_the_nanosecond() -> None:
    file = io.StringIO()
    timeline = Timeline(file)
    track = timeline.track(timeline.process("p"), "t")
    timeline.open(0)
    for began, ended in ((0, 1), (29, 1_001), (10**15 + 1, 10**15 + 3)):
        timeline.slice(track, "s", began, ended, {})
    assert [(s.began, s.ended) for s in Shown(parsed(f"[{file.getvalue()}]")).tracks["t"]] == [
        (0, 1),
        (29, 1_001),
        (10**15 + 1, 10**15 + 3),
    ]
    assert '"ts":0.029,"dur":0.972' in file.getvalue()


def test_a_slice_is_cut_where_the_timeline_opens_and_dropped_outside() -> None:
    file = io.StringIO()
    timeline = Timeline(file)
    process = timeline.process("p")
    track = timeline.track(process, "t")
    timeline.slice(track, "before it opens", 0, 5, {})
    timeline.counter(process, "before it opens", 5, {"n": 1})
    timeline.open(10)
    timeline.slice(track, "ended before", 2, 9, {})
    timeline.slice(track, "ended as it opened", 2, 10, {})
    timeline.slice(track, "cut", 2, 12, {})
    timeline.slice(track, "no time, as it opens", 10, 10, {})
    timeline.close()
    timeline.slice(track, "after it closed", 11, 12, {})
    shown = Shown(parsed(f"[{file.getvalue()}]"))
    assert shown.tracks["t"] == [Slice("cut", 10, 12, {}), Slice("no time, as it opens", 10, 10, {})]
    assert not shown.counters


def test_a_file_is_one_json_object_and_the_same_zipped(tmp_path: Path) -> None:
    for name in ("a.json", "a.json.gz"):
        with writing(tmp_path / name, lambda: {"policy": 'l"ru', "hardware": None}) as timeline:
            track = timeline.track(timeline.process("prócess"), "t")
            timeline.open(0)
            timeline.slice(track, "s", 1, 2, {"left out": None, "expert": 3})
    text = (tmp_path / "a.json").read_text()
    assert gzip.decompress((tmp_path / "a.json.gz").read_bytes()).decode() == text
    whole = json.loads(text)
    assert whole["otherData"] == {"policy": 'l"ru'}
    place = {"pid": 1, "tid": 2, "ts": 0.001, "dur": 0.001}
    assert whole["traceEvents"][-1] == {"ph": "X", "name": "s", **place, "args": {"expert": 3}}
