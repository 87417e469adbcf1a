import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from sim.profiles.hardware_profile import hardware
from sim.profiles.roofline import Roofline, host_link
from sim.profiles.timing import FixedTiming, Link, Timing
from tests.support.profiles import HALF, plain
from traces.models.profile import MODELS, model

A5000 = hardware("a5000")
BARE = replace(A5000, launch_us=0.0, framework_us_per_layer=0.0)
MIXTRAL = model("mixtral-8x7b")


def test_a_bandwidth_is_a_small_fraction_however_it_was_computed():
    exact, computed = (host_link(replace(A5000, link_bandwidth_gb_per_s=gb), MIXTRAL) for gb in (28.8, 24.0 * 1.2))
    assert 24.0 * 1.2 != 28.8
    assert exact == computed
    assert (exact.ns_per_byte_num, exact.ns_per_byte_den) == (5, 144)


def test_a_transfer_takes_latency_and_its_bytes_rounded_up():
    """Rule 12."""
    link = Link(latency_ns=8_000, ns_per_byte_num=1, ns_per_byte_den=24, expert_bytes=100)
    assert link.used_ns(24) == 8_001
    assert link.used_ns(25) == 8_002
    assert link.used_ns(0) == 0


def test_the_link_of_a_profile_is_exact():
    link = host_link(replace(A5000, link_bandwidth_gb_per_s=12.5), MIXTRAL, chunk_bytes=4096)
    assert (link.ns_per_byte_num, link.ns_per_byte_den, link.latency_ns) == (2, 25, 8_000)
    assert link.used_ns(link.expert_bytes) == 8_000 + math.ceil(352_321_536 / 12.5)


def test_fixed_durations_are_linear_in_the_tokens_of_an_expert():
    timing: Timing = FixedTiming(dense=1, expert=20, expert_per_token=3, combine=4, head=5)
    assert [timing.dense_ns(0, 1, 1), timing.expert_ns(7), timing.combine_ns(1), timing.head_ns(1)] == [1, 41, 4, 5]


def test_one_token_reads_an_expert_at_the_memorys_bandwidth():
    assert Roofline(BARE, MIXTRAL).expert_ns(1) == math.ceil(MIXTRAL.expert_bytes / BARE.memory_bandwidth_gb_per_s)


def test_many_tokens_multiply_at_the_compute_rate():
    flop = 2 * MIXTRAL.expert_parameters * 4096
    assert Roofline(BARE, MIXTRAL).expert_ns(4096) == math.ceil(flop / (BARE.compute_tflop_per_s * 1_000))


def test_a_layers_dense_part_reads_attention_router_and_cache():
    attention = 4096 * 4096 * 2 + 4096 * 1024 * 2  # queries and output; keys and values of 8 heads of 32
    cache = 2 * 8 * 128 * 2 * 1000
    read = (attention + 4096 * 8) * 2 + cache
    assert Roofline(BARE, MIXTRAL).dense_ns(5, 1, 1000) == math.ceil(read / BARE.memory_bandwidth_gb_per_s)


def test_launches_and_the_framework_are_paid_on_top():
    plain, charged = Roofline(BARE, MIXTRAL), Roofline(A5000, MIXTRAL)
    assert charged.dense_ns(0, 1, 9) - plain.dense_ns(0, 1, 9) == 10 * 2_500 + 20_000
    assert charged.expert_ns(1) - plain.expert_ns(1) == 3 * 2_500
    assert charged.combine_ns(1) - plain.combine_ns(1) == 2_500
    assert charged.head_ns(1) - plain.head_ns(1) == 3 * 2_500


def test_attention_grows_with_the_context():
    timing = Roofline(BARE, MIXTRAL)
    grown = [timing.dense_ns(0, 1, context) for context in (1, 1_001, 2_001, 3_001)]
    steps = [b - a for a, b in pairwise(grown)]
    assert max(steps) - min(steps) <= 1
    assert steps[0] == pytest.approx(2 * 8 * 128 * 2 * 1_000 / BARE.memory_bandwidth_gb_per_s, abs=1)


def test_latent_attention_caches_less():
    assert model("deepseek-v2-lite").kv_cache_bytes(1) == 27 * 576 * 2
    assert model("olmoe-1b-7b").kv_cache_bytes(1) == 16 * 2 * 2048 * 2


def test_a_sliding_window_bounds_every_second_layer():
    timing = Roofline(BARE, model("gpt-oss-20b"))
    assert timing.dense_ns(0, 1, 128) == timing.dense_ns(0, 1, 100_000)
    assert timing.dense_ns(1, 1, 128) < timing.dense_ns(1, 1, 100_000)


def test_layers_without_experts_have_their_own_window():
    profile = model("llama-4-maverick")
    timing = Roofline(BARE, profile)
    more = 2 * 8 * 128 * 2 * 1_000 / BARE.memory_bandwidth_gb_per_s
    assert [timing.dense_ns(layer, 1, 21_000) - timing.dense_ns(layer, 1, 20_000) for layer in (0, 1)] == [
        0,
        pytest.approx(more, abs=1),
    ]


def test_deepseeks_first_layer_is_charged_to_its_first_moe_layer():
    profile = model("deepseek-v2-lite")
    timing = Roofline(BARE, profile)
    attention = 2048 * 16 * 192 + 2048 * 576 + 512 * 16 * 256 + 2048 * 2048  # queries, latent, its heads, output
    extra = ((attention + 3 * 2048 * 10944) * 2 + 576 * 2 * 100) / BARE.memory_bandwidth_gb_per_s
    assert timing.dense_ns(0, 1, 100) - timing.dense_ns(1, 1, 100) == pytest.approx(extra, abs=1)


def test_trailing_layers_are_charged_to_the_head():
    sizes: dict[str, Any] = {"hidden_size": 4096, "heads": 32, "head_size": 128, "mlp": 14336, **HALF}
    layer = 4 * 4096 * 4096 + 3 * 4096 * 14336
    alone, with_two = (plain("x", *layers, **sizes) for layers in (["2 moe"], ["2 moe", "2 dense"]))
    extra = Roofline(BARE, with_two).head_ns(1) - Roofline(BARE, alone).head_ns(1)
    assert extra == pytest.approx(2 * layer * 2 / BARE.memory_bandwidth_gb_per_s, rel=1e-3)


def test_an_encoder_takes_no_time_while_decoding():
    timing = Roofline(A5000, model("switch-large-128"))
    assert timing.dense_ns(0, tokens=64, context=64) > 0
    assert timing.dense_ns(0, tokens=1, context=65) == 0
    assert timing.dense_ns(12, tokens=1, context=65) > 0
    assert [timing.combine_ns(1, layer, 65) > 0 for layer in (0, 11, 12)] == [False, False, True]
    assert timing.combine_ns(64, 0, 64) == timing.combine_ns(64) > 0


@pytest.mark.parametrize("name", MODELS.names())
def test_durations_are_whole_and_never_shrink_with_tokens_or_context(name):
    timing = Roofline(A5000, model(name))
    parts = timing.expert_ns, timing.combine_ns, timing.head_ns
    for n in (1, 2, 64, 4096):
        fewer, more = (
            (timing.dense_ns(1, tokens, 2 * tokens), *(part(tokens) for part in parts)) for tokens in (n, 2 * n)
        )
        assert all(type(ns) is int for ns in fewer)
        assert all(a <= b for a, b in zip(fewer, more, strict=True))


def test_copying_an_expert_takes_about_thirty_times_as_long_as_computing_it_on_a_consumer_card():
    for name in ("mixtral-8x7b", "arctic", "nllb-moe-54b"):
        profile = model(name)
        copied = host_link(A5000, profile).used_ns(profile.expert_bytes)
        assert 25 < copied / Roofline(A5000, profile).expert_ns(1) < 33
