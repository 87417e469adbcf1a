"""Faults under load: `python -m tests.soak`, `make soak`."""
