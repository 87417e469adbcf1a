"""Past activation matrices: the method of MoE-Infinity (`eamc`), its collection, and expert maps."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
