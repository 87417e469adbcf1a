"""GGUF files of zeros, written by the package gguf."""

from typing import Any

import numpy as np

Gguf = dict[str, tuple[tuple[int, ...], str]]
"""The tensors of a GGUF file: name -> (shape, outermost first; type)."""

BYTES_OF_256 = {
    "F32": 1024, "F16": 512, "BF16": 512, "Q4_0": 144, "Q4_1": 160, "Q5_0": 176, "Q5_1": 192, "Q8_0": 272,
    "Q2_K": 84, "Q3_K": 110, "Q4_K": 144, "Q5_K": 176, "Q6_K": 210, "IQ1_S": 50, "IQ1_M": 56, "IQ2_XXS": 66,
    "IQ2_XS": 74, "IQ2_S": 82, "IQ3_XXS": 98, "IQ3_S": 110, "IQ4_NL": 144, "IQ4_XS": 136, "TQ1_0": 54, "TQ2_0": 66,
    "MXFP4": 136,
}  # fmt: skip
"""Of 256 weights, by the blocks in ggml-common.h: scales, minima and packed weights."""


def write_tensors(writer: Any, tensors: Gguf) -> None:
    """Give a `gguf.GGUFWriter` these tensors, of zeros, and write its file."""
    import gguf  # where the tests that need it are not skipped

    for name, (shape, kind) in tensors.items():
        data = np.zeros((*shape[:-1], shape[-1] // 256 * BYTES_OF_256[kind]), np.uint8)
        writer.add_tensor(name, data, raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
