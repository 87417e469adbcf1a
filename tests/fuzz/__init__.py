"""Fuzzers of every reader of foreign bytes: `python -m tests.fuzz TARGET`, `make fuzz`."""
