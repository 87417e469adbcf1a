"""The back-test: published measurements of other systems beside what is predicted for them, with the errors."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
