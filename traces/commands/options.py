"""Options of commands from dataclasses: a parameter that is one stands for its fields, each an option of its own."""

import inspect
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from functools import wraps
from typing import Annotated, Any, get_args, get_type_hints

import typer
from msgspec import Meta

from traces.errors import InputError, with_flags
from traces.typed import Option


def expanded(command: Callable[..., None]) -> Callable[..., None]:
    """Return the command with the fields of its dataclasses as parameters, for typer to read.

    A field is annotated with typer's option, or with an `Option` and the limits of `msgspec.Meta`.
    Where an error of the command names one of them in backquotes, it stands there as the flag.
    """
    groups: dict[str, type] = {}
    parameters: dict[str, inspect.Parameter] = {}
    for name, own in inspect.signature(command).parameters.items():
        if is_dataclass(own.annotation) and isinstance(own.annotation, type):
            groups[name] = own.annotation
            hints = get_type_hints(own.annotation)
            for field, parameter in inspect.signature(own.annotation).parameters.items():
                parameters[field] = parameter.replace(annotation=_shown(field, parameter.annotation, hints[field]))
        else:
            parameters[name] = own

    @wraps(command)
    def called(**values: Any) -> None:
        try:
            for name, group in groups.items():
                values[name] = group(**{field.name: values.pop(field.name) for field in fields(group)})
            command(**values)
        except InputError as error:
            error.args = (with_flags(error.of_option, parameters),)
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
