"""A policy in a user's own file, named `path/my_file.py:MyPolicy`; nothing needs to be installed or registered.

The file is imported once for as long as it does not change, under a module name of its own, so that worker processes
find the same class by the same name. Results depend on its content (`content`).
"""

import hashlib
import site
import sys
import sysconfig
import traceback
import zlib
from contextlib import suppress
from functools import cache
from modulefinder import ModuleFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from policies.core.grammar import file_and_class
from policies.core.policy import Listener, Policy, Prefetcher
from traces.errors import InputError, unknown

MODULE = "policy_file_"
"""How the names of modules of such files begin."""

CONTENT = "__content__"
"""The name in such a module of the digest of what it was made from."""

_CONTENTS: dict[type, str] = {}


def load(name: str) -> type[Listener]:
    """Return the class that `path.py:Class` names. Raise InputError for whatever keeps it from being a policy."""
    path, class_name = file_and_class(name) or (name, "")
    file = Path(path)
    if not file.is_file():
        raise InputError(f"{path}: no such file")
    module = _module(str(file.resolve()), file.stat().st_mtime_ns)
    if class_name not in vars(module):
        own = (key for key, cls in vars(module).items() if _is_policy(cls) and cls.__module__ == module.__name__)
        raise unknown(f"class of {path}", class_name, own)
    policy = checked(vars(module)[class_name], name)
    _CONTENTS[policy] = vars(module)[CONTENT]
    return policy


def content(cls: type) -> str | None:
    """Return the digest of the file of a class and of what it imports, as they were then; None: `load` made none."""
    return _CONTENTS.get(cls)


def checked(cls: Any, name: str) -> type[Listener]:
    """Return `cls`, which goes by `name`. Raise InputError where it is no policy."""
    if not _is_policy(cls):
        raise InputError(f"{name} is neither a Policy nor a Prefetcher: derive it from one of `policies`")
    policy: type[Listener] = cls
    return policy


def _is_policy(cls: object) -> bool:
    return isinstance(cls, type) and issubclass(cls, Policy | Prefetcher)


@cache
def _module(path: str, changed_ns: int) -> ModuleType:
    """Import the file at `path`, once for each of its versions.

    It is compiled as it is now: bytecode on disk may be of an earlier edit of the same second and length.
    """
    name = f"{MODULE}{zlib.crc32(path.encode()):08x}_{Path(path).stem}"
    sys.modules[name] = module = ModuleType(name)
    own = vars(module)
    own["__file__"] = path
    own["print"] = lambda *values, **options: print(*values, **{"file": sys.stderr, **options})
    try:
        own[CONTENT] = hashlib.sha256(b"".join(each.read_bytes() for each in read_with(path))).hexdigest()
        exec(compile(Path(path).read_bytes(), path, "exec", dont_inherit=True), own)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path]
        line = error.lineno if isinstance(error, SyntaxError) else lines[-1] if lines else 1
        raise InputError(f"{path}:{line}: cannot be imported: {type(error).__name__}: {error}") from error
    return module


def read_with(file: str) -> tuple[Path, ...]:
    """Return the file and the user's own modules that it imports, found without running any, by name."""
    path = Path(file).resolve()
    ours = Path(__file__).parents[2]
    installed = {Path(each).resolve() for each in (*sysconfig.get_paths().values(), *site.getsitepackages())}
    beside = [path.parent, *(Path(each).resolve() for each in sys.path)]
    own = [each for each in dict.fromkeys(beside) if each != ours and not installed & {each, *each.parents}]
    finder = ModuleFinder([str(each) for each in own])
    with suppress(OSError):  # what cannot be read is no module that the file could have imported
        finder.run_script(str(path))
    files = (vars(module)["__file__"] for module in finder.modules.values())
    return tuple(sorted({path, *(Path(each) for each in files if each)}))
