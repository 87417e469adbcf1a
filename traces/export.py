"""Traces for other programs: libCacheSim's oracleGeneral, CSV for data frames, .npz that `moe-trace import` takes back.

A file gets its name when it is whole. Of a trace with both phases one may be asked for.
"""

import json
from collections.abc import Callable
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from traces.errors import InputError, refuse
from traces.hot_experts import FORMATS as PROFILES
from traces.importers.source import Facts
from traces.output import check_file, make_folder, replacing
from traces.trace import Trace

ORACLE_GENERAL = np.dtype([("time", "<u4"), ("obj_id", "<u8"), ("size", "<u4"), ("next_access_vtime", "<i8")])
"""A record of libCacheSim's oracleGeneral, 24 bytes, packed (its traceReader/customizedReader/oracle)."""

BLOCK = 1_000_000
"""Records that are linked at once."""

PHASES = ("prefill", "decode")
"""Names of traces.steps.PREFILL and DECODE."""


def export_oracle_general(trace: Trace, out: Path, expert_bytes: int = 1, overwrite: bool = True) -> int:
    """Write the accesses of `trace` as oracleGeneral; returns their number. Raises InputError.

    Requests follow each other; of a step (a prefill, or a decoded token) each layer's distinct experts are
    accessed one at a time in ascending id, as in untimed mode. time: the step, from 0; obj_id: layer * E + expert;
    size: `expert_bytes` (1: cache sizes count experts); next_access_vtime: the number of the object's next access,
    from 1 as libCacheSim counts them, -1 if there is none.
    """
    if not 1 <= expert_bytes < 2**32:
        raise InputError(f"--expert-bytes {expert_bytes} is no size that oracleGeneral holds (1 to 2^32 - 1)")
    with replacing(out, overwrite=overwrite) as temporary:
        total = steps = 0
        with temporary.open("wb") as file:
            for i in range(len(trace.requests)):
                request = trace.steps(i)
                records = np.zeros(len(request.experts), ORACLE_GENERAL)
                per_step = np.diff(request.offsets[:: trace.layers])
                records["time"] = np.repeat(np.arange(steps, steps + len(per_step)), per_step)
                records["obj_id"] = request.experts
                records["size"] = expert_bytes
                file.write(records.tobytes())  # `tofile` says nothing where the disk is full
                total, steps = total + len(records), steps + len(per_step)
        if total:
            _link(np.memmap(temporary, ORACLE_GENERAL, "r+"), trace.layers * trace.num_experts)
    return total


def export_csv(trace: Trace, out: Path, overwrite: bool = True) -> int:
    """Write `trace` as a table with a row for each choice of an expert; returns the number of rows.

    Columns: request (its id), task, phase, step, position, layer (number of the MoE layer, from 0), rank (place
    among the k of the token, as recorded), expert, and weight where it was recorded. Lines end as in RFC 4180.
    """
    written = 0
    ids, tasks = trace.requests["id"].tolist(), trace.requests["task"].tolist()
    with replacing(out, overwrite=overwrite) as temporary, temporary.open("w", encoding="utf-8", newline="") as file:
        for i, (first, end) in enumerate(zip(trace.offsets[:-1], trace.offsets[1:], strict=True)):
            experts = trace.experts[first:end]
            row, layer, rank = np.nonzero(experts != trace.sentinel)
            at = row + first
            columns: dict[str, Any] = {
                "request": ids[i],
                "task": tasks[i],
                "phase": np.array(PHASES)[trace.phase[at]],
                "step": trace.step[at],
                "position": trace.position[at],
                "layer": layer,
                "rank": rank,
                "expert": experts[row, layer, rank],
            }
            if trace.weights is not None:
                columns["weight"] = trace.weights[at, layer, rank].astype(np.float32)
            pd.DataFrame(columns).to_csv(file, index=False, header=i == 0, lineterminator="\r\n")
            written += len(row)
    return written


def export_npz(trace: Trace, out: Path, overwrite: bool = True) -> int:
    """Write `trace` as the arrays that traces.importers.plain reads, a JSON of facts beside; returns its tokens.

    Importing gives it back but for mode, tools, settings, scores and lookahead.
    """
    kind = np.int16 if trace.num_experts < 2**15 else np.int32
    experts = trace.experts.astype(kind)
    experts[trace.experts == trace.sentinel] = -1
    optional = {name: array for name in ("weights", "token_id", "hits") if (array := getattr(trace, name)) is not None}
    with (
        replacing(out, overwrite=overwrite) as temporary,
        replacing(json_beside(out), overwrite=overwrite) as facts,
    ):
        with temporary.open("wb") as file:
            np.savez_compressed(
                file,
                experts=experts,
                offsets=trace.offsets,
                phase=trace.phase,
                position=trace.position,
                step=trace.step,
                **optional,
            )
        facts.write_text(json.dumps(_facts(trace), ensure_ascii=False), encoding="utf-8")
    return len(experts)


FORMATS: dict[str, Callable[..., int]] = {
    "oracleGeneral": export_oracle_general,
    "csv": export_csv,
    "npz": export_npz,
}
"""What a trace can be written as."""


def json_beside(out: Path) -> Path:
    """Return where the facts of an exported .npz lie, and where `moe-trace import` looks for them."""
    return out.with_suffix(".json")


def check_target(out: Path, to: str, overwrite: bool) -> None:
    """Raise InputError if `out` cannot be written; make its folder."""
    suffix = PROFILES[to].suffix if to in PROFILES else ".npz" if to == "npz" else ""
    if not out.name.endswith(suffix):
        raise InputError(f"{out} must end in {suffix}, so that it can be read")
    make_folder(out.parent)
    for path in [out, json_beside(out)] if to == "npz" else [out]:
        check_file(path, overwrite)


def of_phase(trace: Trace, phase: str) -> Trace:
    """Return the rows of one phase, prefill or decode, or of both. Raises InputError if there are none."""
    refuse(
        (trace.aggregate is not None, f"{trace.name} holds EAMs only, no sequence of accesses that could be exported"),
        (phase != "both" and trace.phases not in (phase, "both"), f"{trace.name} holds no {phase}: leave --phase out"),
        (not len(trace.experts), f"{trace.name} holds no tokens"),
    )
    return trace if phase in ("both", trace.phases) else trace.of_phase(PHASES.index(phase))


def _facts(trace: Trace) -> dict[str, Any]:
    meta = trace.meta
    requests = [
        {key: value for key, value in row.items() if value not in (None, "")} | {"routed_tokens": rows}
        for row, rows in zip(
            trace.requests.drop(columns="mode").astype(object).replace({pd.NA: None}).to_dict("records"),
            np.diff(trace.offsets).tolist(),
            strict=True,
        )
    ]
    stated = asdict(meta) | {"moe_layers": meta.layers}
    names = [fact.name for fact in fields(Facts) if stated.get(fact.name) not in (None, ())]
    return {name: stated[name] for name in names} | {"requests": requests}


def _link(records: NDArray[Any], objects: int) -> None:
    """Fill in next_access_vtime, from the last record to the first."""
    upcoming = np.full(objects, -1, np.int64)
    for end in range(len(records), 0, -BLOCK):
        first = max(0, end - BLOCK)
        block = records[first:end]
        accessed = block["obj_id"].astype(np.int64)
        order = np.argsort(accessed, kind="stable")
        accessed = accessed[order]
        last = np.append(accessed[1:] != accessed[:-1], True)  # of its object, in the block
        following = np.empty(len(block), np.int64)
        following[order] = np.where(last, upcoming[accessed], first + 1 + np.roll(order, -1))
        block["next_access_vtime"] = following
        nearest = np.roll(last, 1)
        upcoming[accessed[nearest]] = first + 1 + order[nearest]
