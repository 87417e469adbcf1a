"""Simulator against device: the same cells on both, in closed loop and in lockstep."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
