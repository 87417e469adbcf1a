"""Torch files of other tools as plain dicts, lists and numpy arrays, with no code of theirs run."""

from pathlib import Path
from typing import Any

from traces.errors import InputError


def load(path: Path) -> Any:
    """The content of a .pt that holds tensors, numbers, texts and containers only. Raises InputError."""
    import torch

    try:
        return _plain(torch.load(path, map_location="cpu", weights_only=True))
    except Exception as error:  # torch raises a dozen kinds for a damaged file
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise InputError(f"{path} is no .pt of plain tensors, or damaged: {reason[0]}") from error


def _plain(value: Any) -> Any:
    import torch

    if isinstance(value, torch.Tensor):
        return value.numpy()
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return value
