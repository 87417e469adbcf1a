"""What a live model is asked: texts, files of prompts, or token ids for models that have no tokenizer."""

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tracer.models import LoadedModel
from tracer.prompts import Columns, Prompt, read_prompts
from traces.errors import InputError, refuse


class TokenIds:
    """Stands for a tokenizer: it reads token ids, `5,6,7`, and writes what the model's own does, if there is one."""

    def __init__(self, vocabulary: int, own: Any) -> None:
        self._vocabulary, self._own = vocabulary, own
        self.eos_token_id = getattr(own, "eos_token_id", None)
        self.pad_token_id = getattr(own, "pad_token_id", None)

    def __call__(self, text: str, **_: object) -> dict[str, list[int]]:
        return {"input_ids": self.known(text.split(","))}

    def known(self, ids: Sequence[int | str]) -> list[int]:
        """Return ids, which may be text. Raise InputError for one that the model has not."""
        for token in ids:
            if not (re.fullmatch(r"\s*\d{1,18}\s*", str(token)) and int(token) < self._vocabulary):
                raise InputError(
                    f"token ids: the model has no token {str(token)[:40]}, its vocabulary has {self._vocabulary}; "
                    "write numbers with commas between them, as in 5,6,7"
                )
        return [int(token) for token in ids]

    def decode(self, tokens: Sequence[int], **options: Any) -> str:
        """Return the text of ids: numbers where nothing else is known."""
        return ",".join(map(str, tokens)) if self._own is None else str(self._own.decode(tokens, **options))


def reading_ids(loaded: LoadedModel) -> LoadedModel:
    """Return the model as one that is asked with token ids."""
    vocabulary = loaded.model.config.get_text_config().vocab_size
    return replace(loaded, tokenizer=TokenIds(vocabulary, loaded.tokenizer))


def prompts_of(texts: Sequence[str], file: Path | None, token_ids: str | None) -> list[Prompt]:
    """Return what was asked for; InputError unless it was asked for in one way."""
    sources = [bool(texts), file is not None, token_ids is not None]
    what = "say what the model is to continue with: --prompt TEXT, --prompts FILE or --token-ids 5,6,7"
    blank = not all(text.strip() for text in texts)
    refuse((sum(sources) != 1, what), (blank, "--prompt: a blank text is no prompt"))
    if file is not None:
        return read_prompts(file, Columns())
    if token_ids is not None:
        return [Prompt("0", "", "", (token_ids,))]
    return [Prompt(str(number), "", "", (text,)) for number, text in enumerate(texts)]
