"""What a model is: its layers, experts and bytes, from its config, its files or a profile; and where it routes.

Reading a config needs torch and transformers, which are imported when one is read; a profile needs neither.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
