"""The row of a live run as it was measured, with the columns of a replay's, and the table of its requests."""

from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from replay.devices.stage import facts
from replay.run import copy_gb_per_s
from sim.experiment import RECORDED
from sim.loop.log import PREDICTOR, RunLog
from sim.results.metrics import Cell, Row, summarise
from traces.trace import Trace

if TYPE_CHECKING:
    from replay.live.model import LiveModel


def measured(live: "LiveModel", trace: Trace, log: RunLog) -> tuple[Row, pa.Table, Cell]:
    """Return both, and what they are a row of. log: of the requests of `trace`, in its order."""
    run, device, draft = live.run, live.device, live.draft
    known, policy, most = facts(device.gpu, device.store), run.policy, int(np.bincount(log.by_request.step).max())
    cell = Cell(
        policy=policy.text,
        options=policy.options(),
        oracle=False,
        trace="this run",
        phase=trace.phases,
        model=live.loaded.name,
        hardware=str(known["device_name"]),
        predictor_us=int(log.stall_ns[:, PREDICTOR].sum()) / max(1, len(log.step_ns) * run.shape.layers) / 1_000,
        cache_experts=run.gpu.slots,
        cache_bytes=run.gpu.slots * run.gpu.link.expert_bytes,
        all_experts=run.shape.total,
        layers=run.shape.layers,
        draft=draft or None,
        acceptance=RECORDED if draft else None,
        routing=lossy.text if (lossy := run.routing) and lossy.is_lossy(trace.top_k) else None,
        max_batch=most if most > 1 else None,
        arrivals="closed" if most > 1 else None,
        seed=policy.seed,
    )
    row, requests = summarise(log, cell, trace.requests)
    past_cache = getattr(device.store, "past_cache", None)
    row |= {"device": device.name, **known, "lanes": None if device.gpu else live.lanes, "past_cache": past_cache}
    row["copy_gb_per_s"] = copy_gb_per_s(log)
    return row, requests, cell
