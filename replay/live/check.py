"""What live generation reaches on this machine, in one file of results: `make live-check`.

A checkpoint with the shapes of a real model and random weights gets half as much memory as its file has bytes, and
generates. Beside it: the simulator's prediction, a replay of the trace that it recorded, in turns with it, and
accelerate's offload to a disk with as much memory. On a GPU no memory is limited: experts are in the host's, also those
of accelerate's offload.
Tokens are drawn at temperature 1, since random weights repeat the likeliest one for ever.
Then the shipped model with all its experts cached, beside transformers alone. The file is written after each part.
"""

import os
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import date
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from shutil import disk_usage
from statistics import median_low
from tempfile import TemporaryDirectory
from typing import Annotated, Any, NamedTuple

import torch
import typer

from policies.core.spec import parse
from replay.choice import Choice
from replay.comparison.record import Record
from replay.device_choice import DeviceChoice, require_cuda
from replay.devices.device_facts import driver, machine_name
from replay.devices.expert_file import read_through, write
from replay.devices.store import Stamps, available_memory_bytes
from replay.disk_check.mapped import page_cache_of
from replay.gpu_check.accelerate_baseline import accelerate_offload, build, decode_ms
from replay.keys import key_of
from replay.live.answering import answer
from replay.live.opening import DEVICES, open_live
from replay.live.prediction import outcome
from replay.live.prompts import prompts_of, reading_ids
from replay.run import replay
from replay.warmup import undisturbed
from sim.defaults import POLICY
from sim.experiment import Experiment
from sim.loaded import TimedRun
from sim.profiles import model_profile
from sim.profiles.hardware_profile import hardware
from sim.profiles.model_profile import ModelProfile
from sim.quantities import show_bytes
from sim.results.metrics import Row
from tracer import demo
from tracer.models import Loading, load_model
from tracer.record import Options
from traces.commands import console, program
from traces.errors import InputError, unknown
from traces.output import check_file
from traces.trace import Trace

RESULTS = Path("replay/results")
LIVE, REPLAY, ACCELERATE = "live", "replay of the recorded trace", "accelerate's offload"
CACHED, ALONE = "live, all experts cached", "transformers alone"

PROMPT = ",".join(str(7 * place + 3) for place in range(32))
TURNS = 3
ACCELERATE_TOKENS = 2
SHARD_BYTES = 2_000_000_000
DEMO_TOKENS, DEMO_CONTEXT, ROUNDS = 60, 32, 5

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich")


class Generated(NamedTuple):
    """What came of generating."""

    trace: Trace
    row: Row
    predicted_ms: float  # a token
    slots: int
    lanes: int

    @property
    def tpot_ms(self) -> float:
        """Return what a token took."""
        took_ms: float = self.row["tpot_mean_ms"]
        return took_ms


@dataclass(frozen=True)
class Check:
    """What is checked. `model`: a profile, whose weights are written below `folder` and removed behind each part."""

    record: Record
    folder: Path
    model: str
    tokens: int
    device: str = "disk"  # or cuda

    def run(self) -> None:
        """All of it. Raise InputError where memory, disk or rights do not suffice."""
        facts = {"torch": torch.__version__, "hardware": {"threads": torch.get_num_threads()}}
        driven = {"driver": driver()} if self.device == "cuda" else {}
        self.record.begin(device=self.device, machine=machine_name(self.device), **driven, **facts)
        profile = model_profile.model(self.model)
        self._require(int(profile.parameters * profile.dense_bytes_per_parameter))
        below = partial(TemporaryDirectory[str], prefix="live-check-", dir=self.folder)
        with below() as checkpoint, below() as folder:
            limit = self._in_turns(profile, Path(checkpoint), Path(folder) / "experts")
        with below() as folder:
            self._accelerate(profile, Path(folder), limit)
        self._demo()

    def _require(self, model_bytes: int) -> None:
        """Raise InputError where a control group cannot be made, or a model of so many bytes has no room."""
        with self._limited(model_bytes, self.folder / "none"):
            pass
        for what, there, needed in (
            ("memory", available_memory_bytes(), model_bytes + SHARD_BYTES),
            (f"disk in {self.folder}", disk_usage(self.folder).free, (1 + (self.device == "disk")) * model_bytes),
        ):
            if there is not None and there < needed:
                sizes = f"{show_bytes(needed)} of {what}, {show_bytes(there)} are free"
                raise InputError(f"{self.model} takes {sizes}: take a smaller --model")

    @property
    def _on(self) -> torch.device:
        """Where dense parts and experts are computed."""
        return torch.device("cuda" if self.device == "cuda" else "cpu")

    def _limited(self, size: int, files: Path) -> AbstractContextManager[None]:
        """Limit memory to so many bytes, with none of the files in it; limit nothing where a GPU computes."""
        return nullcontext() if self.device == "cuda" else page_cache_of(size, files)

    def _put(self, model: str, mode: str, tokens: int, took_ms: Any, **facts: Any) -> None:
        """Record a part: the times of its tokens, or its mean."""
        mean_ms = took_ms if isinstance(took_ms, float) else sum(took_ms) / len(took_ms)
        cell: Row = {"model": model, "mode": mode, "tokens": tokens, **facts, "measured": {"tpot_mean_ms": mean_ms}}
        self.record.put(key_of(model=model, mode=mode, tokens=tokens), cell)
        console.note(f"{model}, {mode}: {mean_ms:,.1f} ms a token")

    def _in_turns(self, profile: ModelProfile, checkpoint: Path, store: Path) -> int:
        """Generate and replay in turns, since a shared machine drifts; return the limit of memory.

        All turns generate the same tokens. Of each side the turn in the middle counts. Each turn begins with its files
        read once: what is below a virtual disk may have kept those of one side only.
        """
        size = self._write(profile, checkpoint)
        if self.device == "disk":
            count = profile.moe_layers * profile.experts
            write(store, profile, Stamps(count, profile.expert_bytes, 0).write, "random weights, seed 0", count)
            os.sync()
        lives, replays = list[Generated](), list[float]()

        def generate_once() -> None:
            self._read_through(checkpoint.glob("*.safetensors"))
            lanes = lives[0].lanes if lives and self.device == "disk" else None
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
        return size // 2

    def _put_live(self, profile: ModelProfile, lives: "Sequence[Generated]", size: int) -> None:
        """Record what generating came to so far."""
        live = sorted(lives, key=lambda each: each.tpot_ms)[(len(lives) - 1) // 2]
        self._put(
            *(profile.name, LIVE, self.tokens - 1, live.tpot_ms),
            turns_ms=[each.tpot_ms for each in lives],
            turns_predicted_ms=[each.predicted_ms for each in lives],
            policy=POLICY,
            cache_fraction=live.slots / (profile.moe_layers * profile.experts),
            **{name: live.row[name] for name in ("hit_rate", "past_cache", "copy_gb_per_s")},
            lanes=live.lanes,
            checkpoint_bytes=size,
            memory_bytes=None if self.device == "cuda" else size // 2,
            predicted={"tpot_mean_ms": live.predicted_ms},
        )

    def _write(self, profile: ModelProfile, folder: Path) -> int:
        """Write the checkpoint; return its bytes."""
        console.note(f"{profile.name}: writing {show_bytes(profile.parameters * profile.dense_bytes_per_parameter)}")
        with ProcessPoolExecutor(1, get_context("spawn")) as other:  # whose memory a user's process would not have held
            other.submit(write_checkpoint, profile, folder).result()
        os.sync()  # else the disk is still busy with it
        return sum(file.stat().st_size for file in folder.glob("*.safetensors"))

    def _read_through(self, files: Iterable[Path]) -> None:
        """Read files as the lanes will, past the page cache; nothing where experts come from host memory."""
        if self.device == "cuda":
            return
        for path in files:
            read_through(path)

    def _live(self, folder: Path, limit: int, lanes: int | None) -> "Generated":
        """Generate. lanes: None for as many as it takes."""
        sampled = Options(max_new_tokens=self.tokens, temperature=1.0)
        with (
            self._limited(limit, folder),
            open_live(str(folder), DeviceChoice(self.device, lanes=lanes)) as live,
            undisturbed(),
        ):
            asked = prompts_of([], None, PROMPT)
            answered = answer(live, reading_ids(live.loaded), asked, sampled, lambda token: None, lambda: None)
            found = outcome(live, answered)
            predicted_ms = found.predictions[0].row["tpot_mean_ms"]
            return Generated(answered.trace, found.row, predicted_ms, live.run.gpu.slots, live.lanes)

    def _replay(self, profile: ModelProfile, store: Path, live: "Generated", limit: int) -> float:
        """Replay the trace with as much memory, and as many threads and lanes; return ms a token."""
        loaded = TimedRun(Experiment("live"), live.trace, profile, hardware("h200"))
        from_disk: dict[str, Any] = {}
        if self.device == "disk":
            from_disk = {"store": store, "lanes": live.lanes, "threads": torch.get_num_threads()}
        with self._limited(limit, store):
            found = replay(Choice(loaded, parse(POLICY), live.slots, DeviceChoice(self.device, **from_disk)))
        took_ms: float = found.row["tpot_mean_ms"]
        return took_ms

    def _accelerate(self, profile: ModelProfile, folder: Path, limit: int) -> None:
        """Decode with accelerate's offload: to a disk with as much memory, or where a GPU computes to host memory."""
        files, within = (None if self.device == "cuda" else folder), self._limited(limit, folder)
        peer = accelerate_offload(profile, self._on, ACCELERATE_TOKENS, folder=files, within=within)
        facts = {} if self.device == "cuda" else {"memory_bytes": limit}
        self._put(profile.name, ACCELERATE, len(peer.tpot_ms), peer.tpot_ms, version=peer.version, **facts)

    def _demo(self) -> None:
        """Decode with the shipped model in turns: with a cache that holds all experts, and without one."""
        alone = load_model(str(demo.MODEL), Loading(device=self._on.type)).model
        took: dict[str, list[float]] = {CACHED: [], ALONE: []}
        cached = open_live(str(demo.MODEL), DeviceChoice(self.device), policy="lru", cache_size="100%", name=demo.NAME)
        with cached as live, undisturbed():
            for round_ in range(ROUNDS):
                turns = [(CACHED, live.model), (ALONE, alone)]
                for mode, model in turns if round_ % 2 else turns[::-1]:
                    found = decode_ms(model, self._on, DEMO_TOKENS, DEMO_CONTEXT)
                    if round_:  # the first one fills the cache
                        took[mode] += found
                live.end_request()
        for mode, each in took.items():
            self._put(demo.NAME, mode, len(each), each)

    def ratios(self) -> dict[str, float]:
        """What the file's parts come to."""
        took = {cell["mode"]: cell["measured"]["tpot_mean_ms"] for cell in self.record}
        live = next(cell for cell in self.record if cell["mode"] == LIVE)
        return {
            "accelerate over live": took[ACCELERATE] / took[LIVE],
            "live over replay": took[LIVE] / took[REPLAY],
            "predicted over measured": live["predicted"]["tpot_mean_ms"] / took[LIVE],
            "speed of the shipped model, all experts cached, over transformers": took[ALONE] / took[CACHED],
        }


def write_checkpoint(profile: ModelProfile, folder: Path) -> None:
    """Write random weights of these shapes."""
    build(profile).save_pretrained(folder, save_original_format=False, max_shard_size=SHARD_BYTES)


@app.command()
def check(
    out: Annotated[Path, typer.Option(help="The file to write; or a folder, for live-DATE.json in it.")] = RESULTS,
    folder: Annotated[Path, typer.Option(help="Where checkpoints are written, on the disk that is read.")] = Path(),
    model: Annotated[str, typer.Option(help="Model profile whose shapes are used.")] = "olmoe-1b-7b",
    tokens: Annotated[int, typer.Option(min=2, help="Tokens that are generated.")] = 32,
    device: Annotated[str, typer.Option(help="disk, or cuda.")] = "disk",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the file.")] = False,
) -> None:
    """Compare live generation with prediction, replay, accelerate and transformers alone.

    Takes as much memory as the model has bytes, twice as much disk, ten minutes, and root for the limit of
    memory.
    """
    if not folder.is_dir():
        raise InputError(f"no folder at {folder}")
    if device not in DEVICES:
        raise unknown("device", device, DEVICES)
    if device == "cuda":
        require_cuda("disk")
    name = {"disk": "live", "cuda": "live-cuda"}[device]
    path = out if out.suffix == ".json" else out / f"{name}-{date.today()}.json"
    check_file(path, overwrite)
    began = time.monotonic()
    found = Check(Record(path), folder, model, tokens, device)
    found.run()
    ratios = found.ratios()
    found.record.tell(ratios=ratios)
    found.record.write()
    for what, ratio in ratios.items():
        console.say(f"{what}: {ratio:.2f}")
    console.say(f"wrote {path} in {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    program.main(app, "live-check")
