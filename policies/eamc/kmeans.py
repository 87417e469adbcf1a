"""K-means over EAMs as MoE-Infinity's first version builds its collection (arXiv 2401.14361v1): who stands for whom.

The distance is D = 1 - mean over layers of the cosine of the rows, so EAMs count with their rows scaled to norm 1 and
a centre is the sum of its members with its rows scaled likewise, which is the matrix nearest to them all (spherical
K-means); a row of zeros has the cosine 0 with anything. The start is given, hence the outcome too.
"""

import numpy as np

from policies.core.policy import Float, Int
from policies.eamc.matching import TIE

ROUNDS = 100


def representatives(eams: Int, groups: int) -> Int:
    """Ascending places of the EAMs that stand for `groups` groups: of each group the member nearest its centre.

    eams: [n, L, E]; the centres start at the first `groups` of them and move until no EAM changes its group, at most
    ROUNDS times. Equal distances (within TIE) go to the first group, and to the first member. A group that all have
    left, as where two EAMs were alike, belongs to none: then there are fewer.
    """
    n = len(eams)
    units = scaled(eams.astype(np.float64)).reshape(n, -1)
    centres = units[:groups].copy()
    group = np.full(n, -1)
    for _ in range(ROUNDS):
        near = units @ centres.T
        before, group = group, _first_greatest(near)
        if np.array_equal(before, group):
            break
        for g in np.unique(group):
            centres[g] = scaled(units[group == g].reshape(-1, *eams.shape[1:]).sum(axis=0)).ravel()
    chosen = [(members := np.flatnonzero(group == g))[_first_greatest(near[members, g])] for g in np.unique(group)]
    return np.sort(np.array(chosen, np.int64))


def scaled(matrices: Float) -> Float:
    """Every row [..., E] divided by its norm; zeros stay."""
    norms = np.linalg.norm(matrices, axis=-1, keepdims=True)
    scaled: Float = np.divide(matrices, norms, out=np.zeros_like(matrices), where=norms > 0)
    return scaled


def _first_greatest(values: Float) -> Int:
    """The first place along the last axis that ties with the greatest."""
    places: Int = np.argmax(values >= values.max(axis=-1, keepdims=True) * (1 - TIE), axis=-1)
    return places
