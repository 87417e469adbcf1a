"""What a timeline's file shows, by the names of its tracks."""

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from decimal import Decimal
from typing import Any, NamedTuple

Event = dict[str, Any]


class Slice(NamedTuple):
    name: str
    began: int
    ended: int
    args: dict[str, Any]

    @property
    def lasted(self) -> int:
        return self.ended - self.began


def ns(us: Decimal | int) -> int:
    exact = Decimal(us) * 1_000
    assert exact == int(exact)
    return int(exact)


def parsed(text: str) -> list[Event]:
    events: list[Event] = json.loads(text, parse_float=Decimal)
    return events


class Shown:
    """The events of a timeline by the names of their tracks; of each track in the order of the file."""

    def __init__(self, events: Sequence[Event]) -> None:
        self.events = events
        self.processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
        self.threads = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
        self.tracks: dict[str, list[Slice]] = defaultdict(list)
        for e in events:
            if e["ph"] == "X":
                one = Slice(e["name"], ns(e["ts"]), ns(e["ts"]) + ns(e["dur"]), e["args"])
                self.tracks[self.threads[e["tid"]]].append(one)
        self.counters = [e for e in events if e["ph"] == "C"]

    @property
    def slots(self) -> dict[str, list[Slice]]:
        return {name: slices for name, slices in self.tracks.items() if name.startswith("slot ")}

    @property
    def steps(self) -> list[tuple[Slice, list[Slice], list[Slice]]]:
        """Each with its layers and its parts: a step is written before what is in it."""
        found: list[tuple[Slice, list[Slice], list[Slice]]] = []
        for one in self.tracks["compute"]:
            if "phase" in one.args:
                found.append((one, [], []))
            else:
                _, layers, parts = found[-1]
                (layers if one.name.startswith("layer ") else parts).append(one)
        return found


def nests(slices: Iterable[Slice]) -> None:
    """As Perfetto stacks them: sorted by begin, of one begin the longer first, else in the order of the file."""
    stack: list[Slice] = []
    for one in sorted(slices, key=lambda one: (one.began, -one.lasted)):
        while stack and stack[-1].ended <= one.began:
            stack.pop()
        assert not stack or one.ended <= stack[-1].ended, (stack[-1], one)
        stack.append(one)
