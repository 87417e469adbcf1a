"""The one long table that all rows become, and how it becomes routing by request, token and layer.

A row is a token's choice in a layer, one expert of it, or a count. What belongs to one token follows from the columns
request, step and token, and from the order in the file where they are not there, or start again. The values of a column
are held against what its name says: one that contradicts is left to another role, or is a question that names the
option.
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
from traces.importers.cells import CUT, FLOAT16, INT32, UINT32, Place, fits, labels, lists, numbers, parsed
from traces.importers.dump import Counts
from traces.importers.source import Request, Source
from traces.importers.words import (
    ANSWERS,
    HIT_ROLES,
    PHASE_ROLES,
    STACKS,
    Columns,
    answer_of,
    fact,
    layer_name,
    layer_number,
    phase_of,
    plain,
)
from traces.steps import DECODE, PREFILL

Int = NDArray[Any]
KEYS = ("step", "token")
NUMBERS = dict.fromkeys((*KEYS, "slot", "count"), (0, UINT32)) | {"token_id": (-1, INT32)}
"""Roles of columns of whole numbers, and their ranges. A column of other texts has none of these roles."""
EMPTY = {"experts": -1, "weights": 0, "hits": -1}
"""What stands where a token has no expert."""
PER_EXPERT = ("weight", *HIT_ROLES)
"""Roles of what stands beside each expert of a choice."""
SHARES = "; if these are shares, --columns share={} keeps them in proportion"
SCALE = 1_000_000
"""Choices of a layer as which shares are kept."""
MOST = 65_534
"""The largest number of a layer or expert of which counts are kept."""
LEVELS = {*ANSWERS, "1.0", "0.0", "2", "3"}
"""What says whether, or in which memory, an expert was."""
Frames = Sequence[tuple[Path, pd.DataFrame]]
"""The rows of files; their index is what people call the rows."""


def routing_of(frames: Frames, source: Source) -> Routing | Counts:
    """Return what the rows of files hold. Raises InputError where a role is missing or a cell is invalid."""
    frame, found = _joined([(path, _without_facts(frame, source)) for path, frame in frames], source)
    there = ", ".join(map(str, frame.columns))
    columns = {
        role: _column(frame, role, name, source) for role, name in found.items() if role not in ("expert", *PER_EXPERT)
    }
    for role, name in source.columns.stated.items():
        if name and role not in found:
            if not name.isdecimal():
                raise InputError(f"{source.path} has no column {name!r}; there are: {there}")
            columns[role] = np.full(len(frame), int(name))
    phases = [role for role in PHASE_ROLES if role in columns]
    if phases:
        columns["phase"] = columns[phases[0]]
    if "layer" not in columns:
        raise InputError(
            f"{source.path} does not say the layer of its rows: name its column with --columns layer=NAME, state the "
            f"layer as --columns layer=7, or put it into the file's name as layer7; there are: {there}"
        )
    single = "expert" in found and fits(frame[found["expert"]])
    counted = single and (
        bool({"count", "share"} & columns.keys()) or not {*KEYS, "slot", "request", "phase"} & columns.keys()
    )
    used = set(found.values())
    if counted and len(set(columns.get("slot", ()))) == 1:  # counts have no slots: `k` says how many experts are chosen
        del found["slot"]
        source.stated.setdefault("top_k", int(columns["slot"][0]))
    chosen = {} if counted else _experts(frame, found, used, source)
    said = ", ".join(role if role == column else f"{role} is {column}" for role, column in found.items())
    source.found.append(f"counts: {said}" if counted else said)
    if unused := [str(name) for name in frame.columns if name not in used and str(name)[:1] != "#"]:
        source.found.append(f"columns that are not used: {', '.join(unused)}")
    if counted:
        return _counts(columns, frame[found["expert"]], _place(frame, found["expert"]), found, source)
    asked = found["phase"] if phases == ["phase"] and "phase" in found and fits(frame[found["phase"]]) else None
    if asked is not None:
        source.notes.append(f"{asked} is a number: 0 is taken as the prompt (--columns is_prefill={asked} if 1 is)")
    return _dump(columns, chosen, _stem(frames[0][0]), asked, source)


def _column(frame: pd.DataFrame, role: str, name: str, source: Source) -> NDArray[Any]:
    """Return a column as numbers, phases or texts, by its role. Raises InputError for the first invalid cell."""
    cells, place = frame[name], _place(frame, name)
    if role in NUMBERS:
        fractions = any("." in str(cell).rstrip(".0") for cell in cells.unique()) if role == "count" else False
        return numbers(cells, place, *NUMBERS[role], hint=SHARES.format(name) * (role == "count" and fractions))
    if role == "share":
        return numbers(cells, place, 0, real=True)
    if role in PHASE_ROLES:
        asked = Columns().role(name) if role == "phase" else role  # `phase=is_prefill` names a question
        role = str(asked) if asked in PHASE_ROLES else role
        why = "neither prefill nor decode: say --phase, or --columns phase=NAME"
        return parsed(cells, place, lambda text: phase_of(text, role), why).astype(np.uint8)
    if role == "layer":
        why = f"no layer from 0 to {MOST}: --columns layer=NAME names another"
        number = parsed(cells, place, lambda text: n if (n := layer_number(text)) in range(MOST + 1) else None, why)
        return _by_stack(cells.astype(str), number, source)
    return parsed(cells.where(labels(cells)), place, lambda text: text or None, "no name").astype(object)


def _by_stack(cells: "pd.Series[str]", number: Int, source: Source) -> Int:
    """Return the layers of several stacks, such as encoder and decoder, numbered through; those of one as they are."""
    names = {text: layer_name(text) or ("", 0) for text in cells.unique()}
    stacks = list(dict.fromkeys(stack for stack, _ in names.values()))
    if len(stacks) < 2:
        return number
    stacks.sort(key=lambda stack: "encoder" not in stack.lower())
    order = sorted({*names.values()}, key=lambda layer: (stacks.index(layer[0]), layer[1]))
    first = {layer: text for text, layer in reversed(names.items())}
    source.stated["layer_names"] = tuple(first[layer] for layer in order)
    source.found.append(f"{len(order)} layers of {len(stacks)} stacks, each with numbers of its own")
    return np.asarray(cells.map({text: order.index(layer) for text, layer in names.items()}), np.int64)


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
    whole = _stacked(pd.concat(placed), source)
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


def _stacked(frame: pd.DataFrame, source: Source) -> pd.DataFrame:
    """Return rows whose layers are of the encoder or the decoder, where a column says so, with both in one name."""
    layer = _found(frame, source).get("layer")
    column = next((name for name in frame.columns if set(frame[name].map(str).str.lower()) == STACKS), None)
    if layer is None or column is None:
        return frame
    stack = frame[column].str.lower()
    if not {*PHASE_ROLES} & _found(frame, source).keys() and source.phase is None:
        frame = frame.assign(phase=np.where(stack == "encoder", "prefill", "decode"))
    frame[layer] = stack + ".layers." + frame[layer].map(str)
    return frame.drop(columns=column)


def _placed(name: str, frame: pd.DataFrame, source: Source) -> pd.DataFrame:
    """Return the rows of a file with their layer, where its name states it, and with named axes."""
    if "axis0" in frame.columns:
        frame = frame.rename(columns=_named_axes(frame, source))
    frame = _by_expert(frame, source)
    found, named = _found(frame, source), layer_number(name)
    own = found.get("layer")
    if named is not None and (own is None or (named and set(frame[own].astype(str)) == {"0"})):
        source.found.append("the layer is from the file's name")
        stack = next((f"{stack}.layers." for stack in STACKS if stack in name.lower()), "")
        frame = frame.drop(columns=[own] if own else []).assign(layer=f"{stack}{named}" if stack else named)
    # the place in a list is the token, so a record is a request
    listed = found.get("token") == "token" and "#record" in frame.columns and not {"request", "step"} & found.keys()
    if listed and frame["#record"].nunique() > 1:
        tokens = frame[["#record", "token"]].drop_duplicates()
        if not (tokens["#record"].is_unique and tokens["token"].is_unique):  # else it numbers the records
            frame = frame.rename(columns={"#record": "request"})
    return frame


def _by_expert(frame: pd.DataFrame, source: Source) -> pd.DataFrame:
    """Return a row for each expert, where rows hold counts of all: in a list, or in numbered columns."""
    columns = source.columns
    picked, names = columns.pick(frame.columns), columns.numbered(frame.columns, "expert")
    for role in ("count", "share") if "expert" not in picked and not names else ():
        names = columns.numbered(frame.columns, role) or ([picked[role]] if role in picked else [])
        values = [[cell for name in names for cell in _parts(row[name])] for row in frame[names].to_dict("records")]
        if values and min(map(len, values)) > 1:
            listed: dict[str, Any] = {role: values, "expert": [list(range(len(row))) for row in values]}
            return frame.drop(columns=names).assign(**listed).explode([role, "expert"])
    return frame


def _parts(cell: Any) -> list[Any]:
    """Return the cells of a list, or of a text of one."""
    if isinstance(cell, str):
        return CUT.split(cell.strip("[] "))
    return list(cell) if isinstance(cell, list | np.ndarray) else [cell]


def _named_axes(frame: pd.DataFrame, source: Source) -> dict[str, str]:
    """Return which of two axes of lists is the layer: as stated, or the one that is as long in all records."""
    if source.options.axes is not None:
        order = [each.strip() for each in source.options.axes.split(",")]
        return dict(zip(("axis0", "axis1"), order, strict=True))
    sizes = frame.groupby("#record")[["axis0", "axis1"]].max() + 1
    layers = source.agreed("layers") or source.agreed("moe_layers")
    fixed = [axis for axis in sizes if (sizes[axis] == (layers or sizes[axis].iloc[0])).all()]
    if len(fixed) != 1:
        raise InputError(f"{source.path}: which axis is the layer? say --axes token,layer or --axes layer,token")
    return {"axis0": "layer", "axis1": "token"} if fixed == ["axis0"] else {"axis0": "token", "axis1": "layer"}


def _found(frame: pd.DataFrame, source: Source) -> dict[str, str]:
    """Return the column of each role: of those of its names whose values fit it."""
    roles = {name: source.columns.role(name) for name in frame.columns}
    stated = source.columns.stated.values()
    return source.columns.pick(n for n, role in roles.items() if role and (n in stated or _fits(frame[n], role, n)))


def _fits(cells: "pd.Series[Any]", role: str, name: str) -> bool:
    """Return whether most values of a column can be of a role: texts are no tokens, lists no keys."""
    if role in NUMBERS or role == "share":
        return fits(cells) or (role == "token_id" and bool(labels(cells).any()))  # such a name is of nothing else
    if role in HIT_ROLES:
        return fits(cells, lambda text: not text or all(one in LEVELS for one in CUT.split(text.strip("[] ").lower())))
    if role in PHASE_ROLES and not re.match("phase|is", plain(name)):
        return fits(cells, lambda text: phase_of(text, role) is not None)
    return role in ("expert", "weight") or 2 * int(labels(cells).sum()) >= len(cells)


def _experts(frame: pd.DataFrame, found: dict[str, str], used: set[str], source: Source) -> dict[str, NDArray[Any]]:
    """Return experts [n, k], -1 behind the last, and what stands beside each: weights, hits (-1: not said).

    used: columns that are, which gets more. Raises InputError.
    """
    names = {role: source.columns.numbered(frame.columns, role) for role in ("expert", *PER_EXPERT)}
    for role in names.keys() & found.keys():
        if not names[role] or found[role] in source.columns.stated.values():
            names[role] = [found[role]]
    of_experts, of_weights = names["expert"], names["weight"]

    def read(role: str, fill: float, least: float, most: float, real: bool = False) -> NDArray[Any]:
        used.update(names[role])
        parts = []
        for name in names[role]:
            cells, place = frame[name].map(_answers) if role in HIT_ROLES else frame[name], _place(frame, name)
            if len(names[role]) > 1:
                parts.append(numbers(cells, place, least, most, real)[:, None])
            else:
                parts.append(lists(cells, place, fill, least, most, real))
        return np.concatenate(parts, axis=1)

    of_all, one_hot = "weight" if not of_experts else "", False
    if len(of_experts) > 1:
        found["expert"] = f"{of_experts[0]} to {of_experts[-1]}"
        shown = frame[of_experts].apply(pd.to_numeric, errors="coerce").to_numpy(np.float64)  # to choose how to read
        one_hot = len(of_experts) > 2 and 2 * ((shown == 0) | (shown == 1)).all(axis=1).sum() > len(frame)
        fractions = 2 * (np.abs(np.modf(shown)[0]) > 0).any(axis=1).sum() > len(frame)
        of_all = "expert" if one_hot or fractions else ""
    if of_all and (len(names[of_all]) > 1 or (of_weights and not fits(frame[of_weights[0]]))):
        found["expert"] = f"{' to '.join(dict.fromkeys(names[of_all][:: len(names[of_all]) - 1 or 1]))}, "
        found["expert"] += "a weight for each of all experts"
        weights = read(of_all, np.nan, 0 if one_hot else -FLOAT16, 1 if one_hot else FLOAT16, real=True)
        if np.isnan(weights).any():
            place = _place(frame, of_weights[0])(int(np.isnan(weights).any(axis=1).argmax()))
            raise InputError(f"{place}: fewer weights than in other rows, and no experts that they are of")
        return _ranked(weights, source)
    if not of_experts:
        there = ", ".join(map(str, frame.columns))
        raise InputError(f"no experts in {source.path}: name them with --columns expert=NAME; there are: {there}")
    chosen = {"experts": read("expert", -2, -1, UINT32)}
    if of_weights:
        chosen["weights"] = read("weight", np.nan, -FLOAT16, FLOAT16, real=True)
        other = (chosen["experts"] != -2).sum(axis=1) != (~np.isnan(chosen["weights"])).sum(axis=1)
        if other.any() and 2 * other.sum() <= len(frame):
            raise InputError(f"{_place(frame, of_weights[0])(int(other.argmax()))}: not as many weights as experts")
        chosen["weights"] = np.nan_to_num(chosen["weights"])
    for role in [role for role in HIT_ROLES if names[role]][:1]:
        hits = read(role, -1, -1, 1)
        chosen["hits"] = hits if role == "hit" else np.where(hits < 0, -1, 1 - hits)
    if unrouted := int((chosen["experts"] == -1).sum()):
        source.notes.append(f"{unrouted} expert ids are -1: nothing was routed there")
    chosen["experts"] = np.maximum(chosen["experts"], -1)
    for kind, roles in ("weights", ["weight"]), ("hits", HIT_ROLES):
        if kind in chosen and chosen[kind].shape != chosen["experts"].shape:
            used.difference_update(*(names[role] for role in roles))
            del chosen[kind]
    return chosen


def _ranked(weights: NDArray[np.float64], source: Source) -> dict[str, NDArray[Any]]:
    """Return all experts by their weights [n, E], the largest first; where most are 0, those that are not."""
    E = weights.shape[1]
    source.stated.setdefault("experts", E)
    chosen = (weights != 0).sum(axis=1)
    k = max(1, int(chosen.max()))
    k = E if k == E or 2 * (chosen == k).sum() < len(chosen) else k  # as many as were chosen, or all and what is left
    order = np.argsort(-weights, axis=1, kind="stable")[:, :k]
    ranked = np.take_along_axis(weights, order, axis=1)
    return {"experts": np.where((ranked != 0) | (k == E), order, -1), "weights": ranked}


def _answers(cell: Any) -> Any:
    """Return answers as 1 and 0: of a list, of a text with several, or of one; any other cell as it is."""
    if isinstance(cell, list | np.ndarray) or len(_parts(cell)) > 1:
        return [_answers(one) for one in _parts(cell)]
    answer = answer_of(str(cell))
    return cell if answer is None else int(answer)


def _counts(
    columns: dict[str, NDArray[Any]], cells: "pd.Series[Any]", place: Place, found: dict[str, str], source: Source
) -> Counts:
    """Return rows of layer, expert and count, 1 where there is none, as counts by request and phase."""
    E = source.agreed("experts")
    expert = numbers(cells, place, 0, MOST if E is None else E - 1)
    E = E or source.experts_of(expert)
    request, names = pd.factorize(columns.get("request", np.full(len(expert), source.stem)))
    layer, phase = columns["layer"], columns.get("phase")
    name = found.get("count", found.get("share"))
    if name is not None:  # a row without a number is a use, and several rows are several
        rows = pd.DataFrame({role: values for role, values in columns.items() if role not in ("count", "share")})
        again = rows.assign(expert=expert).duplicated().to_numpy()
        if again.any():
            at = int(again.argmax())
            raise InputError(
                f"{place(at)}: expert {expert[at]} is counted twice: use --columns request=NAME or count=NAME"
            )
    count = columns.get("count", np.ones(len(expert), np.int64))
    if "count" not in columns and "share" in columns:
        sums = pd.Series(columns["share"]).groupby([request, layer]).sum()
        count = np.rint(columns["share"] * (SCALE / max(sums.max(), 1e-300))).astype(np.int64)
        source.notes.append(
            f"{name} holds shares: of {SCALE:,} choices in a layer, since nothing says how many there were"
        )
    counts = np.zeros((2, len(names), int(layer.max()) + 1, E), np.int64)
    np.add.at(counts, (np.zeros(len(layer), np.int64) if phase is None else phase, request, layer, expert), count)
    requests = source.requests([Request(id=str(name)) for name in names])
    of_phases = None if phase is None else counts
    return Counts(counts.sum(axis=0), requests, tuple(np.unique(layer).tolist()), of_phases)


def _dump(
    columns: dict[str, NDArray[Any]], chosen: dict[str, NDArray[Any]], name: str, asked: str | None, source: Source
) -> Routing:
    """Return rows as routing by request. asked: a column of phases whose numbers may mean one thing or the other."""
    layers: Any
    experts = chosen["experts"]
    layers, layer = np.unique(columns["layer"], return_inverse=True)
    if "token_id" in columns and not columns.keys() & set(KEYS):
        counted = np.unique(columns["token_id"][layer == layer[0]])
        if len(counted) > 1 and np.array_equal(counted, np.arange(len(counted))):  # it is no id: it counts the tokens
            columns["token"] = columns.pop("token_id")
    phase = columns.get("phase")
    request, names = pd.factorize(columns.get("request", np.zeros(len(experts), np.int64)))
    keys = _counting_up(columns, pd.DataFrame({"request": request, "phase": 0 if phase is None else phase}), source)
    frame = pd.DataFrame({"request": request, **({} if phase is None else {"phase": phase}), **keys})
    cells = frame.assign(layer=layer)
    slot: Any = np.arange(experts.shape[1])[None]
    if experts.shape[1] == 1 and (keys or {"slot", "token_id"} & columns.keys()):  # a row for each expert
        slot, again = _slots(cells, columns.get("slot"), None if keys else columns.get("token_id"))
        slot = slot[:, None]
    else:
        again = _before(cells)
    restarts = bool(keys) and bool(again.any())
    frame["again"] = again
    token = frame.groupby(list(frame.columns), sort=False).ngroup().to_numpy()
    first = np.unique(token, return_index=True)[1]  # the first row of each token, in the order of the file
    rows: Any = frame.iloc[first]
    order_by = [] if restarts else list(keys) or ["again"]
    order = np.lexsort((*(rows[key] for key in reversed(order_by)), request[first]))
    if asked is not None and phase is not None:
        _in_turn(phase[first[order]], request[first[order]], asked)
    if phase is not None and not restarts and rows.duplicated(["request", *order_by]).any():
        order = np.lexsort((*(rows[key] for key in reversed(["phase", *order_by])), request[first]))
    first, place = first[order], np.argsort(order)
    at = place[token][:, None], layer[:, None], slot
    shape = len(first), len(layers), int(slot.max()) + 1
    placed: dict[str, Any] = {kind: np.full(shape, EMPTY[kind], values.dtype) for kind, values in chosen.items()}
    for kind, values in chosen.items():
        placed[kind][at] = values
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
        **placed,
        offsets=offsets,
        requests=source.requests([Request(id=label) for label in labels]),
        phase=phases,
        token_id=columns["token_id"][first].astype(np.int32) if "token_id" in columns else None,
        layers=tuple(layers.tolist()),
        restarts=np.setdiff1d(again_at, offsets).astype(np.int64),
    )


def _counting_up(columns: dict[str, NDArray[Any]], rows: pd.DataFrame, source: Source) -> dict[str, Int]:
    """Return the columns that order tokens, by role: in each request and layer they count up, or leave few numbers out.

    One that does neither holds ids of the vocabulary, or something else. Adds to `columns` what then are token ids.
    """
    keys: dict[str, Int] = {}
    for key in (key for key in KEYS if key in columns):
        rows = rows.assign(layer=columns["layer"], **keys)
        group = rows.groupby(list(rows.columns), sort=False).ngroup().to_numpy()
        order = np.argsort(group, kind="stable")
        values = pd.Series(columns[key])
        falls = (np.diff(columns[key][order]) < 0) & (np.diff(group[order]) == 0)
        by_group = values.groupby(group)
        sparse = (2 * by_group.nunique() < by_group.max() - by_group.min() + 1).to_numpy()
        odd = falls & sparse[group[order][1:]]
        if not odd.any() or key in source.columns.stated:
            keys[key] = columns[key]
            continue
        shown = ", ".join(map(str, pd.unique(values)[:4]))
        source.notes.append(
            f"{key} does not count up ({shown}): it is no order, so that of the file is taken (--columns {key}=NAME "
            f"names the column to order by){'; these are kept as ids of tokens' if key == 'token' else ''}"
        )
        if key == "token":
            columns.setdefault("token_id", columns[key])
    return keys


def _in_turn(phase: Int, request: Int, column: str) -> None:
    """Raise InputError where numbers, read as 0 for prefill and 1 for decode, begin a request with decoded tokens."""
    prompted = np.unique(request[phase == PREFILL])
    first = np.unique(request, return_index=True)[1]
    if np.isin(request[first][phase[first] == DECODE], prompted).any():
        raise InputError(f"{column!r} is 1 before 0: say --columns is_prefill={column} if 1 is a prompt, or phase=NAME")


def _before(frame: pd.DataFrame) -> Int:
    """Return how often each row was there before."""
    return frame.groupby(list(frame.columns), sort=False).cumcount().to_numpy()


def _slots(cells: pd.DataFrame, slot: NDArray[Any] | None, token_id: NDArray[Any] | None) -> tuple[Int, Int]:
    """Return of rows with one expert each its place among the token's k, and how often the place was there before.

    token_id: where no key does, a new token begins where it changes; equal ones may follow each other.
    """
    if slot is not None:
        slots, number = np.unique(slot, return_inverse=True)
        if slots[-1] - slots[0] >= len(slots):
            raise InputError(f"slots are not consecutive: {', '.join(map(str, slots[-9:]))}")
        return number, _before(cells.assign(slot=number))
    starts = np.flatnonzero((cells.assign(id=0 if token_id is None else token_id).diff() != 0).any(axis=1))
    lengths = np.diff(np.append(starts, len(cells)))  # of runs of one cell
    regular = cells.groupby(list(cells.columns), sort=False).size().nunique() == 1 or len(np.unique(lengths)) > 1
    if token_id is None and regular:
        return _before(cells), np.zeros(len(cells), np.int64)  # a choice is what has one key
    place = (np.arange(len(cells)) - np.repeat(starts, lengths)) % np.gcd.reduce(lengths)
    choices = np.flatnonzero(place == 0)
    return place, np.repeat(_before(cells.iloc[choices]), np.diff(np.append(choices, len(cells))))


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
