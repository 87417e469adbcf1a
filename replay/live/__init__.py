"""A model that generates now, with its experts on disk, or in host memory, and only a cache of them beside the compute.

`replay.load_model` gives a transformers model that is called as any other. Its experts go the way of a
replay: the same session, policies, pump and lanes."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
