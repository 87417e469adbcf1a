"""Give every option and argument of the three commands hostile values: `python -m tests.fuzz.options [COMMAND ...]`.

A command, as `moe-sim run`, works on a small trace, and one of its options at a time gets a value that it cannot or can
just take. Whatever happens, it ends: with results, or with one line of error and status 1 or 2; never with a traceback,
by a signal, or later than SECONDS. Each runs in a process of its own, in at most 4 GiB, in one folder, from which what
it adds is removed. `--values` prints the values that were accepted, to look for those that should not have been.
"""

import argparse
import importlib
import os
import pkgutil
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import typer

import policies
import replay.commands
import sim.commands
import tracer.commands
import traces
from tests.fuzz.harness import CORPUS
from tests.support.tiny import SIZES
from tracer import demo
from traces.synthetic import synthetic
from traces.writer import write_trace

SECONDS = 60
COMPILING_SECONDS = 600
"""For what is made first: a sweep, which may have to compile the engine."""
GIB = 4

MAINS = {"moe-trace": tracer.commands, "moe-sim": sim.commands, "moe-replay": replay.commands}

LONG = "9" * 5000

WORDS = """
0 -0 -1 1 7 2.5 1e400 nan inf -inf 1e-320 1e308 1e30 1e3 +5 0x10 1_000 ١٢ 1/0 1/3 ½ true None null
9223372036854775807 9223372036854775808 18446744073709551616 4294967296
0% -5% 50% 101% 1e-300% nan% % 5%% 25%,25% 1GiB -1GiB 1e30GiB 0.0001B
, ,, 1,2 a,b = a= a=1 =1 a=1..2 a=2..1 a=1..1e400 a=0..nan 1..2 2..1 .. -1.. 0:2 :
lru lru: lru,lru lru:x=1 lru+ +lru lru+lru lru@ lru@layer lru/host lru/layers:n=9 eamc oracle
eamc:capacity=0 eamc:capacity=1e30 eamc-blend:decay=nan lru+markov:depth=-1
/proc . .. /dev/null /dev/full /dev/stdin /proc/self/environ ~nobody/x ~ - -- -x http://x/y
tiny tiny/ text.txt empty bytes.bin folder broken.json broken.toml deep.json fifo loop locked
mine.py mine.py: mine.py:Mine mine.py:Nope text.txt:Mine olmoe-1b-7b rtx4090 rtx-4090 cpu json
"""

VALUES = (
    *("", " ", "\n", "\udcff", "é", "[red]x[/red]", "%s{}", "a" * 300, "a" * 5000, "a" * 100 + "/" * 5000),
    *(LONG, f"-{LONG}", f"eamc:capacity={LONG}", "1" + "0" * 30, "1 GB"),
    *WORDS.split(),
)

MODEL = str(Path(demo.__file__).parent / "model")
TRACE, SIZE = ["tiny"], ["--cache-size", "50%"]
BASES: dict[str, list[str]] = {
    "moe-trace import": ["dump.npz", "--out", "new"],
    "moe-trace export": [*TRACE, "--out", "new.csv"],
    "moe-trace cat": ["tiny", "other", "--out", "new", "--prefix-ids"],
    "moe-trace slice": [*TRACE, "--out", "new", "--requests", "0:2"],
    "moe-trace sample": [*TRACE, "--out", "new", "--requests", "2"],
    "moe-trace synth": ["--like", "tiny", "--requests", "2", "--decode-tokens", "2", "--out", "new"],
    "moe-trace architectures": [],
    "moe-trace record": ["--model", MODEL, "--prompts", "text.txt", "--max-new-tokens", "1", "--out", "new"],
    "moe-sim sweep": [*TRACE, "--policies", "lru", "--cache-sizes", "50%", "--workers", "1", "--out", "new"],
    "moe-sim run": [*TRACE, *SIZE, "--policy", "lru"],
    "moe-sim plan": ["--model", "olmoe-1b-7b", "--gpu-memory", "8GiB"],
    "moe-sim report": ["results", "--out", "new.html"],
    "moe-sim policies": [],
    "moe-sim hardware": [],
    "moe-sim models": [],
    "moe-sim conformance": ["cases.jsonl"],
    "moe-sim tune": [
        *TRACE,
        *SIZE,
        "--policy",
        "eamc",
        "--search",
        "capacity=1..4",
        "--trials",
        "1",
        "--workers",
        "1",
        "--out",
        "new",
    ],
    "moe-sim sensitivity": [*TRACE, *SIZE, "--policy", "lru", "--workers", "1"],
    "moe-sim adapt": [*TRACE, "--by", "task", "--warmup", "1", "--after", "1", "--window", "1", "--workers", "1"],
    "moe-sim train-stride": [*TRACE, "--out", "new.npz", "--epochs", "1"],
    "moe-sim compare": ["results", "results"],
    "moe-sim backtest": ["rows.toml"],
    "moe-sim systems": TRACE,
    "moe-sim eamc build": [*TRACE, "--out", "new.npz"],
    "moe-sim eamc show": ["eamc.npz"],
    "moe-sim profile build": [*TRACE, "--out", "new.npz"],
    "moe-replay run": ["--trace", "tiny", *SIZE, "--policy", "lru", "--device", "virtual", "--out", "new"],
    "moe-replay calibrate": ["--model-profile", "olmoe-1b-7b", "--out", "text.txt"],
    "moe-replay compare": [*TRACE, "--device", "virtual", "--out", "new"],
    "moe-replay store": ["new.bin", "--model-profile", "nothing-here"],
    "moe-replay generate": ["--model", MODEL, "--prompt", "x", "--max-new-tokens", "1"],
    "moe-replay serve": ["--model", "nothing-here"],
}
"""What each command takes beside the hostile value; a trace where nothing is named. `serve` stops before its model."""

UNTRIED = {("moe-replay calibrate", "--out")}
"""Options of which each good value would measure for minutes."""

MADE = {
    "moe-sim sweep": ["tiny", "--policies", "lru,eamc", "--cache-sizes", "50%", "--workers", "1", "--out", "results"],
    "moe-sim eamc build": ["tiny", "--out", "eamc.npz"],
    "moe-trace export": ["tiny", "--to", "npz", "--out", "dump.npz"],
}
"""How what some commands take is made."""

MINE = """from policies.core.policy import ScorePolicy
class Mine(ScorePolicy):
    def observe(self, event):
        self.keep[0, event.experts] = event.serial
"""


def make_folder(folder: Path) -> None:
    """Make what the values name."""
    trace = synthetic(4, tokens=4, layers=2, experts=6, top_k=2, seed=3)
    trace = replace(trace, meta=replace(trace.meta, model="tiny", **SIZES))
    for name in ("tiny", "other"):
        write_trace(trace, folder / name)
    (folder / "text.txt").write_text("a text\n")
    (folder / "empty").write_text("")
    (folder / "bytes.bin").write_bytes(os.urandom(3000))
    (folder / "broken.json").write_text('{"a": [1, 2')
    (folder / "deep.json").write_text("[" * 50_000)
    (folder / "broken.toml").write_text("[a\nb = ")
    (folder / "mine.py").write_text(MINE)
    shutil.copy(CORPUS / "cases" / "seed-0", folder / "cases.jsonl")
    shutil.copy(CORPUS / "backtest-toml" / "seed-0", folder / "rows.toml")
    (folder / "folder").mkdir()
    (folder / "locked").write_text("")
    (folder / "locked").chmod(0)
    (folder / "loop").symlink_to("loop")
    os.mkfifo(folder / "fifo")
    for name, words in MADE.items():
        ended, text = run(MAINS[name.split()[0]].main, name, words, folder, COMPILING_SECONDS)
        assert ended == "0", text


def commands() -> Iterator[tuple[str, Any]]:
    """Yield each command's name and what click knows of it."""

    def within(name: str, command: Any) -> Iterator[tuple[str, Any]]:
        if hasattr(command, "commands"):
            for key, each in command.commands.items():
                yield from within(f"{name} {key}", each)
        else:
            yield name, command.described()

    for name, module in MAINS.items():
        yield from within(name, typer.main.get_command(module.app))


def attempts(name: str, command: Any) -> Iterator[list[str]]:
    """Yield the words of each attempt; the first one has no hostile value."""
    base = BASES.get(name, TRACE)
    yield base
    options = [each for each in command.params if each.opts[0].startswith("-") and each.name != "help"]
    options = [each for each in options if (name, each.opts[0]) not in UNTRIED]
    for option in options:
        if option.is_flag:
            yield [*base, option.opts[-1]]
            continue
        without = base.copy()
        if option.opts[0] in base:
            at = base.index(option.opts[0])
            del without[at : at + 2]
        for value in VALUES:
            yield [*without, f"{option.opts[0]}={value}"]
    named = [i for i, word in enumerate(base) if word.startswith("-")]
    arguments = range(named[0] if named else len(base)) or range(len(options) < len(command.params))
    for place in arguments:
        for value in VALUES:
            yield [*base[:place], value, *base[place + 1 :]]


def run(main: Callable[[], None], name: str, words: list[str], folder: Path, seconds: int = SECONDS) -> tuple[str, str]:
    """Return how a command ended in a process of its own, and what it wrote on standard error."""
    log = folder / "log"
    child = os.fork()
    if not child:
        try:
            os.setsid()
            resource.setrlimit(resource.RLIMIT_DATA, (GIB << 30,) * 2)
            os.chdir(folder)
            errors = os.open(log, os.O_CREAT | os.O_TRUNC | os.O_RDWR)
            nothing = os.open(os.devnull, os.O_RDWR)
            for target, source in ((0, nothing), (1, nothing), (2, errors)):
                os.dup2(source, target)
            sys.argv = [name.split()[0], *name.split()[1:], *words]
            main()
        except SystemExit as end:
            sys.stdout.flush()
            os._exit(end.code if isinstance(end.code, int) else 1 if end.code else 0)
        except BaseException:
            sys.excepthook(*sys.exc_info())
            sys.stderr.flush()
            os._exit(99)
    began, status = time.monotonic(), None
    while time.monotonic() < began + seconds and status is None:
        ended, code = os.waitpid(child, os.WNOHANG)
        status = os.waitstatus_to_exitcode(code) if ended else None
        time.sleep(0.002)
    if status is None:
        os.killpg(child, signal.SIGKILL)
        os.waitpid(child, 0)
    text = log.read_text(errors="replace") if log.exists() else ""
    return ("hangs" if status is None else str(status)), text


def wrong(status: str, text: str) -> bool:
    """Whether a command must not end so."""
    return status not in ("0", "1", "2") or "Traceback" in text or (status != "0" and not text.strip())


def import_beforehand() -> None:
    """Import what commands import when they run, so that their processes need not."""
    for package in (policies, replay, sim, tracer, traces):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if not module.name.endswith("__main__"):
                importlib.import_module(module.name)
    importlib.import_module("transformers.models.olmoe.modeling_olmoe")  # the shipped model's code


def main() -> None:
    """Print what is found; status 1 where that is anything."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.options", description=__doc__)
    parser.add_argument("commands", nargs="*", help="default: all")
    parser.add_argument("--values", action="store_true")
    asked = parser.parse_args()
    found = 0
    import_beforehand()
    with tempfile.TemporaryDirectory() as temporary:
        clean = Path(temporary) / "clean"
        clean.mkdir()
        make_folder(clean)
        for name, command in commands():
            if asked.commands and name not in asked.commands:
                continue
            tried, taken = 0, []
            before = sorted(path.name for path in clean.iterdir())
            for words in attempts(name, command):
                tried += 1
                status, text = run(MAINS[name.split()[0]].main, name, words, clean)
                for path in clean.iterdir():
                    if path.name not in before:
                        shutil.rmtree(
                            path, ignore_errors=True
                        ) if path.is_dir() and not path.is_symlink() else path.unlink()
                if status == "0":
                    taken.append(words)
                if wrong(status, text):
                    found += 1
                    last = text.strip().splitlines()[-1:] or [""]
                    print(f"FOUND {name} {[word[:80] for word in words]}: {status}: {last[0][:300]}", flush=True)
            print(f"{name}: {tried} attempts, {len(taken)} of them with results", flush=True)
            if asked.values:
                for words in taken:
                    print(f"   taken: {[word[:60] for word in words]}", flush=True)
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
