"""What a trace is: schema, reading, writing, validating, statistics; and what a model is. No policies, no time."""

import lazy_loader

__getattr__, __dir__, _ = lazy_loader.attach_stub(__name__, __file__)

__all__ = ["DECODE", "PREFILL", "InputError", "Trace", "demo_trace", "statistics"]
"""The names that semantic versioning is promised for."""
