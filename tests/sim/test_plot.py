from functools import partial

import numpy as np
import pytest

from sim.results.drawing import svg_of
from sim.results.files import write_figures
from sim.results.plot import figure


def rows(policy, **columns):
    return [
        {
            "policy": policy,
            "oracle": "oracle" in policy,
            "phase": "decode",
            "model": "m",
            "hardware": "a5000",
            "trace": "t",
            "requests": 3,
            "cache_experts": slots,
            "cache_fraction": slots / 100,
            "cache_bytes": slots * 2**20,
            "hit_rate": slots / 200,
            "tpot_mean_ms": 100.0 - slots,
            "ttft_mean_ms": None,
            **columns,
        }
        for slots in (50, 10, 25)
    ]


def test_a_figure_is_written_as_its_name_says(tmp_path):
    drawn = partial(figure, rows("lru"), rows("belady"), 0.1, "hit_rate", spans={("lru", 25): (0.1, 0.2)})
    files = write_figures(dict.fromkeys(("a.png", "b.pdf"), drawn), tmp_path)
    assert [file.read_bytes()[:4] for file in files] == [b"\x89PNG", b"%PDF"]
    assert len(list(tmp_path.iterdir())) == 2


def test_each_policy_is_dots_over_ascending_sizes_and_belady_the_bound():
    drawn = figure([*rows("lru"), *rows("lru+oracle1"), *rows("belady")], rows("belady"), 0.1, "tpot_mean_ms")
    lines = {line.get_label(): line for line in drawn.axes[0].get_lines()}
    assert list(lines) == ["lru", "lru\n+oracle1 (oracle)", "belady (oracle)", "_"]
    assert np.asarray(lines["lru"].get_xdata()).tolist() == pytest.approx([10, 25, 50])
    assert np.asarray(lines["lru"].get_ydata()).tolist() == [90, 75, 50]


def test_each_policy_is_named_beside_its_dots_also_one_whose_file_begins_with_an_underscore():
    drawn = figure([*rows("_mine.py:Mine"), *rows("lru")], rows("belady"), 0.1, "hit_rate")
    beside = {text.get_text() for text in drawn.axes[0].texts}
    assert beside == {"_mine.py:Mine", "lru", "belady (oracle)", "working set of one token"}


def test_a_page_shows_the_value_under_the_pointer():
    svg = svg_of(figure([*rows("lru"), *rows("$m<i>x")], rows("belady"), 0.1, "tpot_mean_ms"))
    points = ("90 at 10", "75 at 25", "50 at 50")
    for name in ("lru", "$m&lt;i&gt;x", "belady (oracle)"):
        assert all(f"<title>{name}: {point}</title></use>" in svg for point in points)
    assert svg.count("<title>") == 9
