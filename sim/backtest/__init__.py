"""The back-test: published measurements of other people's systems, predicted by the simulator, with the errors.

A file holds machines, models and rows (`file`); a row is simulated (`case`) on a machine's rates (`machine`), a model's
sizes (`model`) and a routing (`routing`); `score` fits what a machine lets be fitted, and sums up; `printed` prints.
General factors and the overheads of systems are data: `factors.toml` and `systems.toml`."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
