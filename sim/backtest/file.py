"""Read files of the back-test: machines, models and rows as TOML. docs/backtest.md documents the format.

A row names its machine and its model, of the file's tables or of shipped profiles, or states them itself. 0 (or -1, of
what may be 0) stands for what is not stated. InputError names file, row and key.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, TypeVar

from msgspec import Meta

from sim.prediction.described import UNITS, Machine, Model, Row, Setting
from sim.profiles.hardware_profile import MACHINES
from traces.errors import located, refuse, unknown
from traces.files import read_toml
from traces.typed import typed

T = TypeVar("T")

DATA = Path(__file__).parent / "data"
"""Rows of blind tests, and what was measured of single tokens."""

UNUSED: dict[str, list[dict[str, Any]]] = read_toml(DATA / "unused.toml")
"""Keys of a setting, a model and a machine that do nothing beside or without another one."""


@dataclass(frozen=True)
class _Tables:
    rows: Annotated[list[dict[str, Any]], Meta(min_length=1)]
    defaults: dict[str, Any] = field(default_factory=dict)
    machines: dict[str, dict[str, Any]] = field(default_factory=dict)
    models: dict[str, dict[str, Any]] = field(default_factory=dict)


def shipped() -> list[Path]:
    return sorted(Path(__file__).parent.glob("*.toml"))


def read(path: Path, warn: Callable[[str], None] = lambda text: None) -> list[Row]:
    """Return the rows of a file, in order. warn: called for each key without effect. Raise InputError."""
    tables = typed(_Tables, read_toml(path), str(path))
    machines, models = (
        {name: _part(cls, f"{path}: {key}.{name}", {**facts, "name": name}, warn) for name, facts in table.items()}
        for cls, key, table in ((Machine, "machines", tables.machines), (Model, "models", tables.models))
    )
    rows = []
    for place, stated in enumerate(tables.rows, 1):
        values = {"group": path.stem, **tables.defaults, **stated, "file": str(path)}
        where = f"{path}: row {values.get('figure', place)}"
        model, machine, setting = (values.get(key) for key in ("model", "machine", "setting"))
        if isinstance(model, dict):
            values["model"] = _part(Model, f"{where}: model", {"name": model.get("profile", "its own"), **model}, warn)
        elif isinstance(model, str):
            values["model"] = models.get(model) or Model(model)
        if isinstance(machine, dict):
            named = {"name": machine.get("title", "its own"), **machine}
            values["machine"] = _part(Machine, f"{where}: machine", named, warn)
        elif machine in machines:
            values["machine"] = machines[machine]
        elif isinstance(machine, str):
            if machine not in MACHINES.names() and not machine.endswith(".toml"):
                raise unknown("machine", machine, [*machines, *MACHINES.names()], where)
            values["machine"] = Machine(name=machine, profile=machine)
        if isinstance(setting, dict):
            own, shared = stated.get("setting", {}), tables.defaults.get("setting", {})
            values["setting"] = _part(Setting, f"{where}: setting", own, warn, shared)
        rows.append(typed(Row, values, where))
        with located(where):
            _check(rows[-1])
    return rows


def _part(
    cls: type[T],
    where: str,
    stated: Mapping[str, Any],
    warn: Callable[[str], None],
    defaults: Mapping[str, Any] = MappingProxyType({}),
) -> T:
    """Return a part of a row without the keys that do nothing in it, of which the stated ones are warned of."""
    values = {**defaults, **stated}
    unused = {
        key: f"{relation} {one}"
        for rule in UNUSED[cls.__name__]
        for relation, one in rule.items()
        if relation != "keys" and (one in values) == (relation == "beside")
        for key in rule["keys"]
    }
    for key, why in unused.items():
        if values.pop(key, None) is not None and key in stated:
            warn(f"{where}: {key} has no effect {why} (ignored)")
    return typed(cls, values, where)


def _check(row: Row) -> None:
    """Raise InputError for a row that would be run as something else than it states."""
    if row.unit not in UNITS[row.metric]:
        raise unknown(f"unit of {row.metric}", row.unit, UNITS[row.metric])
    if row.unsimulated:
        return
    fitted, is_cache = row.machine and row.machine.fit_parameter, row.setting.place == "policy"
    refuse(
        (
            row.model is None or (row.machine is None and row.timed),
            f"a figure of {row.metric} needs a model, of a speed or latency a machine too",
        ),
        (not (is_cache or row.timed), f"setting: a figure of {row.metric} is of a cache: give policy and cache"),
        (row.fit and not (row.timed and fitted), "fit = true needs a speed or latency and the machine's fit_parameter"),
    )
