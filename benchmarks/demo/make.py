"""Record the shipped model over the shipped prompts as the shipped trace: `python -m benchmarks.demo.make`."""

from dataclasses import replace
from pathlib import Path

import traces
from tracer.demo import MODEL, NAME, PROMPTS
from tracer.loading import Loading
from tracer.models import load_model
from tracer.prompts import Columns, read_prompts
from tracer.record import Options, record


def make_trace(folder: Path) -> None:
    """Write the trace to `folder`, with the defaults of `moe-trace record`."""
    loaded = load_model(str(MODEL), Loading(device="cpu"))
    prompts = read_prompts(PROMPTS, Columns(dataset="demo"))
    record(replace(loaded, name=NAME), prompts, folder, Options(), overwrite=True)


if __name__ == "__main__":
    make_trace(traces.demo_trace())
