from .curves import Accesses as Accesses
from .curves import belady_misses as belady_misses
from .misses import analyse as analyse
from .misses import sentences as sentences
from .misses import to_play as to_play
