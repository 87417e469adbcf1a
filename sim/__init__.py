"""Time: the SimPy model of GPU memory, host link and compute, sweeps over it, and their plots. No torch."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
