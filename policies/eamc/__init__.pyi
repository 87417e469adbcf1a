from .build import predictor_of as predictor_of
from .collection import EamcOptions as EamcOptions
from .eamc import EamcRetention as EamcRetention
from .file import SavedEamc as SavedEamc
