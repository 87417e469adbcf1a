"""What the simulator says of a live run's own trace on this machine, beside what was measured: rows as of a replay."""

from dataclasses import replace

import numpy as np

from replay.calibration.in_loop import effective
from replay.calibration.measure import middle
from replay.live.answering import Answered
from replay.live.model import LiveModel
from replay.run import Outcome, Prediction, host_ms
from sim.engines.simpy_engine import simulate
from sim.loop.log import PREDICTOR
from sim.loop.requests import Requests
from sim.loop.run import Run
from sim.profiles.measured import MeasuredModel
from sim.profiles.timing import experts_per_layer
from sim.results.metrics import summarise


def outcome(live: LiveModel, answered: Answered) -> Outcome:
    """Return the rows of a run that has just ended, measured and predicted. Times transfers again: slots are lost.

    Compute was timed in the run, beside transfers where there were any; these were timed alone, and feel contention.
    """
    run, trace, log = replace(live.run, routing=None), answered.trace, answered.log  # what was computed
    events = len(log.step_ns) * run.shape.layers
    predictor_ns = int(log.stall_ns[:, PREDICTOR].sum()) // max(1, events)
    behind, slowed = live.time_transfers()
    each = (live.transfers, behind)
    machines = [live.parts.machine(run.gpu.link.expert_bytes, *transfer, predictor_ns) for transfer in each]

    def on(machine: MeasuredModel) -> Run:
        timing, link = machine.timing(predictor_ns), machine.link()
        window = experts_per_layer(timing, link, run.shape.layers, live.hook.top_k)
        return replace(run.on(timing, link, window), requests=Requests(trace))

    machine = effective(replace(middle(machines), transfer_slowed=slowed), lambda model: simulate(on(model)))
    row, by_request, cell = live.measured(trace, log)
    row["host_ms"] = host_ms(log, np.ones(len(log.step_ns), np.bool_))
    predicted = summarise(simulate(on(machine)), cell, trace.requests)[0]
    return Outcome(row, log, by_request, [Prediction("this machine as timed", predicted)])
