from .api import ReplayResult as ReplayResult
from .api import replay as replay
from .live import attach as attach
from .live import load_model as load_model
