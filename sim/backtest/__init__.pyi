from .case import Case as Case
from .file import Machine as Machine
from .file import Model as Model
from .file import Setting as Setting
from .machine import Rates as Rates
from .machine import rates as rates
from .machine import table as table
from .model import profile_of as profile_of
