"""Options of commands from dataclasses: a parameter that is one stands for its fields, each an option of its own."""

import inspect
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from functools import wraps
from typing import Any

from traces.errors import InputError, with_flags


def expanded(command: Callable[..., None]) -> Callable[..., None]:
    """Return the command with the fields of its dataclasses as parameters, for typer to read.

    Where an error of the command names one of them in backquotes, it stands there as the flag.
    """
    groups: dict[str, type] = {}
    parameters: dict[str, inspect.Parameter] = {}
    for name, own in inspect.signature(command).parameters.items():
        if is_dataclass(own.annotation) and isinstance(own.annotation, type):
            groups[name] = own.annotation
            parameters.update(inspect.signature(own.annotation).parameters)
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
