"""The disk device: the bytes of a real file, read past the page cache where the file system can, or a clear line."""

import errno
import html
import os
import re
import shlex
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file

from benchmarks.checks.limits import read_through
from policies.core.policy import Shape
from policies.core.spec import parse
from replay.commands import main
from replay.device_choice import DeviceChoice
from replay.devices.cpu import CpuDevice
from replay.devices.expert_file import ExpertFile, write
from replay.devices.lanes import PAGE, knee, page_up, parts, rates
from replay.devices.stage import open_stage
from replay.devices.store import HostStore, Stamps, anonymous
from replay.model.network import Network
from sim.commands import main as report
from sim.loop.requests import Requests
from tests.support.command import Run, run
from tests.support.devices import Watch, run_of
from tests.support.driven import play
from tests.support.tiny import PROFILE, SIZE, E, K, L
from tests.support.watched import WatchedCpu, watched
from traces import InputError
from traces.models.profile import MODELS, ModelProfile
from traces.synthetic import synthetic

BIG = replace(PROFILE, name="big", hidden_size=64, expert_intermediate_size=429, expert_bytes_per_parameter=0.53125)
"""Its experts are packed, and of eleven pages, the last one not full."""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`tiny`, `big`, and `shared`, which holds five of the tiny model's experts."""
    folder = tmp_path_factory.mktemp("files")
    for name, profile, distinct in (("tiny", PROFILE, L * E), ("big", BIG, L * E), ("shared", PROFILE, 5)):
        made(folder / name, profile, distinct)
    return folder


@pytest.fixture(scope="module")
def stand_in(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The file of a profile with a shape for the shipped trace, and packed experts of 25.5 pages."""
    shipped = MODELS.find("demo-stand-in").read_text()
    sizes: dict[str, float] = {"hidden_size": 256, "expert_intermediate_size": 256, "vocabulary": 1024}
    sizes["expert_bytes_per_parameter"] = 0.53125
    small, replaced = re.subn(rf"(?m)^({'|'.join(sizes)}) = .*", lambda row: f"{row[1]} = {sizes[row[1]]}", shipped)
    assert replaced == len(sizes)
    path = tmp_path_factory.mktemp("profile") / "stand-in.toml"
    path.write_text(small)
    return str(path)


def made(path: Path, profile: ModelProfile = PROFILE, distinct: int = L * E) -> Path:
    write(path, profile, Stamps(distinct, profile.expert_bytes, seed=0).write, "random weights, seed 0", distinct)
    return path


@contextmanager
def device(path: Path, slots: int, profile: ModelProfile = PROFILE, lanes: int = 1) -> Iterator[WatchedCpu]:
    network = Network(profile, torch.device("cpu"), max_tokens=16, max_context=16, seed=0)
    with closing(ExpertFile(path, profile)) as store:
        watch = Watch(Shape(L, E), slots, profile.expert_bytes, profile.expert_bytes // 8)
        with watched(WatchedCpu(store, network, slots, verify=True, lanes=lanes), watch) as opened:
            yield opened


@pytest.mark.parametrize("policy", ["lru", "eamc", "lru+popular:n=4", "belady+oracle1"])
@pytest.mark.parametrize(("slots", "lanes"), [(1, 1), (2, 3), (9, 2), (L * E, 4)])
@pytest.mark.parametrize("name", ["tiny", "big", "shared"])
def test_every_slot_holds_its_expert_whenever_it_computes(
    files: Path, policy: str, slots: int, lanes: int, name: str
) -> None:
    """Compared with its checksum before and after each compute, whatever the lanes cut and the policy discards."""
    profile = BIG if name == "big" else PROFILE
    requests, chunk = Requests(synthetic(3, 8, layers=L, experts=E, top_k=K, seed=1, prompt_tokens=3)), 5_000
    with device(files / name, slots, profile, lanes) as opened:
        plan = run_of(requests, Shape(L, E), slots, parse(policy), profile.expert_bytes, chunk, slots == 9)
        log = play(plan, opened)
        assert opened.watch.computed == (log.hits + log.late + log.misses).sum()


def test_the_file_is_read_by_safetensors_and_holds_what_host_memory_would(files: Path) -> None:
    store = HostStore.of(L * E, BIG.expert_bytes, seed=0)
    with safe_open(files / "big", framework="np") as opened, closing(ExpertFile(files / "big", BIG)) as own:
        assert opened.metadata()["model"] == "big"
        assert len(opened.keys()) == L * E
        slot = anonymous(own.stride)
        for expert in range(L * E):
            told = opened.get_tensor(f"expert.{expert}")
            own.read(expert, 0, BIG.expert_bytes, slot)
            np.testing.assert_array_equal(told[: BIG.expert_bytes], store[expert])
            np.testing.assert_array_equal(slot, told)
            assert own.holds(expert, slot[: BIG.expert_bytes])
            assert not own.holds((expert + 1) % (L * E), slot[: BIG.expert_bytes])


def test_experts_share_what_the_file_holds(files: Path) -> None:
    with closing(ExpertFile(files / "shared", PROFILE)) as store:
        first, second = anonymous(store.stride), anonymous(store.stride)
        store.read(2, 0, SIZE, first)
        store.read(12, 0, SIZE, second)
        np.testing.assert_array_equal(first, second)


@given(st.integers(1, 10**6), st.integers(0, 10**6), st.integers(1, 9))
def test_lanes_read_a_piece_whole_and_nothing_twice(size: int, begin: int, lanes: int) -> None:
    begin = min(begin, size)
    cut = parts(begin, size, lanes)
    assert (cut[0][0], cut[-1][1]) == (begin, size)
    assert all(before[1] == after[0] for before, after in pairwise(cut))
    assert all(first <= last for first, last in cut)
    pages = [page for first, last in cut for page in range(page_up(first) // PAGE, page_up(last) // PAGE)]
    assert pages == list(range(page_up(begin) // PAGE, page_up(size) // PAGE))


def test_lanes_are_as_many_as_make_the_disk_fast(files: Path) -> None:
    assert knee({1: 1.0, 2: 1.9, 4: 2.0, 8: 1.99}) == 2
    assert knee({1: 1.0, 2: 0.9}) == 1
    with closing(ExpertFile(files / "big", BIG)) as store:
        found = rates(store, (1, 2))
    assert set(found) == {1, 2}
    assert min(found.values()) > 0


def test_reads_that_end_early_go_on_where_they_ended(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, sizes = os.preadv, []

    def short(file: int, buffers: list[memoryview], at: int) -> int:
        sizes.append(len(buffers[0]))
        return real(file, [buffers[0][: max(PAGE, len(buffers[0]) // 2 // PAGE * PAGE)]], at)

    monkeypatch.setattr(os, "preadv", short)
    with closing(ExpertFile(files / "big", BIG)) as store:
        slot = anonymous(store.stride)
        store.read(3, 0, BIG.expert_bytes, slot)
        assert store.holds(3, slot[: BIG.expert_bytes])
    assert len(sizes) > 2


def test_a_file_is_read_through_to_its_last_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, read, preadv = tmp_path / "file", bytearray(), os.preadv
    path.write_bytes(content := bytes(range(251)) * 100)

    def some(file: int, buffers: list[memoryview], at: int) -> int:
        got = preadv(file, [buffers[0][: 2 * PAGE]], at)
        assert at == len(read)
        read.extend(buffers[0][:got])
        return got

    monkeypatch.setattr(os, "preadv", some)
    read_through(path)
    assert read == content


def test_an_error_of_the_disk_ends_the_run_in_one_line(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, left = os.preadv, [20]

    def failing(file: int, buffers: list[memoryview], at: int) -> int:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(file, buffers, at)

    requests = Requests(synthetic(1, 20, layers=L, experts=E, top_k=K, seed=1))
    monkeypatch.setattr(os, "preadv", failing)
    with (
        pytest.raises(InputError, match="cannot be read: Input/output error"),
        device(files / "tiny", 4, lanes=2) as opened,
    ):
        play(run_of(requests, Shape(L, E), 4, parse("lru"), SIZE), opened)


def test_a_file_that_shrinks_is_told_and_one_that_is_replaced_is_read_as_it_was(tmp_path: Path) -> None:
    path = made(tmp_path / "file", BIG)
    with closing(ExpertFile(path, BIG)) as store:
        slot = anonymous(store.stride)
        made(tmp_path / "other", BIG).replace(path)
        store.read(0, 0, BIG.expert_bytes, slot)
        assert store.holds(0, slot[: BIG.expert_bytes])
    with closing(ExpertFile(path, BIG)) as store:
        store.require_unchanged()
        os.truncate(path, path.stat().st_size - 3 * PAGE)
        with pytest.raises(InputError, match="is cut off at byte"):
            store.read(L * E - 1, 0, BIG.expert_bytes, slot)
        with pytest.raises(InputError, match="was changed while it was read"):
            store.require_unchanged()


def test_bytes_that_changed_since_are_noticed_before_they_are_computed(tmp_path: Path) -> None:
    path = made(tmp_path / "file")
    with path.open("r+b") as file:
        file.seek(-PAGE * 2 * L * E // 3, os.SEEK_END)
        file.write(b"damaged" * 5_000)
    requests = Requests(synthetic(2, 20, layers=L, experts=E, top_k=K, seed=1))
    with pytest.raises(InputError, match="holds other bytes"), device(path, 4) as opened:
        play(run_of(requests, Shape(L, E), 4, parse("lru"), SIZE), opened)


def test_a_full_disk_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(InputError, match="No space left on device"):
        made(tmp_path / "file")
    assert list(tmp_path.iterdir()) == []


def test_files_that_are_none_or_of_another_model_are_refused(tmp_path: Path, files: Path) -> None:
    (tmp_path / "text").write_text("hello, this is no file of experts")
    save_file({"a": torch.zeros(2)}, tmp_path / "weights")
    (tmp_path / "cut").write_bytes((files / "tiny").read_bytes()[:-1])
    wrong = [(tmp_path / name, PROFILE) for name in ("text", "weights", "cut", "nowhere")]
    wrong += [(files / "tiny", BIG), (files / "tiny", replace(PROFILE, name="other"))]
    for path, profile in wrong:
        with pytest.raises(InputError, match=str(path)):
            ExpertFile(path, profile)


def test_a_stage_reads_the_file_and_takes_no_host_memory_for_experts(files: Path) -> None:
    target = DeviceChoice("disk", store=files / "tiny", lanes=2, threads=1)
    with open_stage(target, PROFILE, 2, 4) as stage, stage.device(3, [1], verify=True) as opened:
        assert stage.facts["lanes"] == 2
        assert stage.facts["torch_threads"] == 1
        assert isinstance(opened, CpuDevice)
        assert opened.pool.shape == (3, page_up(SIZE))
        assert opened.pool.ctypes.data % PAGE == 0


@pytest.fixture(scope="module")
def on_disk(stand_in: str) -> tuple[str, ...]:
    """The options of a run on a file of the stand-in's experts, made by the command."""
    store = str(Path(stand_in).with_name("here.experts"))
    done = run(main, "store", store, "--model-profile", stand_in, "--dedup", 8)
    assert done.returncode == 0, done.stderr
    return "--device", "disk", "--store", store, "--model-profile", stand_in


def test_the_commands_write_a_file_and_replay_from_it(command: Run, on_disk: tuple[str, ...]) -> None:
    status, _, told = command("store", *on_disk[3:])
    assert (status, "exists: replace it with --overwrite" in told) == (2, True)
    few = ["--lanes", "1", "--verify", "--cache-size", "10%", "--requests", "1"]
    status, out, told = command(*on_disk, *few, "--policy", "lru", "--out", "here")
    assert status == 0, told
    assert re.match(r"Measured .* predicted .* range\.", out)
    assert "experts travel packed, 104 kB each; what is computed is bfloat16" in out
    page = run(report, "report", "here", "--out", "page.html").returncode, Path("page.html").read_text()
    written, replayed = (
        line for line in html.unescape(page[1]).splitlines() if "moe-replay" in line and "--over" in line
    )
    for line in (written, replayed):  # as the report prints them
        typed = shlex.split(line.split("moe-replay", 1)[1].split("<")[0])
        again = command(*typed)
        assert again.returncode == 0, again.stderr
    row = pd.read_parquet("here/results.parquet").iloc[0]
    assert row["expert_bytes"] == 3 * 256 * 256 * 17 / 32
    assert row["bytes_demand"] == row["misses"] * row["expert_bytes"] > 0
    assert row["computed_in"] == "bfloat16"
