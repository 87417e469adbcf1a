"""What a user should know before the compiled engine is compiled, which happens once, where it is first called.

Numba keeps it on disk, where every process after it finds it.
"""

from collections.abc import Iterable

from policies.core.compiled import KEPT_FOR_NOW
from sim.engines import compiled_engine


def notes(versions: Iterable[bool]) -> list[str]:
    """Return lines for a user; none where these versions are on disk (`compiled_engine.tiered`)."""
    if all(map(compiled_engine.on_disk, dict.fromkeys(versions))):
        return []
    text = "compiling the engine, once: about fifteen seconds, and each policy when it first runs"
    if KEPT_FOR_NOW:
        text += "; no folder can keep it, so this happens each time: name one in NUMBA_CACHE_DIR"
    return [text]
