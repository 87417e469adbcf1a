from .errors import InputError as InputError
from .location import demo_trace as demo_trace
from .stats import statistics as statistics
from .steps import DECODE as DECODE
from .steps import PREFILL as PREFILL
from .trace import Trace as Trace

__all__: list[str]
