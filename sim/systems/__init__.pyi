from .predict import Setting as Setting
from .system import chosen as chosen
