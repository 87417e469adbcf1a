"""The users of the oracle `tests.reference`: who waits, who is active, and who takes part in the next step.

Rule 18 of docs/contract.md, written from its text alone, importing nothing of this project. A run of one
request after another (no `max_batch`) is one user who never has to wait.
"""

from __future__ import annotations

from typing import Any


class Batch:
    def __init__(self, case: dict[str, Any]) -> None:
        self.requests = case["requests"]
        everyone = range(len(self.requests))
        several = case.get("max_batch") is not None
        self.most = case["max_batch"] if several else 1
        self.arrivals: list[int] | None = case.get("arrival_ns") if several else None
        self.prefills: list[bool] | None = case.get("prefill") if several else None

        self.waiting = sorted(everyone, key=lambda request: (self.arrived_at(request, 0), request))
        self.active: list[int] = []
        self.stepping: list[int] = []  # who takes part in the present step
        self.steps_done = [0 for _ in everyone]
        self.since = [0 for _ in everyone]  # the end of the request's step before, or its admission
        self.wait_ns = [0 for _ in everyone]
        self.token_ns: list[list[int]] = [[] for _ in everyone]

    def arrived_at(self, request: int, now: int) -> int:
        return now if self.arrivals is None else self.arrivals[request]

    def next_arrival(self) -> int:
        assert self.arrivals is not None
        return self.arrivals[self.waiting[0]]

    def is_over(self) -> bool:
        return not self.active and not self.waiting

    def admit(self, now: int) -> None:
        """Admit those who have arrived and find a place, and say who takes part in the next step, if anyone."""
        while self.waiting and len(self.active) < self.most and self.arrived_at(self.waiting[0], now) <= now:
            request = self.waiting.pop(0)
            self.active.append(request)
            self.since[request] = now
            self.wait_ns[request] = now - self.arrived_at(request, now)
            if self.prefills is not None and self.prefills[request]:
                self.stepping = [request]
                return
        self.stepping = list(self.active)

    def end_step(self, now: int) -> None:
        """Count the step for those who took part in it; those with no further step leave."""
        for request in self.stepping:
            self.token_ns[request].append(now - self.since[request])
            self.since[request] = now
            self.steps_done[request] += 1
            if self.steps_done[request] == len(self.requests[request]):
                self.active.remove(request)

    def event(self, layer: int) -> dict[int, int]:
        """The experts of the present step in a layer, with their tokens, added up over its requests."""
        tokens: dict[int, int] = {}
        for request in self.stepping:
            for expert, count in self.requests[request][self.steps_done[request]][layer]:
                tokens[expert] = tokens.get(expert, 0) + count
        return tokens
