"""`make bench`: run every benchmark, or those named: `python -m benchmarks engine`."""

import importlib
import sys

ALL = (
    "engine",
    "curves",
    "eamc",
    "predictors",
    "read_trace",
    "record",
    "record_gguf",
    "memory",
    "scale",
    "streaming",
    "sweep",
    "host",
    "live",
    "speculation",
)

for name in [name for name in sys.argv[1:] if not name.startswith("-")] or ALL:
    importlib.import_module(f"benchmarks.{name}").main()
