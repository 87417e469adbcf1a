"""What a decoded token takes on a machine of which little is known, such as its data sheet."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
