from .evidence import KINDS as KINDS
from .learning import WEIGHTS as WEIGHTS
