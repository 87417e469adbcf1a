"""Torch files of other tools as plain dicts, lists and numpy arrays, with no code of theirs run."""

from pathlib import Path
from typing import Any

from traces.errors import InputError
from traces.files import plain

MOST_VALUES = 10**6
"""Of a small file. A larger one holds at most a value a byte, unless it repeats what it holds: a list that stands in
several places, a tensor that gives one number for many."""


def load(path: Path) -> Any:
    """The content of a .pt that holds tensors, numbers, texts and containers only. Raises InputError."""
    import torch

    size = plain(path).stat().st_size if path.exists() else 0
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
        if _values(content, {}) > max(size, MOST_VALUES):
            raise InputError("its lists and tensors repeat what they hold so often that they would not fit into memory")
        return _plain(content)
    except Exception as error:  # torch raises a dozen kinds for a damaged file
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise InputError(f"{path} is no .pt of plain tensors, or damaged: {reason[0]}") from error


def _values(value: Any, counted: dict[int, int]) -> int:
    """How many values there are once all that repeats is written out; each list is counted once."""
    import torch

    if isinstance(value, torch.Tensor):
        return 1 + value.numel()
    if not isinstance(value, dict | list | tuple):
        return 1
    if id(value) not in counted:
        held = value.values() if isinstance(value, dict) else value
        counted[id(value)] = 1 + sum(_values(one, counted) for one in held)
    return counted[id(value)]


def _plain(value: Any) -> Any:
    import torch

    if isinstance(value, torch.Tensor):
        return value.numpy()
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return value
