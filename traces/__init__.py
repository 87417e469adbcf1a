"""What a trace is: schema, reading, writing, validating, statistics. No models, no policies, no time."""

from pathlib import Path


def demo_trace() -> Path:
    """The folder of the trace that ships with the project: the shipped model over the shipped prompts."""
    return Path(__file__).parent / "demo"
