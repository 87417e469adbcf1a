"""Options of commands from descriptions: a parameter that is a dataclass, or `Fields`, stands for several options."""

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, is_dataclass
from functools import wraps
from typing import Annotated, Any, get_args, get_type_hints

import typer
from msgspec import Meta

from traces.errors import InputError, with_flags
from traces.typed import Option


@dataclass(frozen=True)
class Fields:
    """In `Annotated[dict[str, Any], Fields(...)]`: options that a command gets as a dict of those that were typed."""

    parameters: Mapping[str, inspect.Parameter]


def option(name: str, kind: Any, help: str, default: Any = None) -> inspect.Parameter:
    """Return an option of a type, which may be one of several; None, or a default that is shown, unless it is typed."""
    first: Any = next(each for each in (get_args(kind) or (kind,)) if each is not type(None))
    annotation: Any = Annotated[first | None, typer.Option(help=help)]
    if first is bool:
        annotation, default = Annotated[bool, typer.Option(f"--{name.replace('_', '-')}", help=help)], False
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def typed(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None and value is not False}


def expanded(command: Callable[..., None]) -> Callable[..., None]:
    """Return the command with the fields of its groups as parameters, for typer to read.

    A field is annotated with typer's option, or with an `Option` and the limits of `msgspec.Meta`.
    Where an error of the command names one of them in backquotes, or begins with it, it stands there as the flag.
    """
    groups: dict[str, tuple[Callable[..., object], list[str]]] = {}
    parameters: dict[str, inspect.Parameter] = {}
    for name, own in inspect.signature(command).parameters.items():
        of_one: Mapping[str, inspect.Parameter] = {name: own}
        if fields := [each for each in get_args(own.annotation) if isinstance(each, Fields)]:
            of_one = fields[0].parameters
            groups[name] = typed, list(of_one)
        elif is_dataclass(own.annotation) and isinstance(own.annotation, type):
            hints = get_type_hints(own.annotation)
            of_one = {
                field: parameter.replace(annotation=_shown(field, parameter.annotation, hints[field]))
                for field, parameter in inspect.signature(own.annotation).parameters.items()
            }
            groups[name] = own.annotation, list(of_one)
        parameters.update(of_one)

    @wraps(command)
    def called(**values: Any) -> None:
        try:
            for name, (make, names) in groups.items():
                values[name] = make(**{each: values.pop(each) for each in names})
            command(**values)
        except InputError as error:
            text = re.sub(r"^(\w+) = ", r"`\1` ", str(error))  # what `traces.typed` begins with
            error.args = (with_flags(text, parameters),)
            raise

    called.__annotations__ = {name: parameter.annotation for name, parameter in parameters.items()}
    only_by_name = [own.replace(kind=inspect.Parameter.KEYWORD_ONLY) for own in parameters.values()]
    called.__dict__["__signature__"] = inspect.Signature(only_by_name)
    return called


def _shown(name: str, annotation: Any, plain: Any) -> Any:
    """Return the annotation of a field as typer reads it: its `Option` and limits as an option of a command."""
    parts = [part for part in _parts(annotation) if isinstance(part, Option | Meta)]
    described = next((part for part in parts if isinstance(part, Option)), None)
    if described is None:
        return annotation
    limits = next((part for part in parts if isinstance(part, Meta)), Meta())
    flags = [f"--{name.replace('_', '-')}"] if plain is bool else []
    shown = described.shown or True
    option = typer.Option(
        *flags, help=described.help, min=limits.ge, max=limits.le, show_default=shown, rich_help_panel=described.panel
    )
    return Annotated[plain, option]


def _parts(annotation: Any) -> list[Any]:
    """Return what annotations hold beside types, the outermost first."""
    inner = [part for each in get_args(annotation) for part in _parts(each)]
    return [*getattr(annotation, "__metadata__", ()), *inner]
