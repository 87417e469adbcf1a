"""K-means over EAMs against plain loops over its definition."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from policies.eamc.collection import representatives
from tests.support.slow_eamc import slow_representatives


@st.composite
def collections(draw):
    """2k EAMs that are not all zero, rows of zeros among them, and k."""
    k, shape = draw(st.integers(1, 5)), (draw(st.integers(1, 3)), draw(st.integers(1, 4)))
    eam = arrays(np.int64, shape, elements=st.integers(0, 5)).filter(lambda eam: eam.any())
    return np.array(draw(st.lists(eam, min_size=2 * k, max_size=2 * k))), k


@given(collections())
def test_representatives_are_those_of_the_definition(collection):
    eams, k = collection
    assert representatives(eams, k).tolist() == slow_representatives(list(eams), k)


def test_random_eams_take_more_than_one_round_and_end_as_the_definition_says():
    eams = np.random.default_rng(1).poisson(np.random.default_rng(2).gamma(0.3, 9, (40, 4, 8)))
    found = representatives(eams, 20)
    assert found.tolist() == slow_representatives(list(eams), 20)
    assert 10 < len(found) <= 20
    assert found.max() >= 20, "newcomers stand for some groups"
