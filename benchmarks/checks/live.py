"""What live generation reaches: a checkpoint of random weights gets half as much memory as its file has bytes.

Beside it: the simulator's prediction, a replay of the trace that it recorded, in turns with it, and with as much memory
llama.cpp, which maps a file of the same weights and decodes the same tokens, and accelerate's offload. On a GPU no
memory is limited: experts are in the host's, those of accelerate too, and llama.cpp is left out.
Tokens are drawn at temperature 1, since random weights repeat the likeliest one for ever.
Then the shipped model with all its experts cached, beside transformers alone. The file is written after each part.
"""

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path
from shutil import disk_usage
from statistics import fmean, median_low
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch

from benchmarks.checks.limits import page_cache_of
from benchmarks.checks.peers import (
    FAMILIES,
    accelerate_offload,
    build,
    decode_ms,
    llama_mmap,
    read_ahead_of,
    write_gguf,
)
from policies.core.spec import parse
from replay.choice import Choice
from replay.comparison.record import Record
from replay.device_choice import DeviceChoice
from replay.devices.expert_file import read_through, write
from replay.devices.stage import driver, machine_name
from replay.devices.store import Stamps, available_memory_bytes
from replay.keys import key_of
from replay.live.answering import answer, prompts_of, reading_ids
from replay.live.opening import open_live
from replay.live.prediction import outcome
from replay.run import replay
from replay.warmup import undisturbed
from sim.defaults import POLICY
from sim.experiment import Experiment
from sim.loaded import TimedRun
from sim.profiles.hardware_profile import hardware
from sim.quantities import show_bytes
from sim.results.metrics import Row
from tracer import demo
from tracer.loading import Loading
from tracer.models import load_model
from tracer.record import Options
from traces.errors import InputError
from traces.models import profile as model_profile
from traces.models.profile import ModelProfile
from traces.trace import Trace

LIVE, REPLAY, ACCELERATE = "live", "replay of the recorded trace", "accelerate's offload"
LLAMA = "llama.cpp, mmap, {} KiB read ahead"
CACHED, ALONE = "live, all experts cached", "transformers alone"

PROMPT = ",".join(str(7 * place + 3) for place in range(32))
TURNS = 3
READ_AHEAD_KIB = (128, 8192)
"""A PC's, and that of many virtual disks."""
ACCELERATE_TOKENS = 2
SHARD_BYTES = 2_000_000_000
DEMO_TOKENS, DEMO_CONTEXT, ROUNDS = 60, 32, 5


class Generated(NamedTuple):
    """A turn of generating."""

    trace: Trace
    row: Row
    predicted_ms: float  # a token
    slots: int
    lanes: int


@dataclass(frozen=True)
class LiveCheck:
    """What is checked. `model`: a profile, whose weights are written below `folder` and removed behind each part."""

    record: Record
    say: Callable[[str], None]
    folder: Path
    model: str
    tokens: int
    device: str = "disk"  # or cuda

    def run(self) -> dict[str, float]:
        """Run all parts; return what they come to. Raise InputError where memory, disk or rights do not suffice."""
        facts = {"torch": torch.__version__, "hardware": {"threads": torch.get_num_threads()}}
        of_gpu = {"driver": driver()} if self._on_gpu else {}
        self.record.begin(device=self.device, machine=machine_name(self.device), **of_gpu, **facts)
        profile = model_profile.model(self.model)
        self._require(int(profile.parameters * profile.dense_bytes_per_parameter))
        below = partial(TemporaryDirectory[str], prefix="live-check-", dir=self.folder)
        with below() as checkpoint, below() as folder:
            limit, lived = self._in_turns(profile, Path(checkpoint), Path(folder) / "experts")
        if not self._on_gpu and FAMILIES[profile.name][0] == "olmoe" and find_spec("xllamacpp"):
            with below() as folder:
                self._llama(profile, Path(folder) / "model.gguf", limit, lived)
        with below() as folder:
            files, within = (None if self._on_gpu else Path(folder)), self._limited(limit, Path(folder))
            peer = accelerate_offload(profile, self._on, ACCELERATE_TOKENS, folder=files, within=within)
            limited = {} if self._on_gpu else {"memory_bytes": limit}
            self._put(profile.name, ACCELERATE, len(peer.tpot_ms), fmean(peer.tpot_ms), version=peer.version, **limited)
        self._demo()
        ratios = self._ratios()
        self.record.set_facts(ratios=ratios)
        self.record.write()
        return ratios

    def _ratios(self) -> dict[str, float]:
        took = {cell["mode"]: cell["measured"]["tpot_mean_ms"] for cell in self.record}
        live = next(cell for cell in self.record if cell["mode"] == LIVE)
        llama = {mode: took[mode] for mode in map(LLAMA.format, READ_AHEAD_KIB) if mode in took}
        return {
            **{f"{mode} over live": ms / took[LIVE] for mode, ms in llama.items()},
            "accelerate over live": took[ACCELERATE] / took[LIVE],
            "live over replay": took[LIVE] / took[REPLAY],
            "predicted over measured": live["predicted"]["tpot_mean_ms"] / took[LIVE],
            "speed of the shipped model, all experts cached, over transformers": took[ALONE] / took[CACHED],
        }

    @property
    def _on_gpu(self) -> bool:
        return self.device == "cuda"

    @property
    def _on(self) -> torch.device:
        return torch.device("cuda" if self._on_gpu else "cpu")

    def _require(self, model_bytes: int) -> None:
        """Raise InputError where a control group cannot be made, or a model of so many bytes does not fit."""
        with self._limited(model_bytes, self.folder / "none"):
            pass
        for what, there, needed in (
            ("memory", available_memory_bytes(), model_bytes + SHARD_BYTES),
            (f"disk in {self.folder}", disk_usage(self.folder).free, (1 if self._on_gpu else 2) * model_bytes),
        ):
            if there is not None and there < needed:
                sizes = f"{show_bytes(needed)} of {what}, {show_bytes(there)} are free"
                raise InputError(f"{self.model} takes {sizes}: take a smaller --model")

    def _limited(self, size: int, files: Path) -> AbstractContextManager[None]:
        """Limit memory to so many bytes, with none of the files in it; limit nothing where a GPU computes."""
        return nullcontext() if self._on_gpu else page_cache_of(size, files)

    def _put(self, model: str, mode: str, tokens: int, mean_ms: float, **facts: Any) -> None:
        """Record a part."""
        cell: Row = {"model": model, "mode": mode, "tokens": tokens, **facts, "measured": {"tpot_mean_ms": mean_ms}}
        self.record.put(key_of(model=model, mode=mode, tokens=tokens), cell)
        self.say(f"{model}, {mode}: {mean_ms:,.1f} ms a token")

    def _llama(self, profile: ModelProfile, path: Path, limit: int, lived: Trace) -> None:
        """Decode the tokens of a turn in llama.cpp, at both read-aheads."""
        with ProcessPoolExecutor(1, get_context("spawn")) as other:
            other.submit(write_gguf, profile, path).result()
        os.sync()
        prompt = [int(each) for each in PROMPT.split(",")]
        assert lived.token_id is not None
        tokens = lived.token_id[len(prompt) :].tolist()
        for kib in READ_AHEAD_KIB:
            read_through(path)
            with read_ahead_of(path.parent, kib):
                peer = llama_mmap(path, prompt, tokens, torch.get_num_threads(), self._limited(limit, path.parent))
            facts = {"version": peer.version, "memory_bytes": limit, "threads": torch.get_num_threads()}
            self._put(profile.name, LLAMA.format(kib), len(peer.tpot_ms), fmean(peer.tpot_ms), **facts)

    def _in_turns(self, profile: ModelProfile, checkpoint: Path, store: Path) -> tuple[int, Trace]:
        """Generate and replay in turns, since a shared machine drifts; return the limit of memory, and a turn's trace.

        All turns generate the same tokens. Of each side the turn in the middle counts. Each turn begins with its files
        read once: what is below a virtual disk may have kept those of one side only.
        """
        self.say(f"{profile.name}: writing {show_bytes(profile.parameters * profile.dense_bytes_per_parameter)}")
        with ProcessPoolExecutor(1, get_context("spawn")) as other:  # whose memory a user's process would not have held
            other.submit(write_checkpoint, profile, checkpoint).result()
        shards = [*checkpoint.glob("*.safetensors")]
        size = sum(file.stat().st_size for file in shards)
        if not self._on_gpu:
            count = profile.moe_layers * profile.experts
            write(store, profile, Stamps(count, profile.expert_bytes, 0).write, "random weights, seed 0", count)
        os.sync()  # else the disk is still busy with them
        lives, replays = list[Generated](), list[float]()

        def generate_once() -> None:
            self._read_through(shards)
            lanes = lives[0].lanes if lives and not self._on_gpu else None
            lives.append(self._live(checkpoint, size // 2, lanes))
            self._put_live(profile, lives, size)

        def replay_once() -> None:
            self._read_through([store])
            replays.append(self._replay(profile, store, lives[0], size // 2))
            facts = {"threads": torch.get_num_threads(), "lanes": lives[0].lanes}
            self._put(profile.name, REPLAY, self.tokens - 1, median_low(replays), turns_ms=[*replays], **facts)

        for turn in range(TURNS):
            for part in (replay_once, generate_once) if turn % 2 else (generate_once, replay_once):
                part()
        return size // 2, lives[0].trace

    def _put_live(self, profile: ModelProfile, lives: list[Generated], size: int) -> None:
        """Record what generating came to so far."""
        turns_ms = [each.row["tpot_mean_ms"] for each in lives]
        live = lives[turns_ms.index(median_low(turns_ms))]
        self._put(
            *(profile.name, LIVE, self.tokens - 1, median_low(turns_ms)),
            turns_ms=turns_ms,
            turns_predicted_ms=[each.predicted_ms for each in lives],
            policy=POLICY,
            cache_fraction=live.slots / (profile.moe_layers * profile.experts),
            **{name: live.row[name] for name in ("hit_rate", "past_cache", "copy_gb_per_s")},
            lanes=live.lanes,
            checkpoint_bytes=size,
            memory_bytes=None if self._on_gpu else size // 2,
            predicted={"tpot_mean_ms": live.predicted_ms},
        )

    def _read_through(self, files: Iterable[Path]) -> None:
        """Read files as the lanes will, past the page cache; nothing where experts come from host memory."""
        for path in () if self._on_gpu else files:
            read_through(path)

    def _live(self, folder: Path, limit: int, lanes: int | None) -> Generated:
        """Generate. lanes: None for as many as it takes."""
        options = Options(max_new_tokens=self.tokens, temperature=1.0)
        with (
            self._limited(limit, folder),
            open_live(str(folder), DeviceChoice(self.device, lanes=lanes)) as live,
            undisturbed(),
        ):
            prompts = prompts_of([], None, PROMPT)
            answered = answer(live, reading_ids(live.loaded), prompts, options, lambda token: None, lambda: None)
            result = outcome(live, answered)
            predicted_ms = result.predictions[0].row["tpot_mean_ms"]
            return Generated(answered.trace, result.row, predicted_ms, live.run.gpu.slots, live.lanes)

    def _replay(self, profile: ModelProfile, store: Path, live: Generated, limit: int) -> float:
        """Replay the trace with as much memory, and as many threads and lanes; return ms a token."""
        loaded = TimedRun(Experiment("live"), live.trace, profile, hardware("h200"))
        from_disk: dict[str, Any] = {}
        if not self._on_gpu:
            from_disk = {"store": store, "lanes": live.lanes, "threads": torch.get_num_threads()}
        with self._limited(limit, store):
            result = replay(Choice(loaded, parse(POLICY), live.slots, DeviceChoice(self.device, **from_disk)))
        return float(result.row["tpot_mean_ms"])

    def _demo(self) -> None:
        """Decode with the shipped model in turns: with a cache that holds all experts, and without one."""
        alone = load_model(str(demo.MODEL), Loading(device=self._on.type)).model
        took: dict[str, list[float]] = {CACHED: [], ALONE: []}
        cached = open_live(str(demo.MODEL), DeviceChoice(self.device), policy="lru", cache_size="100%", name=demo.NAME)
        with cached as live, undisturbed():
            for round_ in range(ROUNDS):
                turns = [(CACHED, live.model), (ALONE, alone)]
                for mode, model in turns if round_ % 2 else turns[::-1]:
                    decoded_ms = decode_ms(model, self._on, DEMO_TOKENS, DEMO_CONTEXT)
                    if round_:  # the first one fills the cache
                        took[mode] += decoded_ms
                live.end_request()
        for mode, each in took.items():
            self._put(demo.NAME, mode, len(each), fmean(each))


def write_checkpoint(profile: ModelProfile, folder: Path) -> None:
    """Write random weights of these shapes."""
    build(profile).save_pretrained(folder, save_original_format=False, max_shard_size=SHARD_BYTES)
