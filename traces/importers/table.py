"""The one long table that all rows become, and how it becomes routing by request, token and layer.

A row is a token's choice in a layer, one expert of it, or a count. Experts of a row are one id, a list ("1;5;9",
"[1, 5]"), numbered columns e0, e1, ..., or a weight for each expert. What belongs to one token follows from the columns
request, step and token where they are there, and by the order in the file where they are not, or start again.
"""

import re
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from traces.defects import Routing
from traces.errors import InputError
from traces.importers.dump import Counts
from traces.importers.source import Request, Source
from traces.importers.words import fact, layer_number, phase_codes
from traces.steps import DECODE, PREFILL

Int = NDArray[Any]
KEYS = ("step", "token")


def routing_of(frames: Sequence[tuple[str, pd.DataFrame]], source: Source) -> Routing | Counts:
    """Return what the rows of files hold, each with its name. Raises InputError where a role is missing."""
    frame, found = _joined([(name, _without_facts(frame, source)) for name, frame in frames], source)
    there = ", ".join(map(str, frame.columns))
    columns = {role: frame[name].to_numpy() for role, name in found.items() if role not in ("expert", "weight")}
    for role, name in source.columns.stated.items():
        if name and role not in found:
            if not name.isdigit():
                raise InputError(f"{source.path} has no column {name!r}; there are: {there}")
            columns[role] = np.full(len(frame), int(name))
    if "layer" not in columns:
        raise InputError(
            f"{source.path} does not say the layer of its rows: name its column with --columns layer=NAME, state the "
            f"layer as --columns layer=7, or put it into the file's name as layer7; there are: {there}"
        )
    columns["layer"] = _layers(columns["layer"], source)
    single = "expert" in found and pd.api.types.is_numeric_dtype(frame[found["expert"]])
    counted = single and ("count" in columns or not {*KEYS, "slot", "request", "phase"} & columns.keys())
    experts, weights = (frame[found["expert"]].to_numpy(), None) if counted else _experts(frame, found, source)
    said = ", ".join(role if role == column else f"{role} is {column}" for role, column in found.items())
    source.found.append(f"counts: {said}" if counted else said)
    if counted:
        return _counts(columns, experts.astype(np.int64), source)
    return _dump(columns, experts, weights, frames[0][0], source)


def _without_facts(frame: pd.DataFrame, source: Source) -> pd.DataFrame:
    """Return a frame without columns that state one fact in all rows, such as top_k."""
    frame, stated = frame.rename(columns=str), source.columns.stated.values()
    known = {name: fact(name) for name in frame.columns if name not in stated and len(frame)}
    facts = {name: what for name, what in known.items() if what and np.ndim(frame[name].iloc[0]) == 0}
    facts = {name: what for name, what in facts.items() if frame[name].nunique() == 1}
    for name, what in facts.items():
        source.stated.setdefault(what, frame[name].iloc[0])
    beside = [name for name in frame.columns if name[0] == "#" and name != "#record"]
    return frame.drop(columns=[*facts, *beside])


def _joined(frames: list[tuple[str, pd.DataFrame]], source: Source) -> tuple[pd.DataFrame, dict[str, str]]:
    """Return the rows of all files, and the column of each role. Files of other layers each have the same tokens."""
    placed = [_placed(name, frame, source) for name, frame in frames]
    if len(frames) == 1:
        return placed[0], _found(placed[0], source)
    file = np.repeat([name for name, _ in frames], list(map(len, placed)))
    whole = pd.concat(placed, ignore_index=True).assign(**{"#file": file})
    found = _found(whole, source)
    layer, request = found.get("layer"), found.get("request")
    apart = layer is not None and (whole.groupby(layer)["#file"].nunique() == 1).all()
    keys = [found[role] for role in ("request", "phase", *KEYS, "layer") if role in found]
    cut = request and len(keys) > 2 and not whole.drop_duplicates([*keys, "#file"]).duplicated(keys).any()
    kind = "layers of the same tokens" if apart else "one table in parts" if cut else "requests of their own"
    source.found.append(f"{len(frames)} files: {kind}")
    if not apart and not cut:
        request = request or "#file"
        several = whole.groupby("#file")[request].transform("nunique") > 1
        own = np.where(several, whole["#file"] + "-" + whole[request].astype(str), whole["#file"])
        whole = whole.drop(columns=request).assign(request_id=own)
    return whole.drop(columns="#file", errors="ignore"), _found(whole, source)


def _placed(name: str, frame: pd.DataFrame, source: Source) -> pd.DataFrame:
    """Return the rows of a file with their layer, where its name states it, and with named axes."""
    if "axis0" in frame.columns:
        frame = frame.rename(columns=_named_axes(frame, source))
    found, named = _found(frame, source), layer_number(name)
    own = found.get("layer")
    if named is not None and (own is None or (named and set(frame[own].astype(str)) == {"0"})):
        source.found.append("the layer is from the file's name")
        frame = frame.drop(columns=[own] if own else []).assign(layer=named)
    # the place in a list is the token, so a record is a request
    listed = found.get("token") == "token" and "#record" in frame.columns and not {"request", "step"} & found.keys()
    if listed and frame["#record"].nunique() > 1:
        tokens = frame[["#record", "token"]].drop_duplicates()
        if not (tokens["#record"].is_unique and tokens["token"].is_unique):  # else it numbers the records
            frame = frame.rename(columns={"#record": "request"})
    return frame


def _named_axes(frame: pd.DataFrame, source: Source) -> dict[str, str]:
    """Return which of two axes of lists is the layer: as stated, or the one that is as long in all records."""
    if source.options.axes is not None:
        order = [each.strip() for each in source.options.axes.split(",")]
        return dict(zip(("axis0", "axis1"), order, strict=True))
    sizes = frame.groupby("#record")[["axis0", "axis1"]].max() + 1
    layers = source.agreed("layers") or source.agreed("moe_layers")
    fixed = [axis for axis in sizes if (sizes[axis] == (layers or sizes[axis].iloc[0])).all()]
    if len(fixed) != 1:
        raise InputError(
            f"{source.path} has lists [{sizes['axis0'].iloc[0]}, {sizes['axis1'].iloc[0]}, k] and nothing says which "
            "axis is the layer: say --axes token,layer or --axes layer,token"
        )
    return {"axis0": "layer", "axis1": "token"} if fixed == ["axis0"] else {"axis0": "token", "axis1": "layer"}


def _found(frame: pd.DataFrame, source: Source) -> dict[str, str]:
    """Return the column of each role that can have it: texts are no tokens, lists no keys."""
    fitting = []
    for name in frame.columns:
        role = source.columns.role(name)
        first: Any = next((one for one in frame[name] if one is not None and one is not pd.NA), "") if role else ""
        lists = np.ndim(first) > 0 or (isinstance(first, dict))
        numbers = role in ("token", "token_id", "step", "slot", "count")
        if role in ("expert", "weight") or (
            role and not lists and not (numbers and pd.to_numeric(frame[name], errors="coerce").isna().any())
        ):
            fitting.append(name)
    return source.columns.pick(fitting)


def _experts(frame: pd.DataFrame, found: dict[str, str], source: Source) -> tuple[Int, NDArray[np.float64] | None]:
    """Return experts [n, k], -1 behind the last, and weights [n, k] if there are any. Raises InputError."""
    names, weighted = (source.columns.numbered(frame.columns, role) for role in ("expert", "weight"))
    weights: NDArray[np.float64] | None = None
    if names and found.get("expert") not in source.columns.stated.values():
        found["expert"] = f"{names[0]} to {names[-1]}"
        values = frame[names].to_numpy(np.float64)
        one_hot = len(names) > 2 and set(np.unique(values)) == {0, 1} and len(np.unique(values.sum(axis=1))) == 1
        if one_hot or (not np.isnan(values).any() and (values % 1).any()):
            found["expert"] += ", a weight for each of all experts"
            source.stated.setdefault("experts", len(names))
            k = max(1, int((values != 0).sum(axis=1).max()))
            order = np.argsort(-values, axis=1, kind="stable")[:, :k]
            weights = np.take_along_axis(values, order, axis=1)
            return np.where(weights != 0, order, -1).astype(np.int64), weights
        experts = np.where(np.isnan(values), -1, values).astype(np.int64)
        weights = frame[weighted].to_numpy(np.float64) if weighted else None
    elif "expert" in found:
        experts = _lists(frame[found["expert"]], -1).astype(np.int64)
        weights = _lists(frame[found["weight"]], 0.0) if "weight" in found else None
    else:
        there = ", ".join(map(str, frame.columns))
        raise InputError(f"no experts in {source.path}: name them with --columns expert=NAME; there are: {there}")
    return experts, weights if weights is not None and weights.shape == experts.shape else None


def _lists(values: "pd.Series[Any]", fill: float) -> NDArray[np.float64]:
    """Return numbers, lists of them or texts of lists as an array [n, k], filled up."""
    if pd.api.types.is_numeric_dtype(values):
        return values.fillna(fill).to_numpy(np.float64)[:, None]
    rows: list[Any] = values.tolist()
    if any(isinstance(row, str) for row in rows[:1]):
        rows = [[float(one) for one in re.findall(r"-?\d+(?:\.\d+)?(?:[eE]-?\d+)?", str(row))] for row in rows]
    rows = [list(row) if np.ndim(row) else [] if pd.isna(row) else [row] for row in rows]
    filled = np.array(list(zip_longest(*rows, fillvalue=fill)), np.float64)
    return filled.T if filled.size else np.full((len(rows), 1), fill)


def _layers(values: NDArray[Any], source: Source) -> Int:
    names, place = np.unique(values.astype(str), return_inverse=True)
    numbers = [layer_number(name) for name in names]
    if None in numbers:
        raise InputError(
            f"{source.path}: layer {names[numbers.index(None)]!r} has no number: --columns layer=NAME names another"
        )
    return np.array(numbers, np.int64)[place]


def _numbers(values: NDArray[Any]) -> Int:
    """Return a column as whole numbers: as they are, else in the order of their first appearance."""
    numbers = pd.to_numeric(pd.Series(values), errors="coerce")
    return numbers.to_numpy(np.int64) if numbers.notna().all() else pd.factorize(values)[0].astype(np.int64)


def _counts(columns: dict[str, NDArray[Any]], expert: Int, source: Source) -> Counts:
    """Return rows of layer, expert and count, 1 where there is none, as counts by request."""
    count = _numbers(columns["count"]) if "count" in columns else np.ones(len(expert), np.int64)
    E = source.agreed("experts") or source.experts_of(expert)
    request, names = pd.factorize(columns.get("request", np.full(len(expert), source.stem)))
    counts = np.zeros((len(names), int(columns["layer"].max()) + 1, E), np.int64)
    np.add.at(counts, (request, columns["layer"], expert), count)
    requests = source.requests([Request(id=str(name)) for name in names])
    return Counts(counts, requests, tuple(np.unique(columns["layer"]).tolist()))


def _dump(columns: dict[str, NDArray[Any]], experts: Int, weights: Any, name: str, source: Source) -> Routing:
    """Return rows as routing by request."""
    layers: Any
    layers, layer = np.unique(columns["layer"], return_inverse=True)
    if "token_id" in columns and not columns.keys() & set(KEYS):
        counted = np.unique(_numbers(columns["token_id"])[layer == layer[0]])
        if len(counted) > 1 and np.array_equal(counted, np.arange(len(counted))):  # it is no id: it counts the tokens
            columns["token"] = columns.pop("token_id")
    phase = phase_codes(columns["phase"], "phase") if "phase" in columns else None
    request, names = pd.factorize(columns.get("request", np.zeros(len(experts), np.int64)))
    keys = {key: _numbers(columns[key]) for key in KEYS if key in columns}
    frame = pd.DataFrame({"request": request, **({} if phase is None else {"phase": phase}), **keys})
    cells = frame.assign(layer=layer)
    slot: Any = np.arange(experts.shape[1])[None]
    if experts.shape[1] == 1 and (keys or "slot" in columns):  # a row for each expert
        slot, again = _slots(cells, columns.get("slot"))
        slot = slot[:, None]
    else:
        again = _before(cells)
    restarts = bool(keys) and bool(again.any())
    frame["again"] = again
    token = frame.groupby(list(frame.columns), sort=False).ngroup().to_numpy()
    first = np.unique(token, return_index=True)[1]  # the first row of each token, in the order of the file
    rows: Any = frame.iloc[first]
    order_by = [] if restarts else list(keys) or ["again"]
    if phase is not None and not restarts and rows.duplicated(["request", *order_by]).any():
        order_by = ["phase", *order_by]
    order = np.lexsort((*(rows[key] for key in reversed(order_by)), request[first]))
    first, place = first[order], np.argsort(order)
    at = place[token][:, None], layer[:, None], slot
    ids = np.full((len(first), len(layers), int(slot.max()) + 1), -1, np.int64)
    ids[at] = experts
    held = None
    if weights is not None:
        held = np.zeros(ids.shape, np.float16)
        held[at] = weights
    phases = phase[first] if phase is not None else _phases(frame.iloc[first])
    starts = np.diff(request[first]) != 0
    if phases is not None:
        starts |= (phases[1:] == PREFILL) & (phases[:-1] == DECODE)
    elif not starts.any():
        starts |= _sequences(name, len(first), source)
    offsets = np.concatenate([[0], np.flatnonzero(starts) + 1, [len(first)]]).astype(np.int64)
    own = pd.Series([str(names[each]) for each in request[first][offsets[:-1]]])
    if "request" not in columns:
        own = pd.Series(range(len(own))).astype(str)
    labels = own.where(~own.duplicated(keep=False), own + "-" + own.index.astype(str))
    index = keys.get("token", keys.get("step"))
    again_at: Any = np.flatnonzero(np.diff(index[first]) <= 0) + 1 if restarts and index is not None else []
    return Routing(
        ids,
        offsets,
        source.requests([Request(id=label) for label in labels]),
        phase=phases,
        weights=held,
        token_id=_numbers(columns["token_id"])[first].astype(np.int32) if "token_id" in columns else None,
        layers=tuple(layers.tolist()),
        restarts=np.setdiff1d(again_at, offsets).astype(np.int64),
    )


def _before(frame: pd.DataFrame) -> Int:
    """Return how often each row was there before."""
    return frame.groupby(list(frame.columns), sort=False).cumcount().to_numpy()


def _slots(cells: pd.DataFrame, slot: NDArray[Any] | None) -> tuple[Int, Int]:
    """Return of rows with one expert each its place among the token's k, and how often the place was there before."""
    if slot is not None:
        number = np.unique(_numbers(slot), return_inverse=True)[1]
        return number, _before(cells.assign(slot=number))
    starts = np.flatnonzero((cells.diff() != 0).any(axis=1))  # of runs of one cell
    lengths = np.diff(np.append(starts, len(cells)))
    if cells.groupby(list(cells.columns), sort=False).size().nunique() == 1 or len(np.unique(lengths)) > 1:
        return _before(cells), np.zeros(len(cells), np.int64)  # a choice is what has one key
    run = np.repeat(np.arange(len(starts)), lengths)
    return np.arange(len(cells)) - starts[run], _before(cells.iloc[starts])[run]


def _phases(rows: pd.DataFrame) -> NDArray[np.uint8] | None:
    """Return the phase of each token, where steps have several tokens: those are prefills. None: unknown."""
    if not set(KEYS) <= set(rows.columns):
        return None
    tokens = rows.groupby(["request", "step"])["step"].transform("size").to_numpy()
    return None if (tokens == 1).all() else np.where(tokens > 1, PREFILL, DECODE).astype(np.uint8)


def _sequences(name: str, tokens: int, source: Source) -> NDArray[np.bool_]:
    """Return where requests begin, [tokens - 1], if the file's name states how many of one length it has: `32seqs`."""
    stated = re.search(r"(\d+)seqs", name)
    length = tokens // int(stated[1]) if stated and int(stated[1]) and tokens % int(stated[1]) == 0 else tokens
    if length < tokens:
        source.found.append(f"{tokens // length} requests of {length} tokens: from the file's name")
    return np.asarray(np.arange(1, tokens) % length == 0)
