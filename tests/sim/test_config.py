import tomllib
from typing import Any

import pytest

from policies.core.grammar import alternatives
from sim.sweep.config import Config, read
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
        ("policies = 'lru'", "policies is 'lru'; a list is needed"),
        ("requests = [3]", "one value is needed"),
        ("requests = 'three'", "requests cannot be 'three'"),
        ("cold = 1", "cold cannot be 1"),
        ("seeds = [true]", "seeds cannot be True"),
        ("colld = true", "did you mean cold"),
        ("cold = ", "is no TOML"),
    ],
)
def test_a_value_that_a_sweep_cannot_have_is_refused_in_one_line(tmp_path, line, complaint):
    (tmp_path / "bad.toml").write_text(line)
    with pytest.raises(InputError, match=complaint) as caught:
        read(tmp_path / "bad.toml")
    assert "\n" not in str(caught.value)
