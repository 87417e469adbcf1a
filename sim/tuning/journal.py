"""The trials of a search on disk, by optuna's journal storage: each is one line, written when it is over.

What searches is a study in memory that has the same trials; so a journal holds none that is under way, and one that
was cut off anywhere is a beginning of the whole.
"""

import importlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import isfinite
from pathlib import Path
from typing import Any

from traces.errors import InputError

NAME = "trials.log"
STUDY = "moe-sim tune"

WORKERS = "--workers"
"""One of the words for what a search depends on."""

WHAT = "searched"
"""Attribute of the study: what a search depends on, by the words for it."""


def optuna() -> Any:
    """The package, its own logging silent. InputError where it is not installed."""
    try:
        module = importlib.import_module("optuna")
    except ImportError as error:
        raise InputError("moe-sim tune needs optuna: pip install 'moe-expert-cache[tune]'") from error
    module.logging.set_verbosity(module.logging.CRITICAL)
    return module


class Journal:
    """The journal in `folder`, if there is one; it is made by `begin`. Raise InputError for an invalid file."""

    def __init__(self, folder: Path) -> None:
        self._optuna = optuna()
        self.path = folder / NAME
        self._study: Any = self._found() if self.path.exists() else None

    @property
    def searched(self) -> dict[str, str]:
        """What its search depends on; empty if there is none."""
        return dict(self._study.user_attrs.get(WHAT, {})) if self._study else {}

    @property
    def workers(self) -> int | None:
        """How many run its trials, drawn together; None if there are none."""
        return int(self.searched[WORKERS]) if self.trials else None

    @property
    def trials(self) -> list[Any]:
        """Of optuna, in their order."""
        return list(self._study.get_trials(deepcopy=False)) if self._study else []

    def begin(self, searched: Mapping[str, str]) -> None:
        """Make it, unless it is there; one without trials becomes this search's."""
        with self._writing():
            if self._study is None:
                self._study = self._optuna.create_study(study_name=STUDY, storage=self._storage())
            if not self.trials:
                self._study.set_user_attr(WHAT, dict(searched))

    def add(self, trial: Any) -> None:
        """A trial of optuna that is over."""
        with self._writing():
            self._study.add_trial(trial)

    def discard(self) -> None:
        """Remove it: what it holds serves no search."""
        with self._writing():
            self.path.unlink(missing_ok=True)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise InputError(f"cannot write to {self.path}: {error.strerror or error}") from error

    def _found(self) -> Any:
        """The study in the file; None where a search was cut off before it had made one."""
        try:
            if not self.path.stat().st_size:
                return None
            study = self._optuna.load_study(study_name=STUDY, storage=self._storage())
            self._require_whole(study.user_attrs.get(WHAT, {}), study.get_trials(deepcopy=False))
            with self.path.open("r+b") as file:
                *whole, cut = file.read().split(b"\n")
                for line in whole:
                    json.loads(line)  # optuna ignores a damaged last line until it adds another
                file.truncate(file.tell() - len(cut))
        except Exception as error:  # optuna raises anything for a damaged file
            raise InputError(f"{self.path} is no journal that moe-sim tune writes: {error}") from error
        return study

    def _require_whole(self, searched: Any, trials: Sequence[Any]) -> None:
        """Raise ValueError or TypeError for what no search has written."""
        if trials and int(searched[WORKERS]) < 1:
            raise ValueError(f"{WORKERS} is {searched[WORKERS]}")
        if not all(isinstance(text, str) for text in dict(searched).values()):
            raise TypeError(f"{WHAT} is {searched}")
        self._optuna.create_study().add_trials(trials)  # which checks them
        for trial in trials:
            texts = [trial.user_attrs.get(name) for name in ("policy", "refusal")]
            is_value = isinstance(trial.value, float) and isfinite(trial.value) and trial.value >= 0
            if (
                not trial.state.is_finished()
                or not all(isinstance(text, str) for text in texts)
                or not (is_value if texts[0] else trial.value is None)
                or trial.params.keys() != trials[0].params.keys()
            ):
                raise ValueError(f"trial {trial.number} is not whole")

    def _storage(self) -> Any:
        journal, file = self._optuna.storages.journal, str(self.path)
        return self._optuna.storages.JournalStorage(journal.JournalFileBackend(file, journal.JournalFileOpenLock(file)))
