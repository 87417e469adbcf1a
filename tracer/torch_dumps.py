"""Torch files of other tools as plain dicts, lists and numpy arrays, with no code of theirs run."""

from pathlib import Path
from typing import Any


def load(path: Path) -> Any:
    """Return the content of a .pt that holds tensors, numbers, texts and containers only."""
    import torch  # here, as other dumps are imported without it

    def plain(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.numpy()
        if isinstance(value, dict):
            return {key: plain(each) for key, each in value.items()}
        return [plain(each) for each in value] if isinstance(value, list | tuple) else value

    return plain(torch.load(path, map_location="cpu", weights_only=True))
