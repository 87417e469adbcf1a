"""A device: slots, copies, kernels and measured time, driven by the same policies as the simulator."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
