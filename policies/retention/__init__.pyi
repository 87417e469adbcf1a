from .belady import Belady as Belady
from .lru import LRU as LRU
