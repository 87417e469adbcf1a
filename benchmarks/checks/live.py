"""What live generation reaches: a checkpoint of random weights gets half as much memory as its file has bytes.

In turns with it, since a shared machine drifts: LRU instead of the default policy, a replay of the trace that it
recorded, and llama.cpp, which maps a file of the same weights and decodes the same tokens. All have as much memory and
as many threads, the caches are as large as fit, and each turn begins with files of which nothing is in memory. Tokens
are drawn at temperature 1, since random weights repeat the likeliest one for ever; how much of the model they use
stands beside the result. Then accelerate's offload with as much memory, and the shipped model with all its experts
cached, beside transformers alone. On a GPU no memory is limited: experts are in the host's, those of accelerate too,
and llama.cpp is left out. The file is written after each part.

With `lookahead`, live generation alone is run in turns, without and with the routers of the next layers. How much of a
layer's choices they know is set by how much layers add to the hidden state (`added`), and stands beside the result.
"""

import os
from collections.abc import Callable
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

import numpy as np
import torch

from benchmarks.checks.limits import page_cache_of, read_through
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
from replay.devices.expert_file import write
from replay.devices.stage import driver, machine_name
from replay.devices.store import Stamps
from replay.keys import key_of
from replay.live.answering import OfTokenIds, answer, outcome, prompts_of
from replay.live.opening import MOST, open_live
from replay.run import replay
from replay.warmup import undisturbed
from sim.defaults import CACHE_SIZE, POLICY
from sim.experiment import Experiment
from sim.loaded import TimedRun
from sim.probe.limits import available_memory_bytes
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
from traces.stats import statistics, summary
from traces.trace import Trace

LIVE, LRU, REPLAY, ACCELERATE = "live", "live, lru", "replay of the recorded trace", "accelerate's offload"
NEXT = "live, with the next layers' routers"
LLAMA = "llama.cpp, mmap, {} KiB read ahead"
CACHED, ALONE = "live, all experts cached", "transformers alone"

PROMPT = [7 * place + 3 for place in range(8)]
READ_AHEAD_KIB = (128, 8192)
"""A PC's, and that of many virtual disks."""
ACCELERATE_TOKENS = 2
SHARD_BYTES = 2_000_000_000
DEMO_TOKENS, DEMO_CONTEXT, ROUNDS = 60, 32, 5


class Turn(NamedTuple):
    """A part, run once."""

    tpot_ms: float
    facts: Row


@dataclass(frozen=True)
class LiveCheck:
    """What is checked. `model`: a profile, whose weights are written below `folder` and removed behind each part."""

    record: Record
    say: Callable[[str], None]
    folder: Path
    model: str
    tokens: int
    device: str = "disk"  # or cuda
    turns: int = 3
    lookahead: int = 0  # layers
    added: float = 1.0

    def run(self) -> dict[str, float]:
        """Run all parts; return what they come to. Raise InputError where memory, disk or rights do not suffice."""
        facts = {"torch": torch.__version__, "hardware": {"threads": torch.get_num_threads()}}
        of_gpu = {"driver": driver()} if self._on_gpu else {}
        self.record.begin(device=self.device, machine=machine_name(self.device), **of_gpu, **facts)
        profile = model_profile.model(self.model)
        self._require(int(profile.parameters * profile.dense_bytes_per_parameter))
        below = partial(TemporaryDirectory[str], prefix="live-check-", dir=self.folder)
        with below() as folder:
            turns = Turns(self, profile, Path(folder))
            limit = turns.run()
        if self.lookahead:
            self.record.set_facts(ratios=turns.gains())
            self.record.write()
            return turns.gains()
        with below() as folder:
            files, within = (None if self._on_gpu else Path(folder)), self.limited(limit, Path(folder))
            peer = accelerate_offload(profile, self._on, ACCELERATE_TOKENS, folder=files, within=within)
            limited = {} if self._on_gpu else {"memory_bytes": limit}
            self.put(profile.name, ACCELERATE, len(peer.tpot_ms), fmean(peer.tpot_ms), version=peer.version, **limited)
        self._demo()
        ratios = self._ratios()
        self.record.set_facts(ratios=ratios)
        self.record.write()
        return ratios

    def _ratios(self) -> dict[str, float]:
        took = {cell["mode"]: cell["measured"]["tpot_mean_ms"] for cell in self.record}
        predicted = next(cell["predicted"]["tpot_mean_ms"] for cell in self.record if cell["mode"] == LIVE)
        others = [mode for mode in (*map(LLAMA.format, READ_AHEAD_KIB), ACCELERATE) if mode in took]
        return {
            **{f"{mode} over {own}": took[mode] / took[own] for mode in others for own in (LIVE, LRU)},
            "live over replay": took[LIVE] / took[REPLAY],
            "predicted over measured": predicted / took[LIVE],
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
        with self.limited(model_bytes, self.folder / "none"):
            pass
        files_bytes = model_bytes if self._on_gpu else 5 * model_bytes // 2
        for what, there, needed in (
            ("memory", available_memory_bytes(), model_bytes + SHARD_BYTES),
            (f"disk in {self.folder}", disk_usage(self.folder).free, files_bytes),
        ):
            if there < needed:
                sizes = f"{show_bytes(needed)} of {what}, {show_bytes(there)} are free"
                raise InputError(f"{self.model} takes {sizes}: take a smaller --model")

    def limited(self, size: int, files: Path) -> AbstractContextManager[None]:
        """Limit memory to so many bytes, with none of the files in it; limit nothing where a GPU computes."""
        return nullcontext() if self._on_gpu else page_cache_of(size, files)

    def put(self, model: str, mode: str, tokens: int, mean_ms: float, **facts: Any) -> None:
        """Record a part."""
        cell: Row = {"model": model, "mode": mode, "tokens": tokens, **facts, "measured": {"tpot_mean_ms": mean_ms}}
        self.record.put(key_of(model=model, mode=mode, tokens=tokens), cell)
        self.say(f"{model}, {mode}: {mean_ms:,.1f} ms a token")

    def _demo(self) -> None:
        """Decode with the shipped model in turns: with a cache that holds all experts, and without one."""
        alone = load_model(str(demo.MODEL), Loading(device=self._on.type)).model
        took: dict[str, list[float]] = {CACHED: [], ALONE: []}
        cached = open_live(None, DeviceChoice(self.device), policy="lru", cache_size="100%")
        with cached as live, undisturbed():
            for round_ in range(ROUNDS):
                turns = [(CACHED, live.model), (ALONE, alone)]
                for mode, model in turns if round_ % 2 else turns[::-1]:
                    decoded_ms = decode_ms(model, self._on, DEMO_TOKENS, DEMO_CONTEXT)
                    if round_:  # the first one fills the cache
                        took[mode] += decoded_ms
                live.end_request()
        for mode, each in took.items():
            self.put(demo.NAME, mode, len(each), fmean(each))


class Turns:
    """The parts that decode the same tokens in turns, from files below a folder."""

    def __init__(self, check: LiveCheck, profile: ModelProfile, folder: Path) -> None:
        self._check, self._profile, self._on_gpu = check, profile, check.device == "cuda"
        self._checkpoint, self._store, self._gguf = folder / "checkpoint", folder / "experts", folder / "gguf"
        self._limit = 0
        self._lanes: int | None = None  # that the first turn took
        self._trace: Trace | None = None
        self._slots = 0
        self._turns: dict[str, list[Turn]] = {}

    def run(self) -> int:
        """Run all turns; return the limit of memory. Of each part the turn in the middle counts."""
        check, profile = self._check, self._profile
        self._write()
        size = sum(file.stat().st_size for file in self._checkpoint.glob("*.safetensors"))
        self._limit = size // 2
        parts: dict[str, Callable[[], Turn]] = {LIVE: partial(self._live, POLICY)}
        if check.lookahead:
            parts[NEXT] = partial(self._live, POLICY, check.lookahead)
        else:
            parts |= {LRU: partial(self._live, "lru"), REPLAY: self._replay}
        if self._gguf.exists():
            parts |= {LLAMA.format(kib): partial(self._llama, kib) for kib in READ_AHEAD_KIB}
        turns = self._turns = {mode: [] for mode in parts}
        for turn in range(check.turns):
            for mode in reversed(parts) if turn % 2 else parts:
                turns[mode].append(parts[mode]())
                turns_ms = [each.tpot_ms for each in turns[mode]]
                middle = turns[mode][turns_ms.index(median_low(turns_ms))]
                limited = {} if self._on_gpu else {"checkpoint_bytes": size, "memory_bytes": self._limit}
                facts = {**middle.facts, **limited, "threads": torch.get_num_threads()}
                if check.lookahead:
                    facts["predicted_turns_ms"] = [turn.facts["predicted"]["tpot_mean_ms"] for turn in turns[mode]]
                check.put(profile.name, mode, check.tokens - 1, middle.tpot_ms, turns_ms=turns_ms, **facts)
        return self._limit

    def gains(self) -> dict[str, float]:
        """Return what the next layers' routers know, and what they are worth, of all turns: measured and predicted."""
        without, with_ = self._turns[LIVE], self._turns[NEXT]
        predicted = [[turn.facts["predicted"]["tpot_mean_ms"] for turn in turns] for turns in (without, with_)]
        return {
            **{f"share known {distance} layers ahead": share for distance, share in with_[0].facts["known"].items()},
            "measured without over with them": fmean(a.tpot_ms for a in without) / fmean(b.tpot_ms for b in with_),
            "predicted without over with them": fmean(predicted[0]) / fmean(predicted[1]),
        }

    def _write(self) -> None:
        """Write a checkpoint, and of the same weights what llama.cpp reads; for replays a file of half of the experts.

        There each expert stands for two, which takes less room and is read all the same.
        """
        profile = self._profile
        self._check.say(f"{profile.name}: writing {show_bytes(profile.parameters * profile.dense_bytes_per_parameter)}")
        with ProcessPoolExecutor(1, get_context("spawn")) as other:  # whose memory a user's process would not have held
            other.submit(write_checkpoint, profile, self._checkpoint, self._check.added).result()
            beside = not self._on_gpu and not self._check.lookahead
            if beside and FAMILIES[profile.name][0] == "olmoe" and find_spec("xllamacpp"):
                self._gguf.mkdir()
                other.submit(write_gguf, profile, self._checkpoint, self._gguf / "model.gguf").result()
        if beside:
            count = -(-profile.moe_layers * profile.experts // 2)
            stamps = Stamps(count, profile.expert_bytes, 0)
            write(self._store, profile, stamps.write, "random weights, seed 0", count)
        os.sync()  # else the disk is still busy with them

    def _read_through(self, files: Path) -> None:
        """Read files as the lanes will, past the page cache; nothing where experts come from host memory.

        What is below a virtual disk may have kept those of one part only.
        """
        for path in [] if self._on_gpu else [each for each in files.rglob("*") if each.is_file()] or [files]:
            read_through(path)

    def _live(self, policy: str, lookahead: int = 0) -> Turn:
        """Generate, with as many lanes as the first time, and as the first time the same tokens."""
        self._read_through(self._checkpoint)
        options = Options(max_new_tokens=self._check.tokens, temperature=1.0)
        target = DeviceChoice(self._check.device, lanes=None if self._on_gpu else self._lanes)
        size = CACHE_SIZE if self._on_gpu else MOST
        with (
            self._check.limited(self._limit, self._checkpoint),
            open_live(str(self._checkpoint), target, policy=policy, cache_size=size, lookahead=lookahead) as live,
            undisturbed(),
        ):
            prompts = prompts_of([], None, ",".join(map(str, PROMPT)))
            answered = answer(live, OfTokenIds(**vars(live.loaded)), prompts, options, lambda token: None, lambda: None)
            result = outcome(live, answered)
        row, slots = result.row, live.run.gpu.slots
        if self._trace is None:
            self._trace, self._lanes, self._slots = answered.trace, live.lanes, slots
            self._say_routing(answered.trace)
        first, now = self._trace.token_id, answered.trace.token_id
        assert first is not None
        assert now is not None
        if not np.array_equal(first, now):
            raise InputError(f"{policy}: other tokens than the first time")
        known = {
            each["distance"]: each["recall"] for each in summary([answered.trace])["foresight"] if each["score"] is None
        }
        return Turn(
            row["tpot_mean_ms"],
            {
                "policy": policy,
                "cache_fraction": slots / live.run.shape.total,
                **{name: row[name] for name in ("hit_rate", "past_cache", "copy_gb_per_s")},
                "lanes": live.lanes,
                **({"known": known} if known else {}),
                "predicted": {"tpot_mean_ms": next(iter(result.predictions.values()))["tpot_mean_ms"]},
            },
        )

    def _say_routing(self, trace: Trace) -> None:
        """Record how much of the model the tokens use, on which it depends what caches can reach."""
        stats = statistics(trace)["decode"]
        assert stats.activated is not None
        used = stats.activated * trace.num_experts
        self._check.record.set_facts(routing={"used_by_the_token_before": stats.reuse.share, "used_of_a_layer": used})
        self._check.say(
            f"{stats.reuse.share:.0%} of a token's experts were used by the token before it, {used:.0f} of "
            f"{trace.num_experts} of a layer by {stats.tokens} tokens"
        )

    def _replay(self) -> Turn:
        """Replay the trace with as much memory, and as many threads and lanes."""
        assert self._trace is not None
        self._read_through(self._store)
        loaded = TimedRun(Experiment("live"), self._trace, self._profile, hardware("h200"))
        from_disk: dict[str, Any] = {}
        if not self._on_gpu:
            from_disk = {"store": self._store, "lanes": self._lanes, "threads": torch.get_num_threads()}
        with self._check.limited(self._limit, self._store):
            result = replay(Choice(loaded, parse(POLICY), self._slots, DeviceChoice(self._check.device, **from_disk)))
        return Turn(float(result.row["tpot_mean_ms"]), {"lanes": self._lanes})

    def _llama(self, kib: int) -> Turn:
        """Decode the tokens in llama.cpp."""
        assert self._trace is not None
        assert self._trace.token_id is not None
        self._read_through(self._gguf)
        tokens = self._trace.token_id[len(PROMPT) :].tolist()
        within = self._check.limited(self._limit, self._gguf)
        with read_ahead_of(self._gguf, kib):
            peer, chosen = llama_mmap(self._gguf / "model.gguf", PROMPT, tokens, torch.get_num_threads(), within)
        same = (chosen[..., None] == self._trace.experts[..., None, :]).any(-1).mean()
        return Turn(fmean(peer.tpot_ms), {"version": peer.version, "same_experts": float(same)})


def write_checkpoint(profile: ModelProfile, folder: Path, added: float = 1.0) -> None:
    """Write random weights of these shapes (`build`)."""
    build(profile, added).save_pretrained(folder, save_original_format=False, max_shard_size=SHARD_BYTES)
