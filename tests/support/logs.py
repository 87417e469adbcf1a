"""When two logs of runs are the same."""

from dataclasses import fields

import numpy as np
from numpy.typing import NDArray

from sim.loop.log import RequestLog, RunLog


def columns(log: RunLog) -> dict[str, NDArray[np.generic]]:
    """Every array of a log, its rows by request included, and its one number."""
    steps = {field.name: getattr(log, field.name) for field in fields(RunLog) if field.name != "by_request"}
    shares = {f"by_request.{field.name}": getattr(log.by_request, field.name) for field in fields(RequestLog)}
    return {name: np.asarray(values) for name, values in (steps | shares).items()}


def assert_logs_equal(ours: RunLog, theirs: RunLog, what: object = "") -> None:
    """In every column."""
    expected = columns(theirs)
    for name, found in columns(ours).items():
        np.testing.assert_array_equal(found, expected[name], f"{what} {name}")
