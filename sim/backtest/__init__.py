"""The back-test: published measurements of other people's systems beside what is predicted for them, with the errors.

A file holds machines, models and rows (`file`), which `sim.prediction` simulates; `score` fits what a machine lets be
fitted, and sums up; `printed` prints. Nothing stands on it but its command and programs beside the packages.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
