"""`eamc-blend`, our own policy, and the evidence that it weighs."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
