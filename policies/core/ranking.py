"""The best few of many scores, compiled: what a prefetcher with a budget proposes. Ties fall to the lower id.

And how the proposals for several requests become one: an expert is proposed once, at the highest of its priorities.
"""

from policies.core.compiled import compiled
from policies.core.policy import Float, Int, Single


@compiled
def best(scores: Float | Single | Int, base: int, above: float, ids: Int, priorities: Float) -> int:
    """Fill `ids` with base + the places of the greatest scores, the greatest first; how many there are.

    scores: [n]. Only scores greater than `above` count; ids and priorities: [at most].
    """
    n = 0
    for i in range(len(scores)):
        score = scores[i]
        if score <= above or (n == len(ids) and score <= priorities[n - 1]):
            continue
        place = min(n, len(ids) - 1)
        while place > 0 and priorities[place - 1] < score:
            ids[place], priorities[place] = ids[place - 1], priorities[place - 1]
            place -= 1
        ids[place], priorities[place] = base + i, score
        n = min(n + 1, len(ids))
    return n


@compiled
def add(ids: Int, priorities: Float, first: int, n: int, expert: int, priority: float) -> int:
    """Propose `expert` unless it stands at the places from `first` to `n` already; how many are proposed then."""
    for place in range(first, n):
        if ids[place] == expert:
            priorities[place] = max(priorities[place], priority)
            return n
    ids[n], priorities[n] = expert, priority
    return n + 1
