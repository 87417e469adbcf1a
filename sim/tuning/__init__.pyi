from .journal import NAME as NAME
from .journal import Journal as Journal
from .search_space import space_of as space_of
from .tune import Halves as Halves
from .tune import Result as Result
from .tune import Search as Search
from .tune import save as save
