"""A live model computes what the whole model computes, to the bit, whatever its cache holds."""

import json
import os
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from errno import EIO
from functools import partial
from pathlib import Path
from threading import Event
from time import monotonic, sleep
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import load_file, save_file

from policies.blend.profile import Profile
from policies.eamc.file import SavedEamc
from replay.commands import main
from replay.device_choice import DeviceChoice
from replay.devices.gpu import Gpu
from replay.live import opening
from replay.live.layout import ShardStore
from replay.live.memory import kv_name_in
from replay.live.model import LiveModel
from replay.live.opening import open_live
from replay.live.shards import Shard
from sim.loop.log import COLUMNS
from tests.support.command import run
from tests.support.fake_gpu import FakeGpu
from tests.support.live_models import NEW_TOKENS, logits, prompt, saved, whole_model
from tracer import demo
from tracer.commands import main as tracer_main
from traces import InputError, Trace

ARCHITECTURES = ("mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v2", "deepseek_v3", "olmoe", "gpt_oss")
GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
OTHERS = ("aria", "inkling2", "nemotron_h", "jamba", "ernie4_5_vl_moe")
"""Experts that are transposed, added up in float32, without a gate, beside other layers, or beside those of images."""


@pytest.fixture(autouse=True)
def _small(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads that wait for each other, and stores in the user's own folder, have no place in a test."""
    torch.set_num_threads(1)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache"))


def assert_equal(wanted: Sequence[torch.Tensor], live: LiveModel, ids: torch.Tensor) -> None:
    found = logits(live.model, ids, len(wanted) - 1)
    live.end_request()
    for place, (ours, theirs) in enumerate(zip(found, wanted, strict=True)):
        assert torch.equal(ours, theirs), f"logits differ at token {place}"


def opened(folder: Path, lanes: int = 1, policy: str = "lru", cache_size: str = "25%", **more: Any) -> Any:
    """A model whose experts are on the disk."""
    return open_live(str(folder), DeviceChoice("disk", lanes=lanes), policy=policy, cache_size=cache_size, **more)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_logits_equal_those_of_the_whole_model_from_one_slot_to_all(architecture: str, tmp_path: Path) -> None:
    """In 16 bits; test_load_model.py has them in 32."""
    folder = saved(tmp_path, architecture, "bfloat16")
    wanted = logits(whole_model(folder), prompt(17))
    for policy, size in (("lru", "1"), ("eamc-blend", "30%"), ("lru", "100%")):
        with opened(folder, lanes=2, policy=policy, cache_size=size) as live:
            assert isinstance(live.device.store, ShardStore)
            assert all(weight.is_meta for name, weight in live.model.named_parameters() if "experts.gate_up" in name)
            assert_equal(wanted, live, prompt(17))
            assert len(live.rows) == 1 + NEW_TOKENS
            assert sum(row.numbers[COLUMNS.index("misses")] for row in live.rows) > 0


def test_a_cache_given_in_bytes_takes_no_more_than_these(tmp_path: Path) -> None:
    """On a disk a slot is larger than an expert: what is read begins and ends at pages."""
    folder = saved(tmp_path, "olmoe")
    with opened(folder, cache_size="100kB") as live:
        assert live.memory.slots == live.run.gpu.slots * live.device.pool.shape[1] <= 100_000


def test_the_shipped_model_is_equal() -> None:
    with open_live(str(demo.MODEL), DeviceChoice("disk", lanes=2), policy="eamc-blend", cache_size="20%") as live:
        assert_equal(logits(whole_model(demo.MODEL), prompt(30, 4096)), live, prompt(30, 4096))


@pytest.mark.parametrize("architecture", ["olmoe", "gpt_oss", "qwen3_moe"])
def test_weights_are_aligned_as_in_the_whole_model(architecture: str, tmp_path: Path) -> None:
    """What libraries compute in float32 depends on it on some processors."""
    folder = saved(tmp_path, architecture, num_experts=5, moe_intermediate_size=23, hidden_size=40)
    whole = whole_model(folder)
    with opened(folder, cache_size="100%") as live:
        held = dict(live.model.named_parameters())
        for name, parameter in whole.named_parameters():
            if not held[name].is_meta:
                assert parameter.data_ptr() % 64 == held[name].data_ptr() % 64, name
        for layer in live._layers:
            module = whole.get_submodule(layer._layer.name)
            for expert in range(layer._layer.experts):
                for name, row in layer._view(expert, 0).items():
                    assert getattr(module, name)[expert].data_ptr() % 64 == row.data_ptr() % 64, (name, expert)


def test_other_routing_other_prompts_and_batches_are_equal_in_one_cache(tmp_path: Path) -> None:
    folder = saved(tmp_path, "qwen3_moe", num_experts=7, num_experts_per_tok=3, moe_intermediate_size=24)
    model = whole_model(folder)
    with opened(folder, lanes=3, policy="eamc-blend", cache_size="4") as live:
        for seed in range(3):
            ids = prompt(5 + seed, seed=seed)
            assert_equal(logits(model, ids, 8), live, ids)
        batch = torch.cat([prompt(6, seed=1), prompt(6, seed=2)])
        assert_equal(logits(model, batch, 4), live, batch)


def test_another_type_than_the_checkpoints_is_converted_once_and_equal(tmp_path: Path) -> None:
    folder = saved(tmp_path / "model", "qwen2_moe")
    reopened = partial(
        open_live,
        str(folder),
        DeviceChoice("disk", lanes=2, store=tmp_path / "experts"),
        policy="lru",
        cache_size="3",
        dtype="bfloat16",
    )
    model = whole_model(folder, "bfloat16")
    written: list[int] = []

    def told(count: int) -> Any:
        return nullcontext(lambda pieces: written.append(count))

    for _ in range(2):
        with reopened(progress=told) as live:
            assert_equal(logits(model, prompt(9), 5), live, prompt(9))
    assert len(written) == written[0] == live.run.shape.total


@pytest.mark.parametrize("dtype", ["auto", "bfloat16"])
def test_files_of_experts_that_change_meanwhile_are_refused_at_the_end(tmp_path: Path, dtype: str) -> None:
    folder, store = saved(tmp_path / "model", "qwen2_moe"), tmp_path / "experts"
    reopened = partial(
        open_live, str(folder), DeviceChoice("disk", lanes=1, store=store), policy="lru", cache_size="3", dtype=dtype
    )
    with reopened():
        assert store.exists() == (dtype != "auto")
    changed = store if store.exists() else max(folder.glob("*.safetensors"))
    with pytest.raises(InputError, match=f"{changed.name} was changed while it was read"), reopened():
        os.truncate(changed, changed.stat().st_size + 1)


def test_the_record_equals_what_the_tracer_records_and_the_simulator_plays_the_same(tmp_path: Path) -> None:
    """LRU on demand does not depend on time."""
    prompts, live_record, whole_record = tmp_path / "p.txt", tmp_path / "live", tmp_path / "whole"
    prompts.write_text("Once upon a time\nThe capital of\n")
    limits = ("--max-new-tokens", 9, "--prompts", prompts)
    run(tracer_main, "record", *limits, "--device", "cpu", "--out", whole_record, "--quiet")
    done = generate(*limits, "--record", live_record, "--policy", "lru", "--cache-size", "10%", "--lanes", 1)
    assert done.returncode == 0, done.stderr
    whole, found = (Trace.read(each, ["token_id"]) for each in (whole_record, live_record))
    there = {"weights_sha256": None}  # experts that stay on the disk are not sampled
    assert found.meta == replace(whole.meta, settings=whole.meta.settings | there)
    pd.testing.assert_frame_equal(found.requests, whole.requests)
    for column in ("experts", "offsets", "phase", "position", "step", "token_id"):
        np.testing.assert_array_equal(getattr(found, column), getattr(whole, column))
    rows = {line.split()[0]: line.split()[1:] for line in done.stderr.splitlines() if line.startswith("  misses")}
    assert rows["misses"][0] == rows["misses"][1], "measured and predicted"
    assert "TPOT mean" in done.stderr
    assert "memory: peak" in done.stderr


def generate(*arguments: object) -> Any:
    return run(main, "generate", *arguments)


def test_the_command_ends_with_the_tokens_of_the_whole_model(tmp_path: Path) -> None:
    folder = saved(tmp_path, "deepseek_v3")
    ids = [5, 6, 7, 200]
    done = generate(
        *("--model", folder, "--token-ids", ",".join(map(str, ids)), "--print-token-ids", "--max-new-tokens", 10),
        *("--policy", "eamc-blend", "--cache-size", "20%", "--lanes", 1),
    )
    assert done.returncode == 0, done.stderr
    told = whole_model(folder).generate(torch.tensor([ids]), max_new_tokens=10, do_sample=False)[0, len(ids) :]
    assert done.stdout.splitlines()[-1] == " ".join(map(str, told.tolist()))


def test_each_turn_of_a_prompt_is_answered_on_a_line_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text('{"id": "a", "prompt": ["Once", "And then"]}\n')
    asked = ("--prompts", tmp_path / "p.jsonl", "--max-new-tokens", 4, "--print-token-ids", "--quiet", "--lanes", 1)
    done = generate(*asked, "--record", tmp_path / "trace", "--policy", "lru")
    assert done.returncode == 0, done.stderr
    *texts, last = done.stdout.splitlines()
    assert len(texts) == 2
    trace = Trace.read(tmp_path / "trace", ["token_id"])
    assert trace.requests.output_tokens.tolist() == [4, 4]
    assert trace.token_id is not None
    assert last.split()[:-1] == [str(token) for token in trace.token_id[-3:]], "the last token is not fed back"


def test_the_seed_is_of_policies_that_draw_too(tmp_path: Path) -> None:
    asked = ("--model", saved(tmp_path, "mixtral"), "--token-ids", "5,6", "--max-new-tokens", 2, "--lanes", 1)
    for policy, drawn in (("random", 7), ("random:seed=3", 3)):
        assert f", random:seed={drawn}, 6 (25%)" in generate(*asked, "--policy", policy, "--seed", 7).stderr


def test_what_a_policy_has_learned_is_kept_and_starts_the_next_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, profile = saved(tmp_path / "model", "mixtral"), tmp_path / "learned.npz"
    asked = ("--model", folder, "--token-ids", "5,6,7,8", "--max-new-tokens", 8, "--lanes", 1, "--quiet")
    blended, known, counted = tmp_path / "blended.npz", [], []
    for _ in range(2):
        done = generate(*asked, "--policy", "eamc:split=false", "--profile", profile, "--print-token-ids")
        assert done.returncode == 0, done.stderr
        known.append(len(SavedEamc.read(profile).parts[0].eams))
        done = generate(*asked, "--profile", blended)
        assert done.returncode == 0, done.stderr
        counted.append(int(Profile.read(blended).learned["last"].sum()))
    assert known == [1, 2]
    monkeypatch.setattr("replay.commands.generate.answer", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    assert generate(*asked, "--profile", blended).returncode == 130
    assert Profile.read(blended).learned["last"].sum() == counted[1]
    blended.unlink()
    assert generate(*asked, "--profile", blended).returncode == 130
    assert blended.exists(), "what was learned until then"
    assert counted[1] == 2 * counted[0] > 0


def damaged(folder: Path, change: Any) -> Path:
    """Change what the first shard with experts of layer 1 holds; return that file."""
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    file: str = next(name for key, name in index["weight_map"].items() if "layers.1." in key and "experts.3" in key)
    tensors = load_file(folder / file)
    change(tensors)
    save_file(tensors, folder / file, {"format": "pt"})
    return folder / file


def test_a_missing_or_cut_shard_is_noticed_when_the_model_is_opened(tmp_path: Path) -> None:
    folder = saved(tmp_path / "cut", "mixtral")
    file = damaged(folder, lambda tensors: None)
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(InputError, match="cut off"), opened(folder):
        pass
    file.unlink()
    with pytest.raises(FileNotFoundError, match=file.name), opened(folder):
        pass


def test_a_nan_in_an_expert_fails_that_request_and_the_next_one_works(tmp_path: Path) -> None:
    folder = saved(tmp_path, "mixtral")

    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        for name in tensors:
            if "layers.1." in name and "experts.3." in name:
                tensors[name][:] = torch.nan

    model = whole_model(folder)
    damaged(folder, spoil)
    with opened(folder, cache_size="4") as live:
        with pytest.raises(InputError, match="checkpoint is damaged"):
            logits(live.model, prompt(30))
        ids = next(ids for ids in (prompt(1, seed=seed) for seed in range(99)) if not _uses(model, ids, 1, 3))
        found = live.model(input_ids=ids).logits
        live.end_request()
        assert torch.equal(found, model(input_ids=ids).logits)


def _uses(model: Any, ids: torch.Tensor, layer: int, expert: int) -> bool:
    """Whether an expert of a layer is chosen for these tokens."""
    seen: list[torch.Tensor] = []
    handle = model.model.layers[layer].mlp.experts.register_forward_pre_hook(lambda _, args: seen.append(args[1]))
    with torch.no_grad():
        model(input_ids=ids)
    handle.remove()
    return bool((seen[0] == expert).any())


@pytest.mark.parametrize("lanes", [1, 3])
@pytest.mark.parametrize("architecture", ["olmoe", "gpt_oss"])
def test_rows_of_two_bytes_a_number_are_read_straight_into_their_slots(
    architecture: str, lanes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They lie anywhere within a page. Gate and up of an expert lie together, as names sort, unless files end there."""
    folder = saved(tmp_path, architecture, "bfloat16", "1GB")
    wanted = logits(whole_model(folder), prompt(17), 6)
    with opened(folder, lanes=lanes, policy="eamc-blend", cache_size="5") as live:

        def copies(*_: object) -> None:
            raise AssertionError("an expert was copied")

        monkeypatch.setattr(Shard, "read", copies)
        assert len({places for expert in range(live.run.shape.total) for places in [_store(live).places(expert)]}) > 1
        assert_equal(wanted, live, prompt(17))


def _store(live: LiveModel) -> ShardStore:
    assert isinstance(live.device.store, ShardStore)
    return live.device.store


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_read_that_fails_in_mid_token_fails_that_pass_and_the_next_one_works(
    dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = saved(tmp_path, "qwen3_moe", dtype)
    wanted = logits(whole_model(folder), prompt(9), 6)
    read, broken = os.preadv, [False]

    def fails(file: int, blocks: Any, offset: int) -> int:
        if broken[0]:
            raise OSError(EIO, "Input/output error")
        return read(file, blocks, offset)

    monkeypatch.setattr(os, "preadv", fails)
    for policy in ("lru", "eamc-blend"):
        with opened(folder, lanes=2, policy=policy, cache_size="4") as live:
            for _ in range(3):
                assert_equal(wanted, live, prompt(9))
                live.model(input_ids=prompt(9))
                broken[0] = True
                with pytest.raises(InputError, match="Input/output error"):
                    logits(live.model, prompt(12))
                broken[0] = False
                assert_equal(wanted, live, prompt(9))


def test_a_prefetch_that_fails_between_two_passes_is_reported_and_the_next_pass_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = saved(tmp_path, "qwen3_moe")
    wanted = logits(whole_model(folder), prompt(9), 6)
    read, broken, notes = os.preadv, Event(), list[str]()

    def fails(file: int, blocks: Any, offset: int) -> int:
        sleep(0.002)  # so that prefetches are still under way behind the last layer
        if broken.is_set():
            raise OSError(EIO, "Input/output error")
        return read(file, blocks, offset)

    monkeypatch.setattr(os, "preadv", fails)
    with opened(folder, lanes=2, policy="lru+all", cache_size="12", on_note=notes.append) as live:
        for seed in range(50):
            name = kv_name_in(live.model)
            cache = live.model(input_ids=prompt(9, seed=seed))[name]
            hook = live.model.model.norm.register_forward_hook(lambda *_: broken.set())  # behind the last layer
            live.model(input_ids=prompt(1, seed=seed), **{name: cache})
            hook.remove()
            until = monotonic() + 0.05
            while not live.loop._failure and monotonic() < until:
                sleep(0.001)
            broken.clear()
            if live.loop._failure:
                break
        assert not notes
        assert_equal(wanted, live, prompt(9))
    assert len(notes) == 1
    assert "a transfer between two passes failed" in notes[0]
    assert "Input/output error" in notes[0]


def test_a_pass_that_is_left_in_the_middle_does_not_harm_the_next_one(tmp_path: Path) -> None:
    folder = saved(tmp_path, "olmoe")
    wanted = logits(whole_model(folder), prompt(9), 6)
    notes: list[str] = []
    reopened = partial(opened, folder, lanes=2, policy="eamc-blend", cache_size="4")
    with reopened(on_note=notes.append) as live:
        norm = live.model.model.layers[1].post_attention_layernorm

        def leave(*_: Any) -> None:
            live.loop._failure = IndexError("as a lane raises that finds half a state")
            raise KeyboardInterrupt

        for _ in range(2):
            handle = norm.register_forward_hook(leave)
            with pytest.raises(KeyboardInterrupt):
                live.model(input_ids=prompt(9))
            handle.remove()
            assert_equal(wanted, live, prompt(9))
    assert not notes


@pytest.mark.parametrize("is_real", [False, pytest.param(True, marks=GPU)], ids=["simulated", "real"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("architecture", ["olmoe", "gpt_oss", "deepseek_v3"])
def test_from_host_memory_to_a_gpu_logits_are_equal(
    architecture: str, dtype: str, is_real: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies of one that is simulated are late, and made in any order that its streams allow."""
    gpus = [Gpu() if is_real else FakeGpu(seed) for seed in range(3)]
    ids = prompt(17).to(gpus[0].device)
    monkeypatch.setattr(opening, "require_cuda", lambda instead: None)
    monkeypatch.setattr(opening, "Gpu", lambda: gpus.pop())
    folder = saved(tmp_path, architecture, dtype)
    model = whole_model(folder)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(ids.device, copy=True)  # not where the file is mapped
    wanted = logits(model.to(ids.device), ids)
    read: list[int] = []
    for policy, size in (("lru", "1"), ("eamc-blend", "30%"), ("lru", "100%")):
        reopened = partial(open_live, str(folder), DeviceChoice("cuda"), policy=policy, cache_size=size)
        with reopened(progress=lambda count: nullcontext(lambda pieces: read.append(pieces))) as live:
            assert live.device.name == "cuda"
            assert_equal(wanted, live, ids)
            assert sum(read) == live.run.shape.total
            read.clear()
            assert sum(row.numbers[COLUMNS.index("misses")] for row in live.rows) > 0


@GPU
def test_the_shipped_model_is_equal_on_a_gpu() -> None:
    ids = prompt(30, 4096).cuda()
    wanted = logits(whole_model(demo.MODEL).cuda(), ids, 100)
    for policy, size in (("eamc-blend", "20%"), ("lru", "100%")):
        with open_live(str(demo.MODEL), DeviceChoice("cuda"), policy=policy, cache_size=size) as live:
            for _ in range(2):
                assert_equal(wanted, live, ids)


def test_a_read_that_never_ends_is_told_and_closing_does_not_wait_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, read, halted, ended = saved(tmp_path, "olmoe"), os.preadv, Event(), Event()

    def halts(file: int, blocks: Any, offset: int) -> int:
        if halted.is_set():
            ended.wait(60)
        return read(file, blocks, offset)

    monkeypatch.setattr(os, "preadv", halts)
    try:
        with opened(folder, cache_size="4") as live:
            monkeypatch.setattr(live.device, "watchdog_s", 0.1)
            halted.set()
            for _ in range(2):
                with pytest.raises(InputError, match="stuck"):
                    logits(live.model, prompt(9))
    finally:
        ended.set()


@pytest.mark.parametrize("where", ["observe", "begin_request"])
def test_a_policy_that_fails_fails_that_pass_and_the_next_one_works(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = saved(tmp_path, "olmoe")
    wanted = logits(whole_model(folder), prompt(9), 6)
    with opened(folder, lanes=2, policy="eamc-blend", cache_size="4") as live:
        assert_equal(wanted, live, prompt(9))

        def fails(*_: object) -> None:
            raise InputError("this policy fails")

        monkeypatch.setattr(live.loop.decider, where, fails)
        with pytest.raises(InputError, match="this policy fails"):
            assert_equal(wanted, live, prompt(9))
        assert_equal(wanted, live, prompt(9))


def test_a_router_that_names_an_expert_twice_is_followed(tmp_path: Path) -> None:
    folder = saved(tmp_path, "olmoe")
    model = whole_model(folder)

    def twice(_: Any, __: Any, chosen: Any) -> Any:
        logits, weights, index = chosen
        return logits, weights, index[:, :1].expand_as(index)

    with opened(folder, cache_size="2") as live:
        for each in (model, live.model):
            for layer in each.model.layers:
                layer.mlp.gate.register_forward_hook(twice)
        assert_equal(logits(model, prompt(9), 6), live, prompt(9))
