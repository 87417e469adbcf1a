"""The command behind `make gpu-check`: `python3 -m replay.gpu_check`."""

import math
import time
from datetime import date
from pathlib import Path
from typing import Annotated

import torch
import typer

from policies.core.grammar import split_list
from replay.comparison.record import ERROR, Record
from replay.gpu_check.bounds import lines, unjudged
from replay.gpu_check.check import BUDGET_S, POLICIES, SHORT_TOKENS, Check
from replay.model.network import expert_dtype_of
from sim.profiles import model_profile
from traces.commands import console, program
from traces.errors import InputError
from traces.output import check_file

RESULTS = Path("replay/results")
PAPER = "3.1 to 16.7 times"
"""MoE-Infinity (arXiv 2401.14361), its headline: latency of a token, 485 to 2590 ms of others against 155."""

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich")


@app.command()
def check(
    out: Annotated[Path, typer.Option(help="The file to write; or a folder, for GPU-DATE.json in it.")] = RESULTS,
    traces: Annotated[
        Path | None, typer.Option(help="Folder of trace folders; a model without one gets synthetic routing.")
    ] = None,
    only: Annotated[str, typer.Option(help="Models, by profile.")] = ",".join(SHORT_TOKENS),
    minutes: Annotated[float, typer.Option(help="What would not end in this time is left out.")] = BUDGET_S / 60,
    peers: Annotated[bool, typer.Option(help="Decode with accelerate's offload too.")] = True,
    commit: Annotated[str | None, typer.Option(help="What to call this version, where git is not there.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Do not run again what the file holds.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Drop what the file holds.")] = False,
) -> None:
    """Check what only a GPU can show: kernels, calibration, prediction against measurement, and baselines.

    Exits with status 1 if a bound does not hold or a cell could not run.
    """
    from replay.devices.gpu import Gpu

    if traces and not traces.is_dir():
        raise InputError(f"no folder of traces at {traces}")
    if not 0 < minutes < math.inf:
        raise InputError(f"--minutes {minutes:g}: must be above 0 and finite")
    names = split_list(only)
    if not names:
        raise InputError(f"--only names no model: take some of {', '.join(SHORT_TOKENS)}")
    for name in names:
        expert_dtype_of(model_profile.model(name))
    if not torch.cuda.is_available():
        raise InputError("make gpu-check needs a GPU, and torch finds none; the CPU is compared by moe-replay compare")
    gpu, began = Gpu(), time.monotonic()
    slug = gpu.name.replace("NVIDIA ", "").replace(" ", "-")
    path = out if out.suffix == ".json" else out / f"{slug}-{date.today()}.json"
    check_file(path, overwrite=True)  # the record says itself whether it is one, and whether it continues
    record = Record.open(path, resume=not overwrite, otherwise="drop it with --overwrite")
    if len(record) and not resume:
        raise InputError(
            f"{path} holds {len(record)} cells: use --resume to continue, --overwrite to drop them, or another --out"
        )

    def told(text: str) -> None:
        console.note(f"{time.monotonic() - began:6.1f} s  {text}")

    Check(gpu, record, told, names, traces, minutes * 60, commit, peers=peers).run()
    tell(record)
    console.out.print(f"wrote {path}", soft_wrap=True)
    missing = unjudged(list(record), [(name, policy) for name in names for policy in POLICIES])
    for what in missing:
        console.warn(f"not judged: {what}")
    if (
        missing
        or record.facts["fallbacks"]
        or any(ERROR in cell for cell in record)
        or not all(row["holds"] for row in record.facts["verdict"])
    ):
        raise typer.Exit(1)


def tell(record: Record) -> None:
    """What was found: bounds, ratios to what others do, and what could not be run."""
    for line in lines(record.facts["verdict"]):
        console.out.print(line, soft_wrap=True)
    for row in record.facts["ratios"]:
        if row["policy"] != "lru":
            what = f"{row['model']}, {row['policy']} at {row['cache_fraction']:.0%}"
            text = f"{what}: a token takes {row['over']} {row['ratio']:.2f} times as long"
            console.out.print(text, soft_wrap=True)
    if record.facts["ratios"]:
        console.out.print(f"the paper states {PAPER} over what it compares with", soft_wrap=True)
    for cell in record:
        if ERROR in cell:
            what = ", ".join(str(cell[name]) for name in ("model", "policy", "mode") if cell.get(name))
            console.warn(f"{what}: {cell[ERROR]}")
    for what in record.facts["fallbacks"]:
        console.warn(f"launched kernel by kernel, and slower: {what}")
    for what in record.facts["left_out"]:
        console.warn(f"left out, for lack of time or memory: {what}")


if __name__ == "__main__":
    program.main(app, "gpu-check")
