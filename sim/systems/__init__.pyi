from .predict import Setting as Setting
from .predict import chosen as chosen
