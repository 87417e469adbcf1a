"""What every policy stands on: contract of a policy, residency, scores, names and their grammar, compiled dispatch."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
