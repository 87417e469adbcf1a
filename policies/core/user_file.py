"""A policy in a user's own file, named `path/my_file.py:MyPolicy`; nothing needs to be installed or registered.

The file is imported once for as long as it does not change, under a module name of its own, so that worker processes
find the same class by the same name.
"""

import importlib.util
import inspect
import sys
import traceback
import zlib
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from policies.core.grammar import file_and_class
from policies.core.policy import Listener, Prefetcher, RetentionPolicy
from traces.errors import InputError, unknown

MODULE = "policy_file_"
"""How the names of modules of such files begin."""


def load(name: str) -> type[Listener]:
    """Return the class that `path.py:Class` names. Raise InputError for whatever keeps it from being a policy."""
    path, wanted = file_and_class(name) or (name, "")
    file = Path(path)
    if not file.is_file():
        raise InputError(f"{path}: no such file")
    module = _module(str(file.resolve()), file.stat().st_mtime_ns)
    here = {key: cls for key, cls in vars(module).items() if _is_policy(cls) and cls.__module__ == module.__name__}
    if not wanted:
        raise InputError(f"{path} needs the class named as well, as in {path}:{next(iter(here), 'MyPolicy')}")
    if not hasattr(module, wanted):
        raise unknown("class", wanted, here) if here else InputError(f"{path} has no class {wanted}")
    return checked(getattr(module, wanted), name)


def checked(cls: Any, name: str) -> type[Listener]:
    """Return `cls`, which goes by `name`. Raise InputError where it is no policy that could run."""
    if not _is_policy(cls):
        raise InputError(f"{name} is neither a RetentionPolicy nor a Prefetcher (policies.core.policy)")
    if inspect.isabstract(cls):
        raise InputError(f"{name} does not define {', '.join(sorted(cls.__abstractmethods__))}")
    policy: type[Listener] = cls
    return policy


def _is_policy(cls: object) -> bool:
    return isinstance(cls, type) and issubclass(cls, RetentionPolicy | Prefetcher)


@cache
def _module(path: str, changed_ns: int) -> ModuleType:
    """Import the file at `path`, once for each of its versions."""
    name = f"{MODULE}{zlib.crc32(path.encode()):08x}_{Path(path).stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        said = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        raise InputError(f"{path}:{_line(path, error)}cannot be imported: {said}") from error
    return module


def told(error: Exception, names: Iterable[str], during: str) -> InputError | None:
    """What a policy in one of the files `names` raised, in one line with the place; None for another error."""
    for file, _ in filter(None, map(file_and_class, names)):
        path = str(Path(file).resolve())
        if line := _line(path, error).strip():
            return InputError(f"{path}:{line} {type(error).__name__}: {error}, in {during}")
    return None


def _line(path: str, error: BaseException) -> str:
    """The last line of the file that had to do with the error."""
    if isinstance(error, SyntaxError) and error.filename == path:
        return f"{error.lineno}: "
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path]
    return f"{lines[-1]}: " if lines else " "
