from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from replay.model.dense import GroupedQueryAttention, LatentAttention
from replay.model.network import BUCKET, Network, Operands, expert_output
from tests.support.profiles import plain
from traces.models import profile as model_profile
from traces.models.profile import ModelProfile

CPU, CUDA, META = torch.device("cpu"), torch.device("cuda"), torch.device("meta")
GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")

PLAIN = plain()
GROUPED = plain("grouped", kv_heads=2)
WINDOWED = plain("windowed", "1 moe-window", "1 moe", window=100, kv_heads=2)
LATENT = plain("latent", kv_latent_size=16, rope_head_size=8, shared=20)
LATENT_QUERIES = plain("latent-queries", kv_latent_size=16, rope_head_size=8, query_latent_size=20, shared=20)
MIXED = plain("mixed", "2 dense", "1 moe", "1 dense", "1 moe", "2 dense", mlp=40, kv_heads=2)
HALVES = ("1 dense", "1 moe", "1 dense", "1 moe", "1 dense-cross", "1 moe-cross", "1 dense-cross", "1 moe-cross")
ENCODER = plain("encoder", *HALVES, encoder_layers=4, expert_matrices=2, mlp=40)
DECODERS = (PLAIN, GROUPED, WINDOWED, LATENT, LATENT_QUERIES, MIXED)
ALL = (*DECODERS, ENCODER)


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


def made(profile: ModelProfile, device: torch.device = CPU, most: int = 300, dense: str = "real") -> Network:
    return Network(profile, device, max_tokens=most, max_context=most, seed=1, dense=dense)


def through(network: Network, tokens: int, context: int, ids: torch.Tensor | None = None) -> list[torch.Tensor]:
    """A step without routed experts; what these would have got, by MoE layer."""
    seen = []
    if ids is not None and network._stack:
        network._stack.token[: len(ids)] = ids
    for layer in range(network.profile.moe_layers):
        network.dense(layer, tokens, context)
        seen.append(network.hidden[:tokens].clone())
        network.combine(tokens)
    network.head(tokens)
    return seen


def shipped() -> list[ModelProfile]:
    """All profiles, those of fewer bytes in bfloat16: so matrices are computed in."""
    known = model_profile.shipped()
    return [
        profile.at(max(2.0, profile.expert_bytes_per_parameter), max(2.0, profile.dense_bytes_per_parameter))
        for profile in known
    ]


def shallow() -> list[ModelProfile]:
    """As shipped, but with four MoE layers, among which each kind is. Encoders stay whole."""
    return [each if each.encoder_layers else each.cut(4) for each in shipped()]


@pytest.mark.parametrize("profile", [*shipped(), *ALL], ids=lambda profile: profile.name)
def test_as_many_parameters_are_held_as_the_profile_counts(profile: ModelProfile) -> None:
    network = made(profile, META)
    assert network._source.parameters * profile.dense_bytes_per_parameter == pytest.approx(
        profile.dense_bytes, rel=0.01 if profile.hidden_size > 100 else 0.05
    )


@pytest.mark.parametrize("profile", [*shipped(), *ALL], ids=lambda profile: profile.name)
def test_the_kv_cache_holds_what_the_profile_says_for_each_layer_and_position(profile: ModelProfile) -> None:
    """An encoder's layers keep none, its decoder's two."""
    network = made(profile, META, most=300)
    cache = network.nbytes - network._source.parameters * profile.dense_bytes_per_parameter
    decoder = profile.order[profile.encoder_layers :]
    rows = sum(kind.kv or kind.windowed for kind in decoder) * (1 + (profile.encoder_layers > 0))
    states = sum(kind.state for kind in decoder)
    assert cache == rows * 2 * BUCKET * profile.kv_bytes_per_value + states


@pytest.mark.parametrize("profile", shallow(), ids=lambda profile: profile.name)
def test_a_decoded_token_is_multiplied_once_with_every_weight_but_the_embedding(profile: ModelProfile) -> None:
    """And with its context, 256 positions of it, as the roofline counts; a latent's pairs are wider, absorbed."""

    def in_place(_: object, left: list[int], right: list[int], **__: object) -> int:
        return 2 * left[0] * left[1] * right[1]

    network, context = made(profile, META), BUCKET
    if profile.encoder_moe_layers:
        context = 1  # a prefill, so that the encoder runs as well
    with FlopCounterMode(display=False, custom_mapping={torch.ops.aten.addmm_: in_place}) as counter:
        through(network, 1, context)
    wide = (
        2 * profile.kv_latent_size + profile.rope_head_size
        if profile.kv_latent_size and context > 1
        else 2 * profile.head_size + profile.rope_head_size
    )
    assert network._stack
    layers = [layer for stretch in network._stack.stretches for layer in stretch]
    seen = sum(
        kind.attended(context)
        for kind, layer in zip(profile.order, layers, strict=True)
        if isinstance(layer.attention, GroupedQueryAttention | LatentAttention) and (kind.kv or kind.windowed)
    )
    pairs = 2 * profile.heads * wide * seen
    once = 2 * (
        network._source.parameters - (profile.vocabulary * profile.hidden_size if profile.embedding_parameters else 0)
    )
    assert counter.get_total_flops() == pytest.approx(once + pairs, rel=0.002)


ODD = (
    *("deepseek-v4-flash", "gemma-4-26b-a4b", "jamba-v0.1", "kimi-linear-48b-a3b", "lfm2-8b-a1b", "mimo-v2-flash"),
    *("nemotron-3-nano-30b-a3b", "qwen3-next-80b-a3b", "step-3.5-flash"),
)
"""Shipped models whose layers are of other kinds than those of ALL."""


@pytest.mark.parametrize(
    "profile", [*(each for each in shallow() if each.name in ODD), *ALL], ids=lambda profile: profile.name
)
def test_no_step_asks_the_device_for_a_value(profile: ModelProfile) -> None:
    """On the meta device there is none to be had."""
    network = made(profile, META)
    buffer = torch.empty(profile.expert_bytes, dtype=torch.uint8, device=META)
    for tokens, context in (1, 1), (1, 290), (7, 7), (7, 290), (290, 290):
        through(network, tokens, context)
        network.expert(network.weights(buffer), tokens)
    with pytest.raises((RuntimeError, NotImplementedError)):
        network.finite()


@pytest.mark.parametrize("device", [CPU, pytest.param(CUDA, marks=GPU)], ids=str)
@pytest.mark.parametrize(("parameter_bytes", "tolerance"), [(4.0, 1e-5), (2.0, 5e-2)], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("profile", DECODERS, ids=lambda profile: profile.name)
def test_a_decoded_token_is_the_last_one_of_the_prefill_that_it_ends(
    profile: ModelProfile, parameter_bytes: float, tolerance: float, device: torch.device
) -> None:
    """Cache, absorbed latents and windows in decoding against none of them in the prefill; bfloat16 has 8 bits."""
    profile = replace(profile, dense_bytes_per_parameter=parameter_bytes)
    ids = torch.randint(profile.vocabulary, (BUCKET,), generator=torch.Generator().manual_seed(3))
    whole = through(made(profile, device), BUCKET, BUCKET, ids)
    network = made(profile, device)
    through(network, BUCKET - 1, BUCKET - 1, ids[:-1])
    decoded = through(network, 1, BUCKET, ids[-1:])
    for expected, got in zip(whole, decoded, strict=True):
        assert (got[0] - expected[-1]).norm() < tolerance * expected[-1].norm()


@GPU
@pytest.mark.parametrize("parameter_bytes", [4.0, 2.0], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("profile", ALL, ids=lambda profile: profile.name)
def test_a_cuda_graph_computes_what_its_kernels_do_one_by_one(profile: ModelProfile, parameter_bytes: float) -> None:
    network = made(replace(profile, dense_bytes_per_parameter=parameter_bytes), CUDA)

    def step() -> None:
        for layer in range(profile.moe_layers):
            network.dense(layer, 1, 200)
            network.combine(1)

    step()
    expected = network.hidden.clone()
    with torch.cuda.stream(torch.cuda.Stream()):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    network.hidden.zero_()
    graph.replay()
    torch.cuda.synchronize()
    torch.testing.assert_close(network.hidden[0], expected[0], rtol=1e-2, atol=1e-2)
    assert network.hidden[0].abs().max() > 0.1


@pytest.mark.parametrize("profile", [PLAIN, GROUPED, LATENT, WINDOWED], ids=lambda profile: profile.name)
def test_the_last_token_of_a_chunk_sees_the_whole_context(profile: ModelProfile) -> None:
    """In one layer; the others of the chunk see it as well, so that deeper layers differ. A window widens likewise."""
    kinds = {name: replace(kind, window=3 * kind.window) for name, kind in profile.kinds.items()}
    profile = replace(profile.cut(1), kinds=kinds)
    ids = torch.randint(profile.vocabulary, (BUCKET,), generator=torch.Generator().manual_seed(4))
    whole = through(made(profile), BUCKET, BUCKET, ids)
    network = made(profile)
    through(network, 200, 200, ids[:200])
    chunk = through(network, 56, BUCKET, ids[200:])
    torch.testing.assert_close(chunk[0][-1], whole[0][-1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("profile", ALL, ids=lambda profile: profile.name)
def test_only_an_encoder_looks_ahead(profile: ModelProfile) -> None:
    ids = torch.arange(20) % profile.vocabulary
    changed = ids.clone()
    changed[-1] += 1
    before, after = through(made(profile), 20, 20, ids), through(made(profile), 20, 20, changed)
    looks_ahead = [not torch.allclose(old[0], new[0]) for old, new in zip(before, after, strict=True)]
    assert looks_ahead == [profile.encoder_moe_layers > 0] * profile.moe_layers
    assert not any(torch.allclose(old[-1], new[-1]) for old, new in zip(before, after, strict=True))


def test_in_decoding_an_encoder_does_nothing_and_its_states_are_remembered() -> None:
    ids, same = torch.arange(20), torch.tensor([5])
    networks = made(ENCODER), made(ENCODER)
    through(networks[0], 20, 20, ids)
    through(networks[1], 20, 20, ids + 30)
    first, second = (through(network, 1, 21, same) for network in networks)
    for network, seen in zip(networks, (first, second), strict=True):
        assert torch.equal(seen[0], seen[1]), "nothing new"
        assert not torch.equal(seen[2], seen[1])
        assert network.bucket(1, 21) == BUCKET
    assert not torch.allclose(first[2], second[2])
    assert not torch.allclose(through(networks[0], 1, 21, same + 1)[2], first[2]), "the decoder reads its own token"


def test_layers_of_its_kind_have_the_sliding_window() -> None:
    ids = torch.arange(150) % WINDOWED.vocabulary
    changed = ids.clone()
    changed[5] += 50
    before, after = through(made(WINDOWED), 150, 150, ids), through(made(WINDOWED), 150, 150, changed)
    differs = [(old != new).any(dim=1).nonzero()[:, 0].tolist() for old, new in zip(before, after, strict=True)]
    assert (min(differs[0]), max(differs[0])) == (5, 104)
    assert (min(differs[1]), max(differs[1])) == (5, 149)


@pytest.mark.parametrize("profile", ALL, ids=lambda profile: profile.name)
@pytest.mark.parametrize("dense", ["real", "none"])
def test_activations_stay_finite_and_of_one_size_through_many_steps(profile: ModelProfile, dense: str) -> None:
    network = made(
        replace(profile, dense_bytes_per_parameter=2.0, expert_bytes_per_parameter=2.0), most=40, dense=dense
    )
    count = profile.expert_parameters
    buffer = torch.empty(count, dtype=torch.bfloat16).normal_(std=0.02, generator=torch.Generator().manual_seed(1))
    weights = network.weights(buffer.view(torch.uint8))
    for step in range(30):
        tokens, context = (40, 40) if step == 0 else (1 + step % 3, 40)
        for layer in range(profile.moe_layers):
            network.dense(layer, tokens, context)
            for _ in range(profile.top_k):
                network.expert(weights, tokens)
            network.combine(tokens)
        network.head(tokens)
        assert 0.5 < network.hidden[:tokens].float().square().mean() < 2
    assert network.finite()
    network.hidden[0, 0] = torch.nan
    assert not network.finite()


def test_a_step_works_in_buffers_that_never_move() -> None:
    network = made(GROUPED, most=8)
    hidden, out = network.hidden[0], network.experts_out[0]
    before = hidden.clone()
    network.dense(0, 1, 5)
    assert torch.equal(hidden, network.hidden[0])
    assert not torch.equal(hidden, before)
    out += 1.0
    network.combine(1)
    assert (network.experts_out == 0).all()


def test_experts_join_the_stream_in_equal_shares() -> None:
    network = made(GROUPED, most=3)
    network.dense(0, 3, 3)
    stream = network._residual.clone()
    tokens, total = network.hidden.clone(), torch.zeros(3, 32, dtype=torch.float64)
    generator = torch.Generator().manual_seed(2)
    for _ in range(2):
        flat = torch.randn(GROUPED.expert_parameters, generator=generator) * 0.1
        weights = network.weights(flat.view(torch.uint8))
        network.expert(weights, 3)
        total += expert_output((weights[0].double(), weights[1].double()), tokens.double(), 3) / 2
    assert network.router_weight == 1 / 2
    network.combine(3)
    torch.testing.assert_close(network._residual.double(), stream.double() + total, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [2.0, 4.0])
def test_experts_are_added_up_in_float32(dtype: float) -> None:
    network = made(replace(PLAIN, dense_bytes_per_parameter=dtype), most=2)
    assert network.experts_out.dtype is torch.float32
    assert network.hidden.dtype is (torch.bfloat16 if dtype == 2.0 else torch.float32)


def test_a_context_is_rounded_up_to_a_bucket_and_a_prefill_is_not() -> None:
    network = made(PLAIN, most=300)
    assert [network.bucket(1, context) for context in (1, 2, 256, 257, 300, 999)] == [256, 256, 256, 512, 512, 512]
    assert [network.bucket(n, n) for n in (2, 7, 300)] == [2, 7, 300]
    for tokens, context in ((1, 1), (1, 9), (9, 9), (9, 10), (300, 301)):
        bucket = network.bucket(tokens, context)
        assert network.bucket(tokens, bucket) == bucket


def test_without_the_dense_part_there_are_no_weights_and_no_cache() -> None:
    network = made(LATENT, dense="none")
    assert network.nbytes == network._source.parameters == 0
    assert made(LATENT).nbytes > 0
    through(network, 1, 200)
    assert network.finite()


@pytest.mark.parametrize("device", [CPU, pytest.param(CUDA, marks=GPU)], ids=str)
def test_matrices_of_a_packed_experts_shape_lie_ready_and_are_taken_in_turn(device: torch.device) -> None:
    """Whatever the slot, so that none is taken again while caches hold it; the bytes in the slots are not touched."""
    network = made(replace(PLAIN, expert_bytes_per_parameter=0.53125, dense_bytes_per_parameter=0.5), device)
    pool = torch.full((3, network.profile.expert_bytes), 255, dtype=torch.uint8, device=device)  # NaN as numbers
    operands = Operands(network, pool)
    count = PLAIN.moe_layers * PLAIN.experts
    addresses = [operands[turn % 3][0].data_ptr() for turn in range(2 * count)]
    assert len(set(addresses)) == count
    assert addresses[:count] == addresses[count:]
    assert operands.rows([1, 1, 2]) == [0, 1, 2]
    assert [tuple(part.shape) for part in operands[0]] == [(48, 32), (32, 24)]
    network.expert(operands[0], 2)
    assert network.finite()
    assert network.experts_out.any()
    assert network.expert_dtype == network.hidden.dtype == torch.bfloat16
    unpacked = made(replace(PLAIN, dense_bytes_per_parameter=2.0, expert_bytes_per_parameter=2.0), META)
    assert network.nbytes == unpacked.nbytes + count * 2 * PLAIN.expert_parameters
