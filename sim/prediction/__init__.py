"""What a decoded token takes on a machine of which little is known, such as its data sheet.

Planner and back-test stand on it. A case (`case`) is a machine's rates (`machine`), a model's sizes (`model`) and a
routing (`routing`), as `described` states them; `errors` says how far such predictions were off. General factors are
data (`data/factors.toml`), as are GPUs and CPUs (`sim.catalogue`) and overheads of systems (`policies.core.systems`).
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
