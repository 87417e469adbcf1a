"""Torch files of other tools as plain dicts, lists and numpy arrays, with no code of theirs run."""

from pathlib import Path
from typing import Any

from traces.errors import InputError


def load(path: Path) -> Any:
    """Return the content of a .pt that holds tensors, numbers, texts and containers only. Raise InputError."""
    import torch  # here, as other dumps are imported without it

    def plain(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.numpy()
        if isinstance(value, dict):
            return {key: plain(each) for key, each in value.items()}
        return [plain(each) for each in value] if isinstance(value, list | tuple) else value

    try:
        return plain(torch.load(path, map_location="cpu", weights_only=True))
    except Exception as error:  # torch raises a dozen kinds for a damaged file
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise InputError(f"{path} is no .pt of plain tensors, or damaged: {reason[0]}") from error
