"""What this machine takes for each part of a step: measured, and written as a hardware profile."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
