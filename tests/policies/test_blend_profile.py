"""What eamc-blend has learned, in a file: a run that starts from it goes on; what is no such file is refused."""

import json

import numpy as np
import pytest

from policies.blend.build import build
from policies.blend.decisions import learned
from policies.core.policy import Shape
from policies.core.runner import PolicyRunner
from policies.core.spec import parse
from sim.loop.requests import Requests
from traces import InputError
from traces.synthetic import synthetic

SHAPE = Shape(4, 8)


@pytest.fixture
def trace():
    return synthetic(6, 30, 4, 8, 2, seed=3, prompt_tokens=5)


def written(profile, path):
    with path.open("wb") as file:
        profile.write(file)
    return path


def test_learning_on_from_a_file_ends_as_learning_without_a_break(trace, tmp_path):
    requests = list(Requests(trace))
    file = written(build([("first", requests[:3])], SHAPE), tmp_path / "first.npz")

    on = build([("second", requests[3:])], SHAPE, file)
    whole = build([("both", requests)], SHAPE)

    assert on.traces == ("first", "second")
    assert build([("first", []), ("second", [])], SHAPE).traces == ("first", "second")
    assert whole.learned["uses"].any()
    assert (whole.learned["weights"] != build([("none", [])], SHAPE).learned["weights"]).any()
    for name, array in whole.learned.items():
        assert np.array_equal(on.learned[name], array), name


def test_a_run_starts_with_what_the_file_holds(trace, tmp_path):
    profile = build([("it", Requests(trace))], SHAPE)
    file = written(profile, tmp_path / "it.npz")
    runner = PolicyRunner(parse(f"eamc-blend:profile={file}"), SHAPE, ())
    assert runner.prefetcher.state.cache.keep is runner.retention.state.cache.keep
    for name, array in learned(runner.retention.state).items():
        assert np.array_equal(array, profile.learned[name]), name


@pytest.mark.parametrize("shape", [Shape(4, 9), Shape(5, 8)])
def test_a_profile_of_another_model_is_refused(shape, trace, tmp_path):
    file = written(build([("it", Requests(trace))], SHAPE), tmp_path / "it.npz")
    with pytest.raises(InputError, match=r"does not fit this model of .*; it was learned from 4 x 8 experts"):
        parse(f"eamc-blend:profile={file}").build(shape)
    with pytest.raises(InputError, match="does not fit this model of"):
        parse(f"eamc-blend:profile={file}").require(shape)


def test_a_profile_of_another_version_is_refused(trace, tmp_path):
    file = written(build([("it", Requests(trace))], SHAPE), tmp_path / "it.npz")
    with np.load(file) as held:
        arrays = dict(held) | {"about": np.array(json.dumps({"format": "moe-expert-cache eamc-blend profile 1"}))}
    np.savez(file, **arrays)
    with pytest.raises(InputError, match="it is not of this version"):
        parse(f"eamc-blend:profile={file}").build(SHAPE)
