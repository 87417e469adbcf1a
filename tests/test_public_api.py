"""The public names, and what a researcher does with them in a script of 25 lines."""

import inspect
import re
import subprocess
import sys
import warnings
from dataclasses import fields
from pathlib import Path

import matplotlib.figure
import numpy as np
import pytest

import policies
import replay
import sim
import traces
from policies.core.spec import PolicySpec
from sim.experiment import Experiment
from tests import keywords

NAMES = {
    traces: ["DECODE", "PREFILL", "InputError", "Trace", "demo_trace", "statistics"],
    policies: ["Event", "ExpertCache", "Policy", "Prefetcher", "ScorePolicy", "Shape", "check_policy", "make_policy"],
    sim: ["Comparison", "RunResult", "SweepResult", "plan", "plot", "predict_systems", "simulate", "sweep"],
    replay: ["ReplayResult", "attach", "load_model", "replay"],
}
"""Semantic versioning is promised for these names."""

SCRIPT = '''
import numpy as np
from policies import Event, ScorePolicy, check_policy
from sim import simulate, sweep
from traces import Trace

rng = np.random.default_rng(0)
scores = rng.gumbel(size=(3, 24, 16, 64)) - np.log(np.arange(1, 65))
experts = np.argsort(-scores, axis=-1)[..., :8]  # [requests, tokens, layers, top_k]
trace = Trace.from_arrays(list(experts), num_experts=64, prompt_tokens=8, model="olmoe-1b-7b")

class Fading(ScorePolicy):
    """Keep what recent tokens used most."""

    def observe(self, event: Event) -> None:
        self.keep[0] *= 0.995
        self.keep[0, event.experts] += event.counts

assert check_policy(Fading).passed
result = sweep(trace, ["lru", Fading, "belady"], ["25%", 512], workers=2, predictor_us=0.0)
print(result.frame[["policy", "cache_experts", "tpot_mean_ms"]])
print(result.compare("lru"))
result.plot().savefig("sweep.png")
run = simulate(trace, Fading, "25%", predictor_us=0.0)
print(run, run.steps.groupby("phase")["step_ms"].mean(), run.requests["hits"].sum())
'''


@pytest.fixture(scope="module")
def trace():
    rng = np.random.default_rng(1)
    experts = np.argsort(-rng.gumbel(size=(4, 12, 16, 64)), axis=-1)[..., :8]
    return traces.Trace.from_arrays(list(experts), 64, prompt_tokens=[0, 4, 6, 12], model="olmoe-1b-7b")


@pytest.mark.parametrize("package", NAMES, ids=lambda package: package.__name__)
def test_the_public_names_are_these(package):
    assert package.__all__ == NAMES[package]
    for name in package.__all__:
        assert getattr(package, name).__doc__
    with pytest.raises(AttributeError, match=r"(?i)no .*attribute '?nothing"):
        _ = package.nothing


def test_importing_a_package_imports_none_of_its_modules():
    code = (
        "import sys, sim, policies, traces, replay; print([m for m in sys.modules if m.startswith(('sim.', 'numpy'))])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_a_researchers_script_runs(tmp_path, monkeypatch, capsys):
    assert len(SCRIPT.strip().splitlines()) <= 25
    monkeypatch.chdir(tmp_path)
    exec(SCRIPT, {"__name__": "__main__"})
    out = capsys.readouterr().out
    assert re.search(r"faster per token than lru over blocks of \d+ tokens of 3 requests", out)
    assert "<Run of Fading, 256 (25%) of the experts, olmoe-1b-7b on a5000: hit_rate" in out
    assert (tmp_path / "sweep.png").stat().st_size > 10_000


@pytest.mark.parametrize("function", [sim.simulate, sim.sweep, replay.replay])
def test_the_options_are_the_fields_of_an_experiment(function):
    assert {field.name for field in fields(Experiment)} <= set(inspect.signature(function).parameters)


def test_the_typed_options_are_those_that_the_fields_write():
    for file, text in keywords.written().items():
        assert (keywords.ROOT / file).read_text("utf-8") == text


def test_a_run_has_its_totals_steps_and_requests(trace):
    run = sim.simulate(trace, "lru", 0.25, warmup_requests=1)
    counted = run.steps[~run.steps["warmup"]]
    assert run["misses"] == counted["misses"].sum() == run.requests["misses"].sum()
    decodes = counted[counted["phase"] == "decode"]
    assert run.tpot_mean_ms == pytest.approx(decodes["step_ms"].mean())
    assert len(decodes) == 8 + 6
    assert run.steps["request"].iloc[0] == "0"
    assert isinstance(run.plot(), matplotlib.figure.Figure)


def test_a_run_equals_the_sweeps_run_of_the_same_policy_and_size(trace):
    swept = sim.sweep(trace, ["lru", "lfu"], [256])
    alone = sim.simulate(trace, "lfu", "25%")
    (row,) = swept.frame[swept.frame["policy"] == "lfu"].to_dict("records")
    assert {name: row[name] for name in ("misses", "tpot_mean_ms")} == {
        "misses": alone["misses"],
        "tpot_mean_ms": alone.tpot_mean_ms,
    }


def test_a_policy_that_draws_draws_from_the_seed(trace):
    few = trace.head(1)
    run = sim.simulate(few, "random", "25%", untimed=True, seed=4)
    assert run.row == sim.simulate(few, "random:seed=4", "25%", untimed=True).row
    assert sim.sweep(few, ["random"], ["25%"], untimed=True, seed=4).policies == ["random:seed=4"]
    assert replay.replay(few, "random", "25%", device="virtual", seed=4).policy == "random:seed=4"


def test_differences_are_paired_over_requests(trace):
    slow, fast = (sim.simulate(trace, policy, "25%", untimed=True) for policy in ("lru", "belady"))
    (difference,) = fast.compare(slow)
    assert difference.more == pytest.approx(100 * (fast.hit_rate - slow.hit_rate))
    assert list(fast.compare(slow).frame["baseline"]) == ["lru"]
    swept = sim.sweep(trace.head(1), ["belady"], ["25%"], untimed=True)
    assert all(repr(told).count("belady (oracle)") == 1 for told in (fast, fast.compare(slow), swept))
    assert isinstance(fast.plot(), matplotlib.figure.Figure)


def test_the_virtual_device_measures_what_was_predicted(trace):
    found = replay.replay(trace, "lru", "25%", device="virtual")
    (predicted,) = found.predictions.values()
    assert found.tpot_mean_ms == predicted["tpot_mean_ms"]
    assert "predicted for a5000" in repr(found)
    assert len(found.steps) == sum(found.steps["phase"] == "decode") + 3


def test_a_policy_is_made_of_a_class_its_options_and_a_prefetcher():
    made = policies.make_policy("eamc:capacity=10", prefetch="popular:n=2", split=True)
    assert isinstance(made, PolicySpec)
    assert (made.evict.values["capacity"], made.evict.values["split"]) == (10, True)
    assert (made.prefetch.name, made.prefetch.values["n"]) == ("popular", 2)
    with pytest.raises(ValueError, match="option"):
        policies.make_policy("lru", alpha=1)


def test_two_policies_of_one_name_are_refused(trace):
    one, other, lru = (type(name, (policies.ScorePolicy,), {}) for name in ("Mine", "Mine", "lru"))
    with pytest.raises(traces.InputError, match="two different policies are called Mine"):
        sim.sweep(trace, [one, other], ["25%"], untimed=True)
    with pytest.raises(traces.InputError, match="there is another policy called lru: give the class another name"):
        sim.sweep(trace, [lru], ["25%"], untimed=True)
    with pytest.raises(traces.InputError, match="another policy called markov"):
        policies.make_policy("lru", prefetch=type("markov", (policies.Prefetcher,), {}))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"host_memory": "1GiB", "untimed": True}, r"`untimed` counts without a clock: it cannot have `host_memory`"),
        ({"arrivals": "poisson"}, "need `max_batch`"),
        ({"chunk_bytes": -1}, "chunk_bytes = -1: expected int >= 1"),
        ({"hardware": "a50000"}, "unknown hardware profile 'a50000'; did you mean a5000"),
        ({"hardware": Path("no.toml")}, "no.toml"),
        ({"policy": None}, "None is not a policy: use a name such as 'lru', a class, or"),
    ],
)
def test_errors_are_value_errors_that_name_parameters(trace, options, said):
    with pytest.raises(ValueError, match=said):
        sim.simulate(trace, **{"policy": "lru", "cache_size": "25%", **options})


def test_a_misspelt_option_is_an_error_when_it_runs_and_for_mypy(trace: traces.Trace) -> None:
    """`make lint` reports errors of types that are ignored here and are none."""
    with pytest.raises(TypeError, match="unknown option warmup_request; known: hardware"):
        sim.simulate(trace, "lru", 0.25, warmup_request=1)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="unknown option lane; known: hardware"):
        replay.replay(trace, "lru", 0.25, device="virtual", lane=1)  # type: ignore[call-arg]
    with pytest.raises(traces.InputError, match="requests"):
        sim.sweep(trace, ["lru"], requests="few")  # type: ignore[arg-type]


def test_what_commands_warn_of_is_a_warning(trace):
    with pytest.warns(UserWarning, match="below the working set of one token"):
        sim.simulate(trace, "lru", "10%")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sim.simulate(trace, "lru", "50%")


@pytest.mark.parametrize(
    "experts",
    [
        [np.zeros((2, 3))],
        [np.zeros((2, 1, 1)), np.zeros((2, 2, 1))],
        [np.full((1, 1, 1), 0.5)],
        [np.full((1, 1, 1), 9)],
        [np.zeros((1, 1, 2), int)],
    ],
)
def test_arrays_that_are_no_routing_are_refused(experts):
    with pytest.raises(traces.InputError):
        traces.Trace.from_arrays(experts, 8)


def test_a_trace_of_arrays_may_hold_ids_of_tokens() -> None:
    experts, ids = [np.zeros((n, 2, 1), np.int64) for n in (3, 2)], [np.array([7, 8, 9]), np.array([5, -1])]
    plain, told = traces.Trace.from_arrays(experts, 4), traces.Trace.from_arrays(experts, 4, token_ids=ids)
    assert told.steps(1).token_ids.tolist() == [5, -1]  # type: ignore[union-attr]
    assert plain.steps(1).token_ids is None
    assert plain.fingerprint != told.fingerprint
    with pytest.raises(traces.InputError):
        traces.Trace.from_arrays(experts, 4, token_ids=ids[:1])


def test_a_trace_in_memory_is_the_one_that_was_written(trace, tmp_path):
    from traces.writer import write_trace

    write_trace(trace, tmp_path / "t")
    read = traces.Trace.read(tmp_path / "t")
    assert (read.experts == trace.experts).all()
    assert (read.step == trace.step).all()
    assert repr(read) == "<Trace 't' of olmoe-1b-7b: 16 layers x 64 experts, top-8; 4 requests, 48 tokens>"


def test_results_show_themselves_in_a_notebook_and_help_lists_the_options(trace):
    result = sim.sweep(trace, ["lru", "eamc"], ["25%"])
    for shown in (result, result.compare("lru"), sim.simulate(trace, "lru")):
        assert "<table" in shown._repr_html_()
    assert result.verdict[0] in result._repr_html_()
    assert result.plot()._repr_svg_().startswith("<svg")  # type: ignore[attr-defined]
    assert "\nmax_batch: Requests that run at the same time" in (sim.sweep.__doc__ or "")
