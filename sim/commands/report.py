"""The command `moe-sim report`: one page about results, to be handed to somebody."""

import shlex
from pathlib import Path
from typing import Annotated

import typer

from sim.commands import options
from sim.quantities import show_bytes
from sim.report import inputs, page
from terminal import console
from traces.errors import InputError
from traces.output import check_file, replacing


def report(
    results: Annotated[list[Path], typer.Argument(help="Folders of moe-sim sweep and moe-replay.")],
    out: Annotated[Path, typer.Option(help="File for the page.")] = Path("report.html"),
    trust_folder: options.TrustFolder = False,
    overwrite: options.Overwrite = False,
    quiet: options.Quiet = False,
) -> None:
    """Write one page about results: what to run, how certain that is, and how far the bound is.

    The page needs no network; its tables sort, its figures show values under the pointer. It names what a folder lacks.
    The traces of the sweeps are read again for Belady's bound and the physical limit.

    [b]moe-sim report results/my-trace results/my-replay --out report.html[/b]
    """
    check_file(out, overwrite)
    if not any(folder.exists() for folder in results):
        raise InputError(f"no such folder: {', '.join(map(str, results))}; name what moe-sim sweep --out has written")
    trusted = ["--trust-folder"] if trust_folder else []
    command = shlex.join(["moe-sim", "report", *map(str, results), "--out", str(out), *trusted, "--overwrite"])
    text, problems = page.written(inputs.read(results, trust_folder), command)
    with replacing(out, overwrite=overwrite) as part:
        part.write_text(text, "utf-8")
    for problem in problems:
        console.warn(problem)
    if not quiet:
        console.say(f"wrote {out} ({show_bytes(out.stat().st_size)}): open it in a browser")
