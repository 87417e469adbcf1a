"""What the name of a model or of a file says: which model it is, and at which precision (`precisions.toml`).

Publishers put an owner before a model's name, and behind it the precision and what made the file, as in
`bartowski/google_gemma-4-26B-A4B-it-GGUF` or `Qwen3-30B-A3B-UD-Q4_K_XL-00001-of-00003.gguf`.
"""

import re
from os.path import exists
from pathlib import Path

from traces.errors import unknown
from traces.files import read_toml

OF_FILES = r"gguf|part\d+of\d+|\d{5}-of-\d{5}|i1|ud|imat(rix)?|mlx|bnb|dwq|qat|dynamic|unsloth"
"""What names of files add to a model's beside the precision, in small letters."""

VARIANTS = r"(-(chat|instruct|base|it|v0\.\d+|\d{4}|128k|1m))+$"
"""What names of one architecture differ in: training, dates, versions below 1 and lengths of context."""

WHOLE = ("q", "iq", "tq", "bf16", "fp16", "f16", "fp8", "fp32", "f32")
"""Beginnings of precisions that a whole file has; others (MXFP4, INT4, INT8, HQQ) are the experts' alone."""


BITS: dict[str, float] = read_toml(Path(__file__).with_name("precisions.toml"))

SUFFIX = re.compile(rf"([-_.]({OF_FILES}|{'|'.join(map(re.escape, BITS))}))+$")
"""What the name of a file ends in behind that of its model."""


def canonical(name: str) -> str:
    """Return the table's name of a precision such as `bf16` or `UD-Q4_K_M`; InputError with near names."""
    key = name.strip().lower().replace("-", "_").replace(" ", "_").removeprefix("ud_")
    if key not in BITS:
        raise unknown("precision", name, BITS)
    return key


def is_precision(text: str) -> bool:
    """Return whether a text is the name of a precision, and not of a file."""
    return text.lower() in BITS and not exists(text)


def bytes_per_parameter(name: str) -> float:
    """Return the bytes of one parameter at a precision. Raise InputError as `canonical` does."""
    return BITS[canonical(name)] / 8


def name_of(bytes_per_parameter: float) -> str:
    """Return the first precision with so many bytes a parameter, or how many bits that are."""
    bits = 8 * bytes_per_parameter
    return next((name for name, each in BITS.items() if each == bits), f"{bits:.3g} bits a weight")


def base(name: str) -> str:
    """Return the last part of a path or hub id, in small letters; a tag (`repository:Q4_K_M`) is a part of the name."""
    return name.strip().rstrip("/").rsplit("/", 1)[-1].lower().replace(":", "-")


def parted(name: str) -> tuple[str, str]:
    """Return the name of the model in that of a file, in small letters, and the precision, empty where none is said."""
    whole = base(name)
    suffix = SUFFIX.search(whole)
    if suffix is None:
        return whole, ""
    said = [part.strip("_") for part in re.split(r"[-.]", suffix[0])]
    return whole[: suffix.start()], next((part for part in reversed(said) if part in BITS), "")


def family(name: str) -> str:
    """Return `deepseekv2lite` for `deepseek-ai/DeepSeek-V2-Lite-Chat`: variants and hyphens go."""
    return re.sub(VARIANTS, "", base(name)).replace("-", "")
