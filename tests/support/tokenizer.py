"""A tokenizer that takes each byte of UTF-8 for a token, its number for its id, and 256 for the end."""

from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

END = 256


def byte_tokenizer() -> Any:
    vocabulary = {letter(byte): byte for byte in range(256)} | {"<end>": END}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", pad_token="<end>")


def letter(byte: int) -> str:
    """What the byte-level pre-tokenizer writes for a byte: itself, if it can be seen, else a letter after them all."""
    hidden = [b for b in range(256) if not (33 <= b <= 126 or 161 <= b <= 172 or 174 <= b <= 255)]
    return chr(256 + hidden.index(byte)) if byte in hidden else chr(byte)
