import numpy as np
import pytest

from sim.quantities import exceeds, parse_bytes, parse_cache_bytes, parse_cache_size, parse_whole, show_bytes
from traces import InputError


@pytest.mark.parametrize(
    ("text", "slots"),
    [
        ("10%", 77),  # of 768: 76.8
        ("25%", 192),
        ("100%", 768),
        ("0.01%", 1),
        ("12.5 %", 96),
        ("1", 1),
        ("768", 768),
        ("1GB", 57),
        ("1GiB", 62),
        ("17301504B", 1),
        ("769", 768),
        ("14GB", 768),
        ("12/layer", 288),
        ("33 / layer", 768),
        ("99999TiB", 768),
    ],
)
def test_a_cache_size_is_a_share_a_number_slots_a_layer_or_bytes(text, slots):
    assert parse_cache_size(text, 768, 17_301_504, 24) == slots


def test_a_cache_larger_than_all_experts_is_known_as_such():
    whole = 768 * 17_301_504
    larger = ["769", "14GB", "33/layer", f"{whole + 1}B"]
    assert all(exceeds(text, 768, whole, 24) for text in larger)
    assert not any(exceeds(text, 768, whole, 24) for text in ("768", "100%", "13GB", "32/layer", f"{whole}B"))
    assert parse_cache_bytes("14GB", np.full(768, 17_301_504), 24) == whole


def test_slots_a_layer_are_as_many_experts_of_each_size():
    sizes = np.repeat([30, 20, 10], 8)
    assert parse_cache_bytes("5/layer", sizes, 3) == 5 * (30 + 20 + 10)


def test_a_share_rounds_halves_up():
    assert [parse_cache_size(f"{percent}%", 50, None, 5) for percent in (1, 3, 5, 7)] == [1, 2, 3, 4]


@pytest.mark.parametrize("text", ["0%", "0", "100.1%", "1MB", "-5%", "", "lots", "5 parsecs", "0/layer", "1.5/layer"])
def test_an_impossible_cache_size_is_refused(text):
    with pytest.raises(InputError):
        parse_cache_size(text, 768, 17_301_504, 24)


def test_the_syntax_of_cache_sizes_is_in_the_error_for_another():
    with pytest.raises(InputError, match="invalid cache size 'lots': use 25%, 64, 12/layer or 8GiB"):
        parse_cache_size("lots", 768, 17_301_504, 24)


def test_a_whole_number_is_below_two_to_the_63():
    assert [parse_whole(text) for text in ("0", "64", str(2**63 - 1))] == [0, 64, 2**63 - 1]
    assert [parse_whole(text) for text in ("", "-1", "1.0", str(2**63))] == [None] * 4


def test_bytes_are_exact_and_rounded_down():
    assert parse_bytes("0.1GB", "x") == 100_000_000
    assert parse_bytes("1.5KiB", "x") == 1536
    assert parse_bytes("1.0009765625kib", "x") == 1025
    for text in ("12", "8388608TiB"):
        with pytest.raises(InputError):
            parse_bytes(text, "chunk")
    assert parse_bytes("8388607TiB", "x") < 1 << 63


def test_bytes_are_shown_with_three_digits():
    assert [show_bytes(n) for n in (0, 999, 1000, 17_301_504, 2.699e9, 5e15)] == [
        "0 B",
        "999 B",
        "1 kB",
        "17.3 MB",
        "2.7 GB",
        "5000 TB",
    ]
