"""How to observe the routing of a live model, of transformers or of a GGUF file in llama.cpp."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
