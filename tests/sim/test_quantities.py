import numpy as np
import pytest

from sim.quantities import (
    exceeds,
    parse_bytes,
    parse_cache_bytes,
    parse_cache_size,
    parse_gb_per_s,
    parse_whole,
    show_bytes,
)
from traces.errors import InputError


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
        ("99999TiB", 768),
    ],
)
def test_a_cache_size_is_a_share_a_number_or_bytes(text, slots):
    assert parse_cache_size(text, 768, 17_301_504) == slots


def test_a_cache_larger_than_all_experts_is_known_as_such():
    whole = 768 * 17_301_504
    larger = ["769", "14GB", f"{whole + 1}B"]
    assert all(exceeds(text, 768, whole) for text in larger)
    assert not any(exceeds(text, 768, whole) for text in ("768", "100%", "13GB", f"{whole}B"))
    assert parse_cache_bytes("14GB", np.full(768, 17_301_504)) == whole


def test_a_share_rounds_halves_up():
    assert [parse_cache_size(f"{percent}%", 50, None) for percent in (1, 3, 5, 7)] == [1, 2, 3, 4]


@pytest.mark.parametrize("text", ["0%", "0", "0.0%", "100.1%", "101%", "1MB", "-5%", "", "lots", "5 parsecs", "5iB"])
def test_an_impossible_cache_size_is_one_clear_line(text):
    with pytest.raises(InputError) as refused:
        parse_cache_size(text, 768, 17_301_504)
    assert "\n" not in str(refused.value)
    assert text in str(refused.value)


@pytest.mark.parametrize("text", ["9" * 5000, "9" * 5000 + "%", "9" * 5000 + "GB", f"0.{'0' * 5000}1GB"])
def test_a_number_of_thousands_of_digits_is_refused(text):
    for parse in (
        lambda: parse_cache_size(text, 768, 1),
        lambda: parse_cache_bytes(text, np.ones(8, int)),
        lambda: parse_bytes(text, "chunk"),
        lambda: parse_gb_per_s(f"{text}/s", "link"),
    ):
        with pytest.raises(InputError):
            parse()
    assert not exceeds(text, 768, 1)


def test_a_whole_number_is_below_two_to_the_63():
    assert [parse_whole(text) for text in ("0", "64", str(2**63 - 1))] == [0, 64, 2**63 - 1]
    assert [parse_whole(text) for text in ("", "-1", "1.0", "²", str(2**63), "9" * 5000)] == [None] * 6


def test_bytes_are_refused_where_nothing_states_the_size_of_an_expert():
    with pytest.raises(InputError, match="nothing states how large an expert is"):
        parse_cache_size("8GiB", 768, None)


def test_bytes_are_exact_and_rounded_down():
    assert parse_bytes("0.1GB", "x") == 100_000_000
    assert parse_bytes("1.5KiB", "x") == 1536
    assert parse_bytes("1.0009765625kib", "x") == 1025
    with pytest.raises(InputError, match="chunk '12'"):
        parse_bytes("12", "chunk")
    assert parse_bytes("8388607TiB", "x") < 1 << 63
    with pytest.raises(InputError, match="chunk '8388608TiB' is more bytes than any machine has"):
        parse_bytes("8388608TiB", "chunk")


def test_bytes_are_shown_with_three_digits():
    assert [show_bytes(n) for n in (0, 999, 1000, 17_301_504, 2.699e9, 5e15)] == [
        "0 B",
        "999 B",
        "1 kB",
        "17.3 MB",
        "2.7 GB",
        "5000 TB",
    ]
