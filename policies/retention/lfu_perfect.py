"""Perfect LFU: evict the expert with the fewest lookups of the whole run, ties to the least recently looked up.

Unlike `lfu` it forgets nothing at eviction (rule 8), so it ends as static popularity, learned online; a prefetch alone
counts nothing, nor does a lookup that the host computes. Breslau et al., Web Caching and Zipf-like Distributions,
INFOCOM 1999.
"""

from policies.core.policy import Compiled, ScorePolicy
from policies.core.registry import retention
from policies.retention.lfu import count, note_recency


@retention("lfu-perfect")
class PerfectLFU(ScorePolicy):
    """Least frequently used, counted over the whole run."""

    compiled = Compiled(on_lookup=count, on_host_lookup=note_recency)
