"""`moe-trace import` and `export`: other tools' dumps as traces, and traces for other tools."""

from pathlib import Path
from typing import Annotated, Any

import typer

from terminal import console
from tracer.commands.shared import RECORDED, Out, Overwrite, Quiet, TraceArgument, report
from traces.errors import refuse, unknown
from traces.export import FORMATS, of_phase
from traces.export import check_target as check_export
from traces.hot_experts import FORMATS as PROFILES
from traces.hot_experts import carry_over
from traces.importers import Options, Source, read_dump
from traces.importers.files import KINDS
from traces.importers.words import KNOWN
from traces.reader import open_folder
from traces.trace import Trace
from traces.writer import check_target, write_traces


def import_(
    file: Annotated[
        Path,
        typer.Argument(
            help=f"A dump: {', '.join(KINDS)}, packed with gzip or not; or a folder of such files. Known by name: "
            f"{', '.join(KNOWN)}; of other engines the names of columns say what they are."
        ),
    ],
    meta: Annotated[
        Path | None,
        typer.Option(help="JSON with model, experts, phase, requests, ...", show_default="X.json if there"),
    ] = None,
    *,
    options: Options,
    out: Out = None,
    overwrite: Overwrite = False,
    quiet: Quiet = False,
) -> None:
    """Turn routing that another tool dumped into a trace: any engine's rows, nested records, arrays or counts.

    Columns and keys are found by their names, or named by --columns. What was found, and what is wrong with the
    recording, is printed. Arrays in one .npz or .npy may be larger than memory.

    Example: moe-trace import answers.jsonl --experts 128 --out traces/recorded/qwen3
    """
    source = source_of(file, meta, options, quiet)
    folder = out or RECORDED / source.stem
    check_target(folder, overwrite)
    write_traces(read_dump(source), folder, overwrite)
    if not quiet:
        for text in dict.fromkeys(source.found):
            console.note(f"found: {text}")
    for text in dict.fromkeys(source.notes):
        console.warn(text)
    for finding in source.findings:
        console.warn(f"fixed: {finding.name}: {finding.what}" if options.fix and finding.fixed else str(finding))
    report(folder, quiet)


def source_of(file: Path, meta: Path | None, options: Options, quiet: bool) -> Source:
    """Return a dump to read, with the JSON beside it unless another one is named."""
    file = file.resolve() if file.name in ("", "..") else file
    beside = file.with_suffix(".json")
    found = meta is None and beside.is_file() and beside != file
    source = Source.of(file, beside if found else meta, options, load)
    if found and not quiet:
        console.note(f"no --meta given: taking {beside}")
    return source


def export(
    trace: TraceArgument,
    out: Annotated[Path, typer.Option(help="The file to write; npz also writes X.json beside X.npz.")],
    to: Annotated[
        str,
        typer.Option(help=f"oracleGeneral (libCacheSim), csv, npz, or an engine's profile: {', '.join(PROFILES)}."),
    ] = "oracleGeneral",
    phase: Annotated[str, typer.Option(help="prefill, decode or both.")] = "both",
    expert_bytes: Annotated[
        int | None,
        typer.Option("--expert-bytes", help="Object size in oracleGeneral.", show_default="1: sizes count experts"),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a file that is already there.")] = False,
    quiet: Quiet = False,
) -> None:
    """Write a trace for other programs: libCacheSim, data frames, engines, or arrays that `import` takes back.

    A profile says which experts are hot. Beside it stands what share of choices a cache of them would serve, also on
    requests that the profile did not see.

    Example: moe-trace export traces/demo --to oracleGeneral --phase decode --out demo.oracleGeneral
    """
    if to not in FORMATS and to not in PROFILES:
        raise unknown("format", to, [*FORMATS, *PROFILES])
    if phase not in ("prefill", "decode", "both"):
        raise unknown("phase", phase, ("prefill", "decode", "both"))
    odd = expert_bytes is not None and to != "oracleGeneral"
    refuse((odd, f"--expert-bytes belongs to oracleGeneral, not to {to}: leave it out"))
    check_export(out, to, overwrite)
    if to in PROFILES:
        _export_profile(Trace.read(trace), out, to, phase, overwrite, quiet)
        return
    columns = {"oracleGeneral": (), "csv": ("weights",), "npz": ("weights", "token_id", "hits")}[to]
    held = of_phase(Trace.read(trace, columns), phase)
    if to == "npz" and (lost := [name for name in open_folder(trace).optional if name not in columns]):
        console.warn(f"{out} has no place for {', '.join(lost)}: left out")
    size = {} if expert_bytes is None else {"expert_bytes": expert_bytes}
    written = FORMATS[to](held, out, overwrite=overwrite, **size)
    if not quiet:
        what = {"oracleGeneral": "accesses", "csv": "rows", "npz": "tokens"}[to]
        console.say(f"{out}: {written} {what}")


def _export_profile(trace: Trace, out: Path, to: str, phase: str, overwrite: bool, quiet: bool) -> None:
    counted = trace.aggregate is not None and phase == "both" and to != "llama-moe-trace"
    held = trace if counted else of_phase(trace, phase)
    choices = PROFILES[to].write(held, out, overwrite=overwrite)
    if quiet:
        return
    console.say(f"{out}: {choices:,} choices of experts, for {PROFILES[to].about}")
    slots = sorted({max(1, round(held.num_experts * share)) for share in (1 / 8, 1 / 4, 1 / 2)})
    console.say("share of choices that the hottest experts of each layer serve:")
    console.say(f"{'slots a layer':<20}" + "".join(f"{f'{n} ({n / held.num_experts:.3g})':>14}" for n in slots))
    for name, shares in carry_over(held, slots).items():
        console.say(f"{name:<20}" + "".join(f"{share:>14.1%}" for share in shares))


def load(path: Path) -> Any:
    """Return the content of a .pt that holds tensors, numbers, texts and containers only."""
    import torch  # here, as other dumps are imported without it

    def plain(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.numpy()
        if isinstance(value, dict):
            return {key: plain(each) for key, each in value.items()}
        return [plain(each) for each in value] if isinstance(value, list | tuple) else value

    return plain(torch.load(path, map_location="cpu", weights_only=True))
