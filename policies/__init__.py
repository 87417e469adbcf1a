"""What to keep and what to fetch, and the residency bookkeeping around it. No clocks, no bandwidths, no devices."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
