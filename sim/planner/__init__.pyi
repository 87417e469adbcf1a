from .plan import Plan as Plan
from .plan import quick as quick
