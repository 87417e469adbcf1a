"""The command `moe-sim probe`: what this machine's memory, link and disk reach, kept as a hardware profile."""

from pathlib import Path
from typing import Annotated

import typer

from sim.commands import options
from sim.probe import busy
from sim.probe.detection import detected
from sim.probe.measuring import Probe, measured, profile
from sim.profiles.hardware_profile import OWN, THIS_MACHINE
from terminal import console
from terminal.console import progress, table
from traces.output import replacing


def probe(
    folder: Annotated[Path, typer.Option(help="Folder on the disk that models are read from.")] = Path(),
    out: Annotated[Path | None, typer.Option(help="The profile to write. Default: this-machine, by its name.")] = None,
    even_if_busy: Annotated[bool, typer.Option("--even-if-busy", help="Measure while others use the machine.")] = False,
    quiet: options.Quiet = False,
) -> None:
    """Measure this machine in about a minute, and keep it as a hardware profile.

    It reads memory (STREAM Triad) by threads and kinds of cores, copies to the GPU if there is one, and reads a file of
    2 GiB past the page cache. moe-sim plan takes the profile by itself, --hardware and a row of the back-test by its
    name. On a busy machine it measures nothing.

    [b]moe-sim probe[/b]

    [b]moe-sim sweep --hardware this-machine ...[/b]
    """
    others = busy.load()
    if not even_if_busy:
        busy.require_quiet(others)
    with progress(1, quiet, "measured") as advance:
        found = measured(folder.expanduser().absolute(), lambda text: advance(0, text))
    text = profile(found, detected(folder, quick=False), others > busy.QUIET)
    path = out or OWN / f"{THIS_MACHINE}.toml"
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path, overwrite=True) as part:
        part.write_text(text, "utf-8")
    if not quiet:
        _show(found)
    console.say(f"wrote {path}")


def _show(found: Probe) -> None:
    memory = ((each.cores, str(each.threads), f"{each.gb_per_s:.1f}") for each in found.memory)
    console.say(table("memory", "threads", "GB/s", rows=memory, gap=2))
    if found.link:
        console.say(f"link to the GPU: {found.link:.1f} GB/s")
    rates = {(each.size, each.lanes): each.gb_per_s for each in found.disk}
    sizes = sorted({size for size, _ in rates})
    disk = ((f"{size >> 10:,} KiB", *(f"{rates[size, lanes]:.2f}" for lanes in (1, 4))) for size in sizes)
    console.say(table("reads of", "1 at a time, GB/s", "4 at a time, GB/s", rows=disk, gap=2))
