from .checker import check_policy as check_policy
from .core.policy import Event as Event
from .core.policy import Policy as Policy
from .core.policy import Prefetcher as Prefetcher
from .core.policy import ScorePolicy as ScorePolicy
from .core.policy import Shape as Shape
from .core.spec import make_policy as make_policy
from .expert_cache import ExpertCache as ExpertCache
