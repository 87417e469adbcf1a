from .cases import case_request as case_request
from .cases import run_case as run_case
from .cases import run_file as run_file
from .simpy_engine import SimpyDevice as SimpyDevice
from .untimed import count as count
