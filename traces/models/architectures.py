"""The MoE architectures of the installed transformers, and how the routing of each is observed.

Found in its sources, without importing them: an architecture has routed experts if its modeling file defines a
class *Experts. What differs from the experts interface stands in ADAPTED and REFUSED, in step with `sites`.
"""

import re
from dataclasses import dataclass
from importlib.metadata import distribution
from pathlib import Path

ADAPTED = {
    "doge": "product keys: the look-up of its experts' embeddings",
    "jetmoe": "the gate's sort, inverted; attention experts are layers of their own",
    "llama4": "the router's scores, which are zero but for the experts chosen",
    "nllb_moe": "combine weights of the experts' call; its forward is patched while recording",
    "zaya": "experts interface; no expert where a token skips",
    "switch_transformers": "one-hot mask of the experts' call; no expert where a token is dropped",
}
REFUSED = {
    "diffusion_gemma": "no pass has tokens of its own, since blocks of them are denoised together",
    "openai_privacy_filter": "it labels tokens and does not answer",
}
INTERFACE = "experts interface"


@dataclass(frozen=True)
class Architecture:
    """One architecture, by its module's name in transformers."""

    name: str
    how: str
    recorded: bool = True


def architectures() -> list[Architecture]:
    """Return all of them by name. Raise ImportError without transformers."""
    files = Path(str(distribution("transformers").locate_file("transformers"))).glob("models/*/modeling_*.py")
    names = {file.parent.name for file in files if re.search(rb"^class \w+Experts\(", file.read_bytes(), re.M)}
    return [
        Architecture(name, REFUSED.get(name) or ADAPTED.get(name, INTERFACE), recorded=name not in REFUSED)
        for name in sorted({*names, *ADAPTED})
    ]
