"""The one long table that all rows become, and how it becomes routing by request, token and layer.

A row is a token's choice in a layer, one expert of it, or a count. Experts of a row are one id, a list ("1;5;9",
"[1, 5]"), numbered columns e0, e1, ..., or a weight for each expert. What belongs to one token follows from the columns
request, step and token where they are there, and by the order in the file where they are not, or start again.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from traces.defects import Routing
from traces.errors import InputError
from traces.files import unpacked_name
from traces.importers.cells import FLOAT16, INT32, UINT32, Place, fits, labels, lists, numbers, parsed
from traces.importers.dump import Counts
from traces.importers.source import Request, Source
from traces.importers.words import fact, layer_number, phase_of, plain
from traces.steps import DECODE, PREFILL

Int = NDArray[Any]
KEYS = ("step", "token")
NUMBERS = dict.fromkeys((*KEYS, "slot", "count"), (0, UINT32)) | {"token_id": (-1, INT32)}
"""Roles of columns of whole numbers, and their ranges. A column of other texts has none of these roles."""
MOST = 65_534
"""The largest number of a layer or expert of which counts are kept."""
Frames = Sequence[tuple[Path, pd.DataFrame]]
"""The rows of files; their index is what people call the rows."""


def routing_of(frames: Frames, source: Source) -> Routing | Counts:
    """Return what the rows of files hold. Raises InputError where a role is missing or a cell is invalid."""
    frame, found = _joined([(path, _without_facts(frame, source)) for path, frame in frames], source)
    there = ", ".join(map(str, frame.columns))
    columns = {role: _column(frame, role, name) for role, name in found.items() if role not in ("expert", "weight")}
    for role, name in source.columns.stated.items():
        if name and role not in found:
            if not name.isdecimal():
                raise InputError(f"{source.path} has no column {name!r}; there are: {there}")
            columns[role] = np.full(len(frame), int(name))
    if "layer" not in columns:
        raise InputError(
            f"{source.path} does not say the layer of its rows: name its column with --columns layer=NAME, state the "
            f"layer as --columns layer=7, or put it into the file's name as layer7; there are: {there}"
        )
    single = "expert" in found and fits(frame[found["expert"]])
    counted = single and ("count" in columns or not {*KEYS, "slot", "request", "phase"} & columns.keys())
    experts, weights = (None, None) if counted else _experts(frame, found, source)
    said = ", ".join(role if role == column else f"{role} is {column}" for role, column in found.items())
    source.found.append(f"counts: {said}" if counted else said)
    if experts is None:
        return _counts(columns, frame[found["expert"]], _place(frame, found["expert"]), source)
    return _dump(columns, experts, weights, _stem(frames[0][0]), source)


def _column(frame: pd.DataFrame, role: str, name: str) -> NDArray[Any]:
    """Return a column as numbers, phases or texts, by its role. Raises InputError for the first invalid cell."""
    cells, place = frame[name], _place(frame, name)
    if role in NUMBERS:
        return numbers(cells, place, *NUMBERS[role])
    if role == "phase":
        why = "neither prefill nor decode: say --phase, or --columns phase=NAME"
        return parsed(cells, place, lambda text: phase_of(text, name), why).astype(np.uint8)
    if role == "layer":
        why = f"no layer from 0 to {MOST}: --columns layer=NAME names another"
        return parsed(cells, place, lambda text: n if (n := layer_number(text)) in range(MOST + 1) else None, why)
    return parsed(cells.where(labels(cells)), place, lambda text: text or None, "no name").astype(object)


def _place(frame: pd.DataFrame, name: str) -> Place:
    """Return how to say where a cell of a column stands."""

    def place(row: int) -> str:
        file, line = frame.index[row]
        axes = [key for key in ("layer", "token") if "#record" in frame and key in frame and key != name]
        beside = "".join(f", {key} {frame[key].iloc[row]}" for key in axes)
        return f"{file}, row {line}{beside}, column {name!r}"

    return place


def _stem(path: Path) -> str:
    return unpacked_name(path).stem


def _without_facts(frame: pd.DataFrame, source: Source) -> pd.DataFrame:
    """Return a frame without columns that state one fact in all rows, such as top_k."""
    frame, stated = frame.rename(columns=str), source.columns.stated.values()
    known = {name: fact(name) for name in frame.columns if name not in stated and len(frame)}
    facts = {name: what for name, what in known.items() if what and labels(frame[name]).all()}
    facts = {name: what for name, what in facts.items() if frame[name].map(str).nunique() == 1}
    for name, what in facts.items():
        value = frame[name].iloc[0]
        source.stated.setdefault(what, int(value) if str(value).isdecimal() else value)
    beside = [name for name in frame.columns if name[:1] == "#" and name != "#record"]
    return frame.drop(columns=[*facts, *beside])


def _joined(frames: Frames, source: Source) -> tuple[pd.DataFrame, dict[str, str]]:
    """Return the rows of all files, and the column of each role. Files of other layers each have the same tokens."""
    placed = {str(path): _placed(_stem(path), frame, source) for path, frame in frames}
    whole = pd.concat(placed)
    found = _found(whole, source)
    if len(frames) == 1:
        return whole, found
    whole["#file"] = np.repeat([_stem(path) for path, _ in frames], list(map(len, placed.values())))
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
        role, cells = source.columns.role(name), frame[name]
        if role in ("expert", "weight") or (role and name in source.columns.stated.values()):
            fitting.append(name)
        elif role in NUMBERS:
            of_ids = role == "token_id" and labels(cells).any()  # such a name is of nothing else
            fitting += [name] if of_ids or fits(cells) else []
        elif role:
            named = cells.map(lambda cell: phase_of(str(cell)) is not None) if plain(name) == "stage" else labels(cells)
            fitting += [name] if 2 * named.sum() >= len(cells) else []
    return source.columns.pick(fitting)


def _experts(frame: pd.DataFrame, found: dict[str, str], source: Source) -> tuple[Int, NDArray[np.float64] | None]:
    """Return experts [n, k], -1 behind the last, and weights [n, k] if there are any. Raises InputError."""
    names, weighted = (source.columns.numbered(frame.columns, role) for role in ("expert", "weight"))

    def table(names: Sequence[str], least: float, most: float, real: bool = False) -> NDArray[Any]:
        return np.stack([numbers(frame[name], _place(frame, name), least, most, real) for name in names], axis=1)

    weights: NDArray[np.float64] | None = None
    if names and found.get("expert") not in source.columns.stated.values():
        found["expert"] = f"{names[0]} to {names[-1]}"
        shown = frame[names].apply(pd.to_numeric, errors="coerce").to_numpy(np.float64)  # to choose how to read them
        one_hot = len(names) > 2 and 2 * ((shown == 0) | (shown == 1)).all(axis=1).sum() > len(frame)
        if one_hot or 2 * (np.abs(np.modf(shown)[0]) > 0).any(axis=1).sum() > len(frame):
            found["expert"] += ", a weight for each of all experts"
            source.stated.setdefault("experts", len(names))
            values = table(names, 0, 1 if one_hot else FLOAT16, real=True)
            k = max(1, int((values != 0).sum(axis=1).max()))
            order = np.argsort(-values, axis=1, kind="stable")[:, :k]
            weights = np.take_along_axis(values, order, axis=1)
            return np.where(weights != 0, order, -1).astype(np.int64), weights
        experts = table(names, -1, UINT32)
        weights = table(weighted, -FLOAT16, FLOAT16, real=True) if weighted else None
    elif "expert" in found:
        name, weight = found["expert"], found.get("weight")
        experts = lists(frame[name], _place(frame, name), -2, -1)
        if weight is not None:
            weights = lists(frame[weight], _place(frame, weight), np.nan, -FLOAT16, FLOAT16, real=True)
            other = (experts != -2).sum(axis=1) != (~np.isnan(weights)).sum(axis=1)
            if other.any() and 2 * other.sum() <= len(frame):
                raise InputError(f"{_place(frame, weight)(int(other.argmax()))}: not as many weights as experts")
            weights = np.nan_to_num(weights)
    else:
        there = ", ".join(map(str, frame.columns))
        raise InputError(f"no experts in {source.path}: name them with --columns expert=NAME; there are: {there}")
    if unrouted := int((experts == -1).sum()):
        source.notes.append(f"{unrouted} expert ids are -1: nothing was routed there")
    return np.maximum(experts, -1), weights if weights is not None and weights.shape == experts.shape else None


def _counts(columns: dict[str, NDArray[Any]], cells: "pd.Series[Any]", place: Place, source: Source) -> Counts:
    """Return rows of layer, expert and count, 1 where there is none, as counts by request."""
    E = source.agreed("experts")
    expert = numbers(cells, place, 0, MOST if E is None else E - 1)
    E = E or source.experts_of(expert)
    count = columns.get("count", np.ones(len(expert), np.int64))
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
        counted = np.unique(columns["token_id"][layer == layer[0]])
        if len(counted) > 1 and np.array_equal(counted, np.arange(len(counted))):  # it is no id: it counts the tokens
            columns["token"] = columns.pop("token_id")
    phase = columns.get("phase")
    request, names = pd.factorize(columns.get("request", np.zeros(len(experts), np.int64)))
    keys = {key: columns[key] for key in KEYS if key in columns}
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
        token_id=columns["token_id"][first].astype(np.int32) if "token_id" in columns else None,
        layers=tuple(layers.tolist()),
        restarts=np.setdiff1d(again_at, offsets).astype(np.int64),
    )


def _before(frame: pd.DataFrame) -> Int:
    """Return how often each row was there before."""
    return frame.groupby(list(frame.columns), sort=False).cumcount().to_numpy()


def _slots(cells: pd.DataFrame, slot: NDArray[Any] | None) -> tuple[Int, Int]:
    """Return of rows with one expert each its place among the token's k, and how often the place was there before."""
    if slot is not None:
        slots, number = np.unique(slot, return_inverse=True)
        if slots[-1] - slots[0] >= len(slots):
            raise InputError(f"slots are not consecutive: {', '.join(map(str, slots[-9:]))}")
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
