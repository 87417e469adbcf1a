from .api import ReplayResult as ReplayResult
from .api import replay as replay
from .live.opening import attach as attach
from .live.opening import load_model as load_model
