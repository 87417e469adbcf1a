from .file import DATA as DATA
from .file import read as read
from .score import backtest as backtest
from .score import summary as summary
