"""What a server has done, in Prometheus' format."""

from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from replay.live.worker import Job
from sim.loop.log import COLUMNS, STALLS, StepRow
from traces.steps import DECODE

SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100)


class Metrics:
    """Of one server; names begin with `moe_`."""

    def __init__(self, slots: int, experts: int, expert_bytes: int) -> None:
        own = self._registry = CollectorRegistry()
        self._expert_bytes = expert_bytes
        self._requests = Counter("moe_requests", "Requests that have ended.", ["outcome"], registry=own)
        self._tokens = Counter("moe_tokens", "Tokens taken in and given out.", ["kind"], registry=own)
        self._first = Histogram("moe_ttft_seconds", "From a request to its first token.", registry=own, buckets=SECONDS)
        self._each = Histogram("moe_tpot_seconds", "Of a decoded token.", registry=own, buckets=SECONDS)
        self._lookups = Counter("moe_lookups", "Experts that were looked up.", ["found"], registry=own)
        self._bytes = Counter("moe_read_bytes", "Bytes of experts brought into slots.", ["why"], registry=own)
        self._stalls = Counter("moe_stall_seconds", "Time that compute has waited.", ["cause"], registry=own)
        self._waiting = Gauge("moe_waiting", "Requests that wait for their turn.", registry=own)
        Gauge("moe_slots", "Experts that the cache holds.", registry=own).set(slots)
        Gauge("moe_experts", "Experts of the model.", registry=own).set(experts)

    def served(self, job: Job, rows: Sequence[StepRow]) -> None:
        self._requests.labels(job.outcome).inc()
        self._tokens.labels("prompt").inc(len(job.tokens))
        self._tokens.labels("answer").inc(job.answered)
        if job.first_s is not None:
            self._first.observe(job.first_s)
        for row in rows:
            step = dict(zip(COLUMNS, row.numbers, strict=True))
            if step["phase"] == DECODE:
                self._each.observe(step["step_ns"] / 1e9)
            for found in ("hits", "late", "misses"):
                self._lookups.labels(found).inc(step[found])
            for why in ("demand", "prefetch"):
                self._bytes.labels(why).inc(step[f"{why}_transfers"] * self._expert_bytes)
            for cause in STALLS:
                self._stalls.labels(cause).inc(step[f"stall_{cause}_ns"] / 1e9)

    def text(self, waiting: int) -> bytes:
        """Return everything; waiting: requests now."""
        self._waiting.set(waiting)
        return generate_latest(self._registry)
