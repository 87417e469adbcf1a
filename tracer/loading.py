"""How to load a model: the options of `moe-trace record`, read before any engine is imported."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from traces.errors import InputError, unknown
from traces.typed import Option, Positive

PANEL = "Running the model"

OFFLOADS = ("cpu", "disk")

DTYPES = ("auto", "float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Loading:
    """How to load a model."""

    dtype: Annotated[
        str, Option("auto (the checkpoint's), float32, bfloat16 or float16; of a GGUF file, of its KV cache.", PANEL)
    ] = "auto"
    device: Annotated[str, Option("auto, cpu, cuda, cuda:1, ...", PANEL)] = "auto"
    threads: Annotated[Positive | None, Option("Threads of the CPU.", PANEL, "all cores, one for a small model")] = None
    offload: Annotated[str | None, Option("cpu or disk: where weights go that the device cannot hold.", PANEL)] = None
    max_memory: Annotated[str | None, Option("Of the device for weights, such as 8GiB, with --offload.", PANEL)] = None
    offload_folder: Annotated[Path | None, Option("For weights on disk.", PANEL, "a temporary one")] = None

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise unknown("dtype", self.dtype, DTYPES)
        if self.offload not in (None, *OFFLOADS):
            raise unknown("place to offload to", self.offload, OFFLOADS)
        if self.offload is None and (self.max_memory or self.offload_folder):
            raise InputError("`max_memory` and `offload_folder` belong to `offload`: say cpu or disk")
