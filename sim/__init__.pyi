from .api import Comparison as Comparison
from .api import RunResult as RunResult
from .api import SweepResult as SweepResult
from .api import predict_systems as predict_systems
from .api import simulate as simulate
from .api import sweep as sweep
from .planner.plan import plan as plan
from .results import plot as plot
