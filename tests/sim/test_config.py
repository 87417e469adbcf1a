import tomllib
from typing import Any

import pytest

from policies.core.grammar import alternatives
from sim.sweeps.config import Config, read
from sim.sweeps.setup import Setup
from traces.errors import InputError

GIVEN: dict[str, Any] = {"traces": ("t",), "policies": ("lru",), "cache_sizes": ("25%",), "hardware": ("a5000",)}


def test_options_list_alternatives_and_every_combination_is_a_policy():
    assert list(alternatives("eamc:capacity=1|2:matches=3|4+none@layer")) == [
        "eamc:capacity=1:matches=3+none@layer",
        "eamc:capacity=1:matches=4+none@layer",
        "eamc:capacity=2:matches=3+none@layer",
        "eamc:capacity=2:matches=4+none@layer",
    ]
    assert list(alternatives("lru+popular:n=2")) == ["lru+popular:n=2"]


def test_cells_are_counted_as_they_would_be_made():
    config = Config(**{**GIVEN, "policies": ("eamc:capacity=5|6:matches=3|4", "lru"), "hardware": ("a5000", "h200")})
    assert config.cells == len(config.specs()) * len(list(config.setups())) == 5 * 2
    many = "|".join(map(str, range(1, 1001)))
    assert Config(**{**GIVEN, "policies": (f"eamc:capacity={many}:matches={many}:threshold={many}",)}).cells == 10**9


def test_policies_that_draw_play_once_with_each_seed_and_others_once():
    config = Config(**{**GIVEN, "policies": ("random", "lru", "random:seed=7@layer", "random@layer"), "seeds": (1, 2)})
    assert [spec.text for spec in config.specs()] == [
        *("random:seed=1", "random:seed=2", "lru", "random:seed=7@layer"),
        *("random:seed=1@layer", "random:seed=2@layer"),
    ]
    assert [spec.seed for spec in config.specs()] == [1, 2, None, 7, 1, 2]


def test_untimed_no_machine_makes_a_difference():
    config = Config(**{**GIVEN, "hardware": ("a5000", "h200"), "untimed": True})
    assert len(list(config.setups())) == 1


def test_what_is_written_is_read_back(tmp_path):
    config = Config(**{**GIVEN, "policies": ("eamc:capacity=1|2",), "seeds": (3, 4), "predictor_us": 2.5, "cold": True})
    config.write(tmp_path / "sweep.toml")
    assert Config(**read(tmp_path / "sweep.toml")) == config
    text = (tmp_path / "sweep.toml").read_text()
    assert "eamc:capacity=2 = {" in text
    assert tomllib.loads(text)["policies"] == ["eamc:capacity=1|2"]


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("policies = 'lru'", "policies = 'lru': must be a list"),
        ("policies = []", "policies = []: use lru,eamc"),
        ("requests = [3]", "requests = [3]: must be a whole number"),
        ("requests = 'three'", "requests = 'three': must be a whole number"),
        ("requests = -1", "requests = -1: must be at least 1"),
        ("chunk_bytes = -5", "chunk_bytes = -5: must be at least 1"),
        ("chunk_bytes = 0", "chunk_bytes = 0: must be at least 1"),
        ("chunk_bytes = inf", "chunk_bytes = inf: must be at least 1"),
        ("chunk_bytes = 'many'", "chunk_bytes = 'many' is not a number of bytes"),
        ("predictor_us = nan", "predictor_us = nan: must be at least 0 and finite"),
        ("predictor_us = 1e308", "predictor_us = 1e+308: must be at least 0 and finite, at most 1e+15"),
        ("arrival_rate = 0", "arrival_rate = 0: must be above 0 and finite"),
        ("arrivals = 'closd'", "unknown arrivals 'closd'; did you mean closed"),
        ("max_batch = [1, -4]", "max_batch = -4: must be at least 1"),
        ("warmup_requests = -1", "warmup_requests = -1: must be at least 0"),
        ("engine = 'simpi'", "unknown engine 'simpi'; did you mean simpy"),
        ("cold = 1", "cold = 1: must be true or false"),
        ("seeds = [true]", "seeds = True: must be a whole number"),
        (f"seeds = [{2**63}]", f"seeds = {2**63}: must be at least 0, at most {2**63 - 1}"),
        ("colld = true", "did you mean cold"),
        ("cold = ", "cannot be read as TOML"),
        ("cold = " + "[" * 5_000, "cannot be read as TOML"),
    ],
)
def test_a_value_that_a_sweep_cannot_have_is_refused_in_one_line(tmp_path, line, complaint):
    (tmp_path / "bad.toml").write_text(line)
    with pytest.raises(InputError) as caught:
        read(tmp_path / "bad.toml")
    assert str(caught.value).startswith(f"{tmp_path / 'bad.toml'}: ")
    assert complaint in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("untimed", [False, True])
def test_a_setup_is_held_to_what_files_are_held_to(untimed):
    with pytest.raises(InputError, match=r"chunk_bytes = -5: must be at least 1"):
        Setup("trace", chunk_bytes=-5, untimed=untimed)
    with pytest.raises(InputError, match=r"chunk_bytes = -5: must be at least 1"):
        Config(**GIVEN, chunk_bytes=-5, untimed=untimed)
