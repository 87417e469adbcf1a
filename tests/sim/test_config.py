import inspect
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import sim
from policies.core.grammar import alternatives
from sim.commands.run import run as run_command
from sim.commands.sweep import sweep as sweep_command
from sim.experiment import OPTIONS, Experiment
from sim.sweeps.config import KEYS, Sweep
from terminal.options import expanded
from traces import InputError
from traces.files import read_toml

GIVEN: dict[str, Any] = {"traces": ("t",), "policies": ("lru",), "cache_sizes": ("25%",), "hardware": ("a5000",)}


def test_options_list_alternatives_and_every_combination_is_a_policy():
    assert list(alternatives("eamc:capacity=1|2:matches=3|4+none@layer")) == [
        "eamc:capacity=1:matches=3+none@layer",
        "eamc:capacity=1:matches=4+none@layer",
        "eamc:capacity=2:matches=3+none@layer",
        "eamc:capacity=2:matches=4+none@layer",
    ]
    assert list(alternatives("lru+popular:n=2")) == ["lru+popular:n=2"]


def test_policies_that_draw_play_once_with_each_seed_and_others_once():
    config = Sweep.of({**GIVEN, "policies": ("random", "lru", "random:seed=7@layer", "random@layer"), "seeds": (1, 2)})
    assert [spec.text for spec in config.specs] == [
        *("random:seed=1", "random:seed=2", "lru", "random:seed=7@layer"),
        *("random:seed=1@layer", "random:seed=2@layer"),
    ]
    assert [spec.seed for spec in config.specs] == [1, 2, None, 7, 1, 2]


def test_untimed_no_machine_makes_a_difference():
    config = Sweep.of({**GIVEN, "hardware": ("a5000", "h200"), "untimed": True})
    assert len(list(config.experiments())) == 1


def test_what_is_written_is_read_back(tmp_path):
    config = Sweep.of({**GIVEN, "policies": ("eamc:capacity=1|2",), "seeds": (3, 4), "predictor_us": 2.5, "cold": True})
    config.write(tmp_path / "sweep.toml")
    assert Sweep.of(read_toml(tmp_path / "sweep.toml")) == replace(config, traces=(str(Path("t").resolve()),))
    text = (tmp_path / "sweep.toml").read_text()
    assert "eamc:capacity=2 = {" in text
    assert tomllib.loads(text)["policies"] == ["eamc:capacity=1|2"]


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("policies = 'lru'", "policies = 'lru': expected array"),
        ("chunk_bytes = 0", "chunk_bytes = 0: expected int >= 1"),
        ("arrivals = 'closd'", "unknown arrivals 'closd'; did you mean closed"),
        ("colld = true", "did you mean cold"),
    ],
)
def test_a_value_that_a_sweep_cannot_have_is_refused_with_its_key(tmp_path, line, complaint):
    (tmp_path / "bad.toml").write_text(line)
    with pytest.raises(InputError) as caught:
        Sweep.of(read_toml(tmp_path / "bad.toml"), "bad.toml")
    assert str(caught.value).startswith("bad.toml: ")
    assert complaint in str(caught.value)


def test_a_new_option_is_one_field():
    """Every field is an option of `sweep` and `run`, a key of TOML, a keyword in Python, and in the key as it says."""
    shown = {command: set(inspect.signature(expanded(command)).parameters) for command in (sweep_command, run_command)}
    keywords = set(inspect.signature(sim.simulate).parameters)
    for name, option in OPTIONS.items():
        assert name in keywords
        assert name in KEYS or name in ("trace", "seed")
        assert (name in Experiment("t").key()) is option.key
        if option.help:
            assert name in shown[sweep_command]
            assert name in shown[run_command] or name == "untimed"
