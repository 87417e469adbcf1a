"""One loop: steps from a schedule, decisions from policies and residency, work on a device. No clock, no hardware."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
