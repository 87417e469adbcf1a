"""Nested records, of JSON, .npz or .pt, as flat ones: a row for each choice of a token in a layer, or for each count.

Lists of experts are found wherever they lie. What stands above one belongs to it: values of keys, keys that are
numbers, and the places in lists. A list with two axes before its k leaves them as `axis0` and `axis1`, which `table`
names.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from traces.errors import InputError, located
from traces.importers.words import HIT_ROLES, Columns, fact, layer_number

Row = dict[str, Any]
FLAT = re.compile(r"(?:layers?|blk|block|l)[_.\-]?(\d+)(?:[_.\-](.+))?", re.IGNORECASE)
"""Keys of one layer beside those of others: `l3`, `layer_3`, `layers.3.experts`."""

LISTED = re.compile(r"[\[( ]*-?\d+([,; ]+-?\d+)*[\]) ]*")
"""A list of whole numbers as text."""

COUNTED = ("count", "share")
"""Roles of what stands for each expert of a layer."""

WHOLE = (int, np.integer)
REAL = (*WHOLE, float, np.floating)
"""Kinds of numbers in lists: ids, and weights."""

AXES = {"layer": "layer", "token": "token", "step": "token", "request": "request", "expert": "slot"}
"""What the places in a list of records are, by the role of its key."""


def rows(records: Iterable[Any], columns: Columns, stated: Row) -> Iterator[tuple[int, Row]]:
    """Yield numbered rows of records (`#record`); add the facts beside them, named with #, to `stated`."""
    kinds = Kinds()
    for number, record in enumerate(records):
        row: Row = {}
        record = {"experts": record} if depth(record) > 0 else record
        where = f"record {number + 1}"
        if _lone(record):
            raise InputError(f"{where} is {record!r}, no object or list")
        flat = isinstance(record, Mapping) and not nested(record)
        found = _rows(record, {"#record": number}, "", columns) if not flat else [record] * _routes(record, columns)
        for row in kinds.rows(record, where, found):
            stated |= {name[1:]: one for name, one in row.items() if name[:1] == "#" and name[1:] not in stated}
            yield number, row
        if not row and isinstance(record, Mapping):  # it holds facts alone
            stated |= {known: one for name, one in record.items() if (known := fact(name)) and _lone(one)}


class Kinds:
    """Refuses records without experts beside others of the same keys that have some: a value there is invalid."""

    def __init__(self) -> None:
        self._routed: dict[frozenset[Any], tuple[bool, str]] = {}

    def rows(self, record: Any, where: str, rows: Iterable[Row]) -> Iterator[Row]:
        """Yield the rows of a record. Raises InputError, with `where` it stands."""
        row = None
        with located(where):
            for row in rows:
                yield row
        if isinstance(record, Mapping):
            routed, first = self._routed.setdefault(frozenset(record), (bool(row), where))
            if routed != bool(row):
                raise InputError(f"{where if routed else first} has no experts or counts, as others of its keys have")


def _routes(record: Mapping[Any, Any], columns: Columns) -> bool:
    """Return whether a flat record holds experts: a list, a number that is no fact, or numbered ones."""
    picked = columns.pick(name for name, one in record.items() if not _lone(one) or fact(name) is None)
    listed = "expert" in picked or not _lone(record.get(picked.get("weight")))
    return listed or any(columns.numbered(record, role) for role in ("expert", "weight"))


def nested(record: Mapping[Any, Any]) -> bool:
    """Return whether a record holds more than values and lists of values, or keys that are numbers or of layers."""
    inner = (one for value in record.values() for one in (value if isinstance(value, list) else [value]))
    several = str(next(iter(record), ""))[:1].isdigit() or sum(bool(FLAT.fullmatch(str(name))) for name in record) > 1
    return several or not all(map(_lone, inner))


def _lone(value: Any) -> bool:
    return not isinstance(value, list | Mapping | np.ndarray)


def _rows(value: Any, above: Row, key: str, columns: Columns) -> Iterator[Row]:
    role = columns.role(key)
    if isinstance(value, Mapping):
        value = _by_layer(value)
        numbers = [layer_number(name) for name in value]
        if value and None not in numbers:
            yield from _numbered(value, above, key, columns)
        elif value and all(re.fullmatch(r"\s*\d+\s*,\s*\d+\s*", str(name)) for name in value):
            for name, count in value.items():
                layer, expert = map(int, name.split(","))
                yield {**above, "layer": layer, "expert": expert, key if role in COUNTED else "count": count}
        else:
            yield from _record(value, above, columns)
    elif isinstance(value, list) and any(isinstance(each, Mapping) for each in value):
        axis, kinds = AXES.get(str(role)), Kinds()
        for number, each in enumerate(value):
            if not isinstance(each, Mapping):
                raise InputError(f"{key}[{number}] is {each!r} beside objects")
            if axis == "slot" and "id" in each and not any(columns.role(name) == "expert" for name in each):
                each = {("expert" if name == "id" else name): one for name, one in each.items()}
            own = axis is not None and not any(columns.role(name) == axis for name in each)
            within = {**above, str(axis): number} if own else above
            yield from kinds.rows(each, f"{key}[{number}]", _rows(each, within, key, columns))
    elif role in COUNTED and isinstance(value, list | np.ndarray):
        value = np.array(value, object)
        pairs: Any = [(above.get("layer"), value)]
        if value.ndim > 1:
            pairs = ((layer, row) for part in value.reshape(-1, *value.shape[-2:]) for layer, row in enumerate(part))
        for layer, row in pairs:
            yield from ({**above, "layer": layer, "expert": e, key: count} for e, count in enumerate(row.tolist()))
    elif role in ("layer", "token") and depth(value) >= 2:
        order = ["layer", "token"] if role == "layer" else ["token", "layer"]
        yield from _cells(value, {}, above, "expert", order[: depth(value) - 1])


def _numbered(value: Mapping[Any, Any], above: Row, key: str, columns: Columns) -> Iterator[Row]:
    """Yield the rows of a mapping from numbers: of experts with counts, of tokens, else of layers."""
    role, layered = columns.role(key), _has_layer(above, columns)
    lone, kinds = list(map(_lone, value.values())), Kinds()
    counts = (layered or role in COUNTED) and 2 * sum(lone) > len(lone)
    depths = [depth(one) for one in value.values() if _lone(one) or len(one)] or [0]
    listed, usual = not all(lone) or max(depths) > 0, max(depths, key=depths.count)
    axis = "expert" if counts else "token" if layered or role in ("token", "step") else "layer"
    for (name, one), alone in zip(value.items(), lone, strict=True):
        number = layer_number(name)  # a layer keeps its name, which may be of one of several stacks
        within = {**above, axis: number if axis != "layer" or str(name).isdecimal() else name}
        if axis == "expert":
            yield {**within, key if role in COUNTED else "count": one}
        elif listed and (depth(one) < 1 if alone else depth(one) > usual > 0):
            raise InputError(f"{axis} {name} is {one!r}, unlike those beside it")
        elif depth(one) >= 0 and role not in COUNTED:
            yield from _cells(one, {}, within, "expert", _axes(one, within, columns))
        else:
            inner = "experts" if isinstance(one, list) and role not in COUNTED else key
            yield from kinds.rows(one, f"{axis} {name}", _rows(one, within, inner, columns))


def _record(value: Mapping[Any, Any], above: Row, columns: Columns) -> Iterator[Row]:
    lone = {name: one for name, one in value.items() if _lone(one)}
    facts = {f"#{fact(name)}": one for name, one in lone.items() if fact(name) and one is not None}
    picked = columns.pick(name for name in value if name not in lone or fact(name) is None)
    expert, counts = picked.get("expert"), [picked.get(role) for role in COUNTED]
    beside = {picked[role]: value[picked[role]] for role in ("weight", *HIT_ROLES) if role in picked}
    along = {
        name: list(one)
        for name, one in value.items()
        if isinstance(one, list | np.ndarray) and 2 * sum(map(_lone, one)) > len(one)
        if name not in (expert, *beside, *counts)
    }
    within = {**above, **facts, **{name: one for name, one in lone.items() if fact(name) is None}}
    within |= {name: one for name, one in along.items() if columns.role(name)}
    placed = _has_layer(within, columns)
    if expert in lone or (expert is None and any(columns.numbered(lone, role) for role in ("expert", "weight"))):
        lists = (one for name, one in value.items() if name not in lone and columns.role(str(name)) == "layer")
        if (one := next(lists, None)) is not None:
            raise InputError(f"layer is {one!r}, not one of the choice beside it")
        yield from [within] * (placed or "layer" in columns.stated)
    elif expert is not None and depth(value[expert]) >= 0 and all(_lone(value.get(name)) for name in counts):
        yield from _cells(value[expert], beside, within, str(expert), _axes(value[expert], within, columns))
    elif expert is None and depth(weights := beside.get(picked.get("weight")), REAL) > 1 - placed:
        yield from _cells(weights, {}, within, str(picked["weight"]), _axes(weights, within, columns))
    for name, one in value.items():
        if name not in (*lone, *along, *beside) and not (name == expert and depth(one) >= 0):
            yield from _rows(one, within, str(name), columns)


def _axes(value: Any, above: Row, columns: Columns) -> list[str]:
    """Return the axes of lists of experts before the k of a choice."""
    axes = depth(value, REAL) - 1
    if _has_layer(above, columns):
        return ["request", "token"][-axes:] if axes > 0 else []
    layers, tokens = above.get("#layers"), above.get("#tokens")
    tokens = next((len(one) for one in above.values() if isinstance(one, list)), tokens)
    if axes == 1:
        return ["token" if tokens == len(value) != layers and "token" not in above else "layer"]
    first, second = len(value), len(next((each for each in value if not _lone(each)), ()))
    if first != second and (layers == first or tokens == second):
        return ["layer", "token"]
    if first != second and (layers == second or tokens == first):
        return ["token", "layer"]
    return ["axis0", "axis1"] if axes == 2 else ["request", "axis0", "axis1"][:axes]


def _has_layer(above: Row, columns: Columns) -> bool:
    return any(columns.role(name) == "layer" and _lone(one) for name, one in above.items() if name[0] != "#")


def _cells(value: Any, beside: Mapping[Any, Any], above: Row, key: str, axes: list[str]) -> Iterator[Row]:
    """Yield a row for each innermost list: of the k experts of a token in a layer, and what stands beside each."""
    if not axes or _lone(value) or (axes[0] == "layer" and not len(value)):
        token = above.get("token")
        own = {
            label: one[token] if isinstance(one, list) and token is not None and token < len(one) else one
            for label, one in above.items()
        }
        yield {**own, key: value, **{str(name): one for name, one in beside.items() if one is not None}}
        return
    for place, one in enumerate(value):
        parts = {
            name: many[place] if isinstance(many, list | np.ndarray) and len(many) == len(value) else None
            for name, many in beside.items()
        }
        yield from _cells(one, parts, {**above, axes[0]: place}, key, axes[1:])


def depth(value: Any, kinds: tuple[type, ...] = WHOLE) -> int:
    """Return how deep lists of numbers of these kinds, or their texts, are nested, 0: one; -1: it is something else."""
    if isinstance(value, str):
        return 1 if LISTED.fullmatch(value) else -1
    if isinstance(value, np.ndarray):
        return value.ndim if issubclass(value.dtype.type, kinds) else -1
    if isinstance(value, list):
        inner = 0
        for each in value:
            if each not in ([], None) and (inner := depth(each, kinds)) >= 0:
                break
        return inner + 1 if inner >= 0 else -1
    return 0 if isinstance(value, kinds) and not isinstance(value, bool) else -1


def _by_layer(value: Mapping[Any, Any]) -> Mapping[Any, Any]:
    """Return a mapping whose keys are such as `layers.3.experts` or `l3` as {"layers": {3: {"experts": ...}}}."""
    layers: dict[int, dict[str | None, Any]] = {}
    rest = {}
    for name, one in value.items():
        found = FLAT.fullmatch(re.sub(r"[\[\]]+\.?", ".", str(name)).rstrip("."))
        if found:
            layers.setdefault(int(found[1]), {})[found[2]] = one
        else:
            rest[name] = one
    whole = {number: held.get(None, held) for number, held in layers.items()}
    return {**rest, "layers": whole} if rest and layers else whole or value
