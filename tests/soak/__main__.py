"""Record, sweep and replay for an hour, and cut everything off: `python -m tests.soak --minutes 60`, `make soak`.

Every job meets each of its faults in turn: a process is killed at a random moment, once or several times, a worker
dies, a scheduler vanishes, or the disk is full. Then the job is resumed, and what it wrote is held against a run that
nothing disturbed. A finding is a traceback, a status that is none of ours, a hang, or another result. Moments are drawn
from --seed. Full disks need rights to mount a tmpfs, and are left out without.
"""

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path

import pyarrow.parquet as pq
import tomli_w

from tests.support.tiny import PROFILE, SIZES, E, K, L
from traces import write_trace
from traces.synthetic import synthetic

ROOT = Path(__file__).parents[2]

LONGEST = 600.0
"""Seconds after which a command hangs."""

LINGER = 60.0
"""Seconds that workers may take to see that the process which started them is gone."""

ENDED = {0: "ended", 1: "failed in one line", 2: "refused in one line", 130: "interrupted"}

JOBS = ("record", "sweep untimed", "sweep", "replay virtual", "replay disk")

FAULTS = {"kill": JOBS, "worker": JOBS[1:3], "scheduler": JOBS[1:3], "full disk": JOBS[:4]}
"""Each fault, and the jobs that it can happen to."""

Content = dict[str, bytes]


@dataclass(frozen=True)
class Job:
    """A command that writes a folder, how it continues or begins again, and what of the folder never differs."""

    name: str
    command: str
    arguments: tuple[str, ...]
    again: str  # the flag with which it continues
    content: Callable[[Path], object]


@dataclass
class Soak:
    """What was done and found."""

    home: Path
    seed: int
    done: Counter[str] = field(default_factory=Counter)
    found: list[str] = field(default_factory=list)

    def command(self, job: Job, out: Path, *more: str) -> "subprocess.Popen[str]":
        """Start it, in a process group of its own."""
        code = f"from {job.command}.__main__ import main; main()"
        env = os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "200"}
        return subprocess.Popen(
            [sys.executable, "-c", code, *job.arguments, "--out", str(out), *more],
            cwd=self.home,
            env=env,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def ends(self, job: Job, running: "subprocess.Popen[str]", *allowed: int) -> int:
        """Wait for it: its status. A finding, unless it is one of these and no traceback was printed."""
        try:
            _, err = running.communicate(timeout=LONGEST)
        except subprocess.TimeoutExpired:
            os.killpg(running.pid, signal.SIGKILL)
            _, err = running.communicate()
            err += f"\nstill running after {LONGEST:.0f} s"
        self.done["commands"] += 1
        status = running.returncode
        if status == -signal.SIGINT and err.rstrip().endswith("KeyboardInterrupt"):
            self.done["interrupted while Python imported"] += 1
        elif status not in allowed or "Traceback" in err or "still running" in err:
            self.found.append(f"{job.name}: status {status}, not one of {allowed}: {err[-2000:]}")
        elif status > 0:
            self.done[ENDED.get(status, f"ended with {status}")] += 1
            if sum("error:" in line for line in err.splitlines()) != 1:
                self.found.append(f"{job.name}: status {status} without one line that says why: {err[-2000:]}")
        return status

    def same(self, job: Job, out: Path, whole: object) -> None:
        """A finding, unless `out` holds what an undisturbed run wrote."""
        try:
            if job.content(out) == whole:
                return
            self.found.append(f"{job.name}: its results differ from an undisturbed run's")
        except (OSError, ValueError, KeyError) as error:
            self.found.append(f"{job.name}: its results cannot be read: {error}")


def files(*endings: str) -> Callable[[Path], object]:
    """The bytes of all files with these endings."""

    def content(folder: Path) -> Content:
        found = (file for file in sorted(folder.rglob("*")) if file.suffix in endings and file.is_file())
        return {str(file.relative_to(folder)): file.read_bytes() for file in found}

    return content


def counted(folder: Path) -> object:
    """Of a replay on hardware, whose times differ: what was run, and what it hit."""
    table = pq.read_table(folder / "results.parquet", columns=["requests", "hits", "misses"])
    return table.to_pylist()


def workers(process: int) -> list[int]:
    """The processes that it started to run cells; none that watches over them."""
    try:
        listed = Path(f"/proc/{process}/task/{process}/children").read_text().split()
        return [int(child) for child in listed if "spawn_main" in Path(f"/proc/{child}/cmdline").read_text()]
    except OSError:
        return []


def left_behind(session: int) -> list[str]:
    """What still runs of a session that has ended, after LINGER seconds at most; that is killed then."""
    ends = time.monotonic() + LINGER
    while found := [process for process in Path("/proc").iterdir() if _is_of(process, session)]:
        if time.monotonic() > ends:
            told = [
                (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace") for process in found
            ]
            for process in found:
                os.kill(int(process.name), signal.SIGKILL)
            return told
        time.sleep(0.2)
    return []


def _is_of(process: Path, session: int) -> bool:
    try:
        state, *facts = (process / "stat").read_text().rpartition(")")[2].split()
    except (OSError, ValueError):
        return False
    return process.name.isdigit() and state != "Z" and int(facts[2]) == session


def killed(soak: Soak, job: Job, draw: random.Random, seconds: float, out: Path) -> None:
    """SIGKILL, SIGTERM or SIGINT at random moments, until it is let end."""
    more: tuple[str, ...] = ()
    for _ in range(draw.randint(1, 3)):
        running = soak.command(job, out, *more)
        how = draw.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
        time.sleep(draw.random() * seconds)
        if running.poll() is None:
            running.send_signal(how)
            soak.done[f"{how.name} sent"] += 1
        status = soak.ends(job, running, 0, 1, 2, 130, -how)
        if left := left_behind(running.pid):
            soak.found.append(f"{job.name}: {LINGER:.0f} s after {how.name} it has left behind: {', '.join(left)}")
        if status == 0:
            return
        more = (job.again,)


def worker_dies(soak: Soak, job: Job, draw: random.Random, seconds: float, out: Path) -> None:
    """SIGKILL to a process that the command started."""
    running = soak.command(job, out, "--workers", "2")
    ends = time.monotonic() + 2 * seconds
    while running.poll() is None and time.monotonic() < ends:
        time.sleep(draw.random() * seconds / 4)
        if started := workers(running.pid):
            os.kill(draw.choice(started), signal.SIGKILL)
            soak.done["workers killed"] += 1
            break
    soak.ends(job, running, 0, 1, 2)


def scheduler_vanishes(soak: Soak, job: Job, draw: random.Random, seconds: float, out: Path) -> None:
    """SIGKILL to the scheduler of the cluster that runs the cells."""
    code = "import sys; from distributed.cli.dask_scheduler import main; main()"
    with tempfile.TemporaryDirectory() as scratch:
        told = Path(scratch) / "scheduler.json"
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "cwd": scratch}
        asked = ["--port", "0", "--no-dashboard", "--scheduler-file", str(told)]
        scheduler = subprocess.Popen([sys.executable, "-c", code, *asked], **quiet)  # type: ignore[call-overload]
        played = [sys.executable, "-c", code.replace("scheduler", "worker"), "--scheduler-file", str(told)]
        env = os.environ | {"PYTHONPATH": str(ROOT)}
        worker = subprocess.Popen([*played, "--nthreads", "1"], **quiet, env=env)  # type: ignore[call-overload]
        try:
            while not (told.exists() and told.read_text().rstrip().endswith("}")):  # whole
                time.sleep(0.1)
            running = soak.command(job, out, "--scheduler", json.loads(told.read_text())["address"])
            time.sleep(draw.random() * 2 * seconds)
            scheduler.kill()
            soak.done["schedulers killed"] += 1
            soak.ends(job, running, 0, 1, 2)
        finally:
            for process in (scheduler, worker):
                process.kill()
                process.wait()


@contextmanager
def small_disk(folder: Path, size: int) -> Iterator[Callable[[int], None]]:
    """A tmpfs of so many KiB; what it yields gives it another size."""
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}k", "tmpfs", folder], check=True)
    try:

        def resize(kib: int) -> None:
            subprocess.run(["mount", "-o", f"remount,size={kib}k", folder], check=True)

        yield resize
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


def mounts() -> bool:
    """Whether this process may mount a tmpfs."""
    if os.geteuid():
        return False
    with tempfile.TemporaryDirectory() as scratch:
        done = subprocess.run(["mount", "-t", "tmpfs", "tmpfs", scratch], capture_output=True, check=False)
        if done.returncode == 0:
            subprocess.run(["umount", scratch], check=True)
        return done.returncode == 0


def round_of(soak: Soak, job: Job, fault: str, draw: random.Random, seconds: float, whole: object) -> None:
    """One fault, then the job to its end, then the comparison."""
    place, size = soak.home / "round", len(str(whole)) // 1024

    def to_the_end(out: Path) -> None:
        before = any(out.glob("*")) if out.exists() else False
        status = soak.ends(job, soak.command(job, out, *([job.again] if before else [])), 0, 2)
        if status == 2:  # it had ended already
            soak.done["had ended before"] += 1
        soak.same(job, out, whole)

    try:
        if fault == "full disk":
            with small_disk(place, draw.randint(8, max(16, size // 2))) as resize:
                soak.ends(job, soak.command(job, place / "out"), 0, 1, 2)
                resize(256 << 10)
                to_the_end(place / "out")
        else:
            faults = {"kill": killed, "worker": worker_dies, "scheduler": scheduler_vanishes}
            faults[fault](soak, job, draw, seconds, place / "out")
            to_the_end(place / "out")
    finally:
        shutil.rmtree(place, ignore_errors=True)
    soak.done[f"{job.name}, {fault}"] += 1


def jobs(home: Path) -> list[Job]:
    """What is done over and over."""
    made = synthetic(12, tokens=12, layers=3, experts=16, top_k=2, seed=3, prompt_tokens=4)
    write_trace(replace(made, meta=replace(made.meta, model="tiny", **SIZES)), home / "tiny")
    trace = str(home / "tiny")
    grid = ("--policies", "lru,lfu,eamc,belady", "--cache-sizes", "10%,25%,50%", "--quiet")
    tables = files(".parquet", ".toml")
    model, experts = home / "small.toml", home / "experts"
    shape = {name: value for name, value in asdict(PROFILE).items() if name != "name"}
    model.write_text(tomli_w.dumps(shape), encoding="utf-8")
    write_trace(synthetic(12, tokens=12, layers=L, experts=E, top_k=K, seed=4), home / "small")
    store = "from replay.commands import main; main()"
    asked = ["store", str(experts), "--model-profile", str(model), "-q"]
    subprocess.run([sys.executable, "-c", store, *asked], env=os.environ | {"PYTHONPATH": str(ROOT)}, check=True)
    run = ("run", "--trace", str(home / "small"), "--model-profile", str(model), "--policy", "lru", "-q")
    record = ("record", "--limit", "12", "--max-new-tokens", "6", "-q")
    on_disk = ("--device", "disk", "--store", str(experts), "--lanes", "2", "--threads", "1")
    return [
        Job("record", "tracer", record, "--resume", files(".parquet")),
        Job("sweep untimed", "sim", ("sweep", trace, *grid, "--untimed"), "--resume", tables),
        Job("sweep", "sim", ("sweep", trace, *grid), "--resume", tables),
        Job("replay virtual", "replay", (*run, "--device", "virtual"), "--overwrite", files(".csv")),
        Job("replay disk", "replay", (*run, *on_disk), "--resume", counted),
    ]


@cache
def faults_of(job: Job) -> list[str]:
    """Those that a job can have here."""
    return [fault for fault, names in FAULTS.items() if job.name in names and (fault != "full disk" or mounts())]


def main(arguments: Sequence[str] | None = None) -> None:
    """Continue until the time is over; status 1 where something was found."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args(arguments)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # in the background it is ignored, by children too
    home, begun, rounds = Path(tempfile.mkdtemp(prefix="soak-")), time.monotonic(), 0
    soak, draw = Soak(home, asked.seed), random.Random(asked.seed)
    try:
        known, turn = [], 0
        for job in jobs(home):
            began = time.monotonic()
            soak.ends(job, soak.command(job, home / job.name), 0)
            known.append((job, time.monotonic() - began, job.content(home / job.name)))
            print(f"{job.name}: {known[-1][1]:.1f} s undisturbed", flush=True)
        while time.monotonic() - begun < 60 * asked.minutes:
            turn += 1
            for job, seconds, whole in known:
                if time.monotonic() - begun >= 60 * asked.minutes:
                    break
                fault = faults_of(job)[turn % len(faults_of(job))]
                before = len(soak.found)
                round_of(soak, job, fault, draw, seconds, whole)
                rounds += 1
                outcome = "; ".join(soak.found[before:]) or "as undisturbed"
                print(f"round {rounds}: {job.name}, {fault}: {outcome}", flush=True)
    finally:
        shutil.rmtree(home, ignore_errors=True)
    print(f"{rounds} rounds in {(time.monotonic() - begun) / 60:.0f} minutes; {len(soak.found)} findings")
    print("\n".join(f"{count:6} {what}" for what, count in sorted(soak.done.items())))
    sys.exit(bool(soak.found))


if __name__ == "__main__":
    main()
