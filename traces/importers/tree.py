"""Nested records, of JSON, .npz or .pt, as flat ones: a row for each choice of a token in a layer, or for each count.

Lists of experts are found wherever they lie. What stands above one belongs to it: values of keys, keys that are
numbers, and the places in lists. A list with two axes before its k leaves them as `axis0` and `axis1`, which `table`
names.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from traces.importers.words import Columns, fact, layer_number

Row = dict[str, Any]
FLAT = re.compile(r"(?:layers?|blk|block|l)[_.\-]?(\d+)(?:[_.\-](.+))?", re.IGNORECASE)
"""Keys of one layer beside those of others: `l3`, `layer_3`, `layers.3.experts`."""

LISTED = re.compile(r"[\[( ]*-?\d+([,; ]+-?\d+)*[\]) ]*")
"""A list of whole numbers as text."""

AXES = {"layer": "layer", "token": "token", "step": "token", "request": "request", "expert": "slot"}
"""What the places in a list of records are, by the role of its key."""


def rows(records: Iterable[Any], columns: Columns, stated: Row) -> Iterator[Row]:
    """Yield the rows of records, with the names of their keys; add the facts that stand beside them to `stated`.

    `#record` is the record's number, other names with # are facts.
    """
    for number, record in enumerate(records):
        row: Row = {}
        record = {"experts": record} if depth(record) > 0 else record
        flat = isinstance(record, Mapping) and not nested(record)
        found = _rows(record, {"#record": number}, "", columns) if not flat else [record] * _routes(record, columns)
        for row in found:
            stated |= {name[1:]: one for name, one in row.items() if str(name)[:1] == "#" and name[1:] not in stated}
            yield row
        if not row and isinstance(record, Mapping):  # it holds facts alone
            stated |= {known: one for name, one in record.items() if (known := fact(name)) and np.ndim(one) == 0}


def _routes(record: Mapping[Any, Any], columns: Columns) -> bool:
    """Return whether a flat record holds experts: a list, a number that is no fact, or numbered ones."""
    name = columns.pick(name for name, one in record.items() if np.ndim(one) or fact(name) is None).get("expert")
    return record.get(name) is not None or bool(columns.numbered(record, "expert"))


def nested(record: Mapping[Any, Any]) -> bool:
    """Return whether a record holds more than values and lists of values, or keys that are numbers or of layers."""
    inner = (one[0] if isinstance(one, list) and one else one for one in record.values())
    several = str(next(iter(record), ""))[:1].isdigit() or sum(bool(FLAT.fullmatch(str(name))) for name in record) > 1
    return several or any(isinstance(one, list | Mapping | np.ndarray) for one in inner)


def _rows(value: Any, above: Row, key: str, columns: Columns) -> Iterator[Row]:
    role = columns.role(key)
    if isinstance(value, Mapping):
        value = _by_layer(value)
        numbers = [layer_number(name) for name in value]
        if value and None not in numbers:
            yield from _numbered(dict(zip(numbers, value.values(), strict=True)), above, key, columns)
        elif value and all(re.fullmatch(r"\s*\d+\s*,\s*\d+\s*", str(name)) for name in value):
            for name, count in value.items():
                layer, expert = map(int, name.split(","))
                yield {**above, "layer": layer, "expert": expert, "count": count}
        else:
            yield from _record(value, above, columns)
    elif isinstance(value, list) and value and isinstance(value[0], Mapping):
        axis = AXES.get(str(role))
        for number, each in enumerate(value):
            if axis == "slot" and "id" in each:
                each = {**each, "expert": each["id"]}
            own = axis is not None and not any(columns.role(name) == axis for name in each)
            yield from _rows(each, {**above, str(axis): number} if own else above, key, columns)
    elif role == "count" and isinstance(value, list | np.ndarray):
        value = np.asarray(value)
        value = value.sum(axis=0) if value.ndim == 3 else value
        pairs: Any = enumerate(value) if value.ndim == 2 else [(above.get("layer"), value)]
        for layer, row in pairs:
            yield from ({**above, "layer": layer, "expert": e, "count": count} for e, count in enumerate(row.tolist()))
    elif role in ("layer", "token") and depth(value) >= 2:
        order = ["layer", "token"] if role == "layer" else ["token", "layer"]
        yield from _cells(value, None, above, "expert", order[: depth(value) - 1])


def _numbered(value: Mapping[Any, Any], above: Row, key: str, columns: Columns) -> Iterator[Row]:
    """Yield the rows of a mapping from numbers: of experts with counts, of tokens, else of layers."""
    role, layered = columns.role(key), _has_layer(above, columns)
    counts = (layered or role == "count") and all(isinstance(one, int | float) for one in value.values())
    axis = "expert" if counts else "token" if layered or role in ("token", "step") else "layer"
    for name, one in value.items():
        within = {**above, axis: int(name)}
        if axis == "expert":
            yield {**within, "count": one}
        elif depth(one) >= 0 and role != "count":
            yield from _cells(one, None, within, "expert", _axes(one, within, columns))
        else:
            yield from _rows(one, within, "experts" if isinstance(one, list) and role != "count" else key, columns)


def _record(value: Mapping[Any, Any], above: Row, columns: Columns) -> Iterator[Row]:
    lone = {name: one for name, one in value.items() if not isinstance(one, Mapping | list | np.ndarray)}
    facts = {f"#{fact(name)}": one for name, one in lone.items() if fact(name) and one is not None}
    picked = columns.pick(name for name in value if name not in lone or fact(name) is None)
    expert, weight, count = (picked.get(role) for role in ("expert", "weight", "count"))
    along = {
        name: list(one)
        for name, one in value.items()
        if isinstance(one, list | np.ndarray) and len(one) and np.ndim(one[0]) == 0 and not isinstance(one[0], Mapping)
        if name not in (expert, weight, count)
    }
    within = {**above, **facts, **{name: one for name, one in lone.items() if fact(name) is None}}
    within |= {name: one for name, one in along.items() if columns.role(name)}
    if expert in lone or (expert is None and columns.numbered(lone, "expert")):
        yield within
    elif expert is not None and depth(value[expert]) >= 0:
        held, axes = value[expert], _axes(value[expert], within, columns)
        yield from _cells(held, (weight, value.get(weight)), within, str(expert), axes)
    for name, one in value.items():
        if name not in lone and name not in along and name != weight and not (name == expert and depth(one) >= 0):
            yield from _rows(one, within, str(name), columns)


def _axes(value: Any, above: Row, columns: Columns) -> list[str]:
    """Return the axes of lists of experts before the k of a choice."""
    axes = depth(value) - 1
    if _has_layer(above, columns):
        return ["request", "token"][-axes:] if axes > 0 else []
    layers, tokens = above.get("#layers"), above.get("#tokens")
    tokens = next((len(one) for one in above.values() if isinstance(one, list)), tokens)
    if axes == 1:
        return ["token" if tokens == len(value) != layers and "token" not in above else "layer"]
    first, second = (len(value), len(value[0])) if axes > 1 else (0, 0)
    if first != second and (layers == first or tokens == second):
        return ["layer", "token"]
    if first != second and (layers == second or tokens == first):
        return ["token", "layer"]
    return ["axis0", "axis1"] if axes == 2 else ["request", "axis0", "axis1"][:axes]


def _has_layer(above: Row, columns: Columns) -> bool:
    return any(columns.role(name) == "layer" and np.ndim(one) == 0 for name, one in above.items() if name[0] != "#")


def _cells(value: Any, weights: Any, above: Row, key: str, axes: list[str]) -> Iterator[Row]:
    """Yield a row for each innermost list: of the k experts of a token in a layer."""
    name, weight = weights or (None, None)
    if not axes:
        token = above.get("token")
        own = {
            label: one[token] if isinstance(one, list) and token is not None and token < len(one) else one
            for label, one in above.items()
        }
        yield {**own, key: value, **({} if weight is None else {str(name): weight})}
        return
    for place, one in enumerate(value):
        part = weight[place] if weight is not None and len(weight) == len(value) else None
        yield from _cells(one, (name, part), {**above, axes[0]: place}, key, axes[1:])


def depth(value: Any) -> int:
    """Return how deep lists of whole numbers, or their texts, are nested, 0: one number; -1: it is something else."""
    if isinstance(value, str):
        return 1 if LISTED.fullmatch(value) else -1
    if isinstance(value, np.ndarray):
        return value.ndim if value.dtype.kind in "iu" else -1
    if isinstance(value, list):
        inner = next((depth(each) for each in value if each not in ([], None)), 0)
        return -1 if inner < 0 else inner + 1
    return 0 if isinstance(value, int | np.integer) and not isinstance(value, bool) else -1


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
