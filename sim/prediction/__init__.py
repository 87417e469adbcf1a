"""What a decoded token takes on a machine of which little is known, such as its data sheet.

Planner and back-test stand on it. A case (`case`) is a machine's rates (`machine`), a model's sizes (`model`) and a
routing (`routing`), as `described` states them; `errors` says how far such predictions were off. General factors, GPUs,
CPUs and the overheads of systems are data: `data/factors.toml`, `gpus.toml`, `cpus.toml` and `systems.toml`.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
