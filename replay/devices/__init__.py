"""What a replay runs on: a logical clock, threads, or a GPU, behind one interface, and what they need around them."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
