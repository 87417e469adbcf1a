"""The frame of the three programs: a table of commands, and one end for every error.

A command's module is imported when the command is called, or when its own `--help` is shown; the help of a group shows
the first paragraph of its docstring, read from the source. So a module of a command imports at its top whatever it
needs.
"""

import ast
import errno
import inspect
import os
import sys
import warnings
from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, NoReturn, cast

import typer
from typer.core import TyperCommand, TyperGroup

from terminal.console import fail, warn
from terminal.options import expanded
from traces.errors import InputError, missing_extra

SETTINGS: dict[str, Any] = {
    "rich_markup_mode": "rich",
    "pretty_exceptions_enable": False,
    "add_completion": False,
}


FIRST = {
    *("policy", "policies", "cache_size", "cache_sizes", "hardware", "requests", "out"),
    *("trace", "device", "from_", "model", "gpu", "gpu_memory", "precision", "details", "help"),
}
"""Options that a new user needs: of a command with many, the others stand in a panel below them."""

MANY = 12
"""Options that one panel may have."""


class Command(TyperCommand):
    """A command of a table; it becomes the one that its function describes when it is called."""

    function: ClassVar[str]
    """`module:name`."""

    @property
    def help(self) -> str:
        """The first paragraph of the function's docstring, read without importing what its module needs."""
        module, _, name = self.function.partition(":")
        spec = find_spec(module)
        assert spec is not None
        assert spec.origin is not None
        tree = ast.parse(Path(spec.origin).read_text("utf-8"))
        function = next(each for each in tree.body if isinstance(each, ast.FunctionDef) and each.name == name)
        return " ".join((ast.get_docstring(function) or "").split("\n\n")[0].split())

    @help.setter
    def help(self, text: str | None) -> None:
        pass

    def described(self) -> Any:
        """Return the command with its options, of the function's signature and docstring."""
        module, _, name = self.function.partition(":")
        function = getattr(import_module(module), name)
        paragraphs = (" ".join(paragraph.split()) for paragraph in (inspect.getdoc(function) or "").split("\n\n"))
        app = typer.Typer(**SETTINGS)
        app.command(self.name, help="\n\n".join(paragraphs))(expanded(function))
        command = typer.main.get_command(app)
        plain = [
            each for each in command.params if getattr(each, "rich_help_panel", "") is None and each.name != "help"
        ]
        if len(plain) > MANY:
            for each in plain:
                if each.param_type_name == "option" and each.name not in FIRST:
                    each.__dict__["rich_help_panel"] = "More options"
        return command

    def make_context(self, *args: Any, **options: Any) -> Any:
        return self.described().make_context(*args, **options)


def group(
    text: str, table: Mapping[str, Any], cls: type[TyperGroup] = TyperGroup, *, bare_is_help: bool = True
) -> typer.Typer:
    """Return a group of commands. table: name -> `module:function`, or the help and the table of another group."""
    app = typer.Typer(help=text, no_args_is_help=bare_is_help, cls=cls, **SETTINGS)
    app.callback()(lambda: None)  # keeps the name of a single command
    for name, entry in table.items():
        if isinstance(entry, str):
            app.command(name, cls=type("Command", (Command,), {"function": entry}))(lambda: None)
        else:
            app.add_typer(group(*entry), name=name)
    return app


MACHINE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EACCES, errno.EPERM, errno.EROFS)
"""Errors of the machine that its user can fix: no space, no permission."""

INTERRUPTED = 130
"""The status of what Ctrl-C has ended."""


def main(app: typer.Typer, name: str) -> NoReturn:
    """Run `app` as the program `name`. Exit with 0, 2 for bad input, 1 for an error of the machine, 130 for Ctrl-C.

    Each of these prints one line, as does a warning of ours; any other exception is a defect and keeps its traceback.
    """
    shown = warnings.showwarning

    def show(text: Warning | str, kind: type[Warning], *rest: Any) -> None:
        if kind is UserWarning:
            warn(str(text))
        else:
            shown(text, kind, *rest)

    warnings.showwarning = cast(Any, show)
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115  it was closed, as by `>&-`
    try:
        status = app(prog_name=name, standalone_mode=False)
        sys.stdout.flush()
    except typer.TyperException as error:
        reason = error.format_message().removesuffix(".")
        if not reason:  # the help was printed
            sys.exit(error.exit_code)
        context = getattr(error, "ctx", None)
        command = context.command_path if context else name
        fail(name, f"{reason[0].lower()}{reason[1:]}; see {command} --help", error.exit_code)
    except InputError as error:
        fail(name, str(error), 2)
    except ModuleNotFoundError as error:
        absent = missing_extra(error.name or "", name)
        if absent is None:
            raise
        fail(name, str(absent), 2)
    except OSError as error:
        if error.errno not in (*MACHINE, errno.EPIPE):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left has nowhere to go
        if error.errno == errno.EPIPE:
            sys.exit(1)
        fail(name, f"{error.filename or 'cannot write the output'}: {error.strerror}", 1)
    except MemoryError as error:
        fail(name, f"not enough memory: {error}" if str(error) else "not enough memory", 1)
    except typer.Abort:  # of a question that was not answered with yes
        fail(name, "not confirmed", 1)
    except KeyboardInterrupt:
        status = INTERRUPTED
    if status == INTERRUPTED:  # of typer too, which has no words for it
        fail(name, "interrupted", INTERRUPTED)
    sys.exit(status or 0)
