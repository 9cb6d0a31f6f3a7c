"""Recipes of training in 8 bits and less: what of the peak their products reach, and what their casts move.

Products of a decoder's layers take operands in fp8; attention, norms, the embedding and the head stay in bf16
(Transformer Engine's and torchao's defaults). Each operand, and each gradient that comes back, is cast from bf16: it is
read, once more where its largest value is looked for first, and written in the layouts that products read.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Recipe:
    """How operands of products are cast: bytes moved for each value of them, and the rate over that of plain fp8."""

    name: str
    cast_bytes: float
    rate: float = 1.0
    # Whether the second layout is the first one turned over: products of Blackwell read one layout either way, and it
    # is not written there (`create_transpose = columnwise_usage && !nvte_is_non_tn_fp8_gemm_supported()` of Transformer
    # Engine's quantizer.cpp, read 2026-11-28).
    turns: bool = False
    # Bytes of an operand that is kept for the backward pass: Transformer Engine keeps inputs of products as they were
    # cast, in the one layout that a weight's gradient needs (`saved_inputmat` after `update_usage(rowwise_usage=False)`
    # in module/linear.py, read 2026-11-28); others, torchao's among them, keep them as they came, whatever they take.
    kept_bytes: float = math.inf

    def bytes_on(self, family: str) -> float:
        """Return the bytes moved for each value on a device of a generation."""
        return self.cast_bytes - (1.0 if self.turns and family == "blackwell" else 0.0)


# Read 2 and write two layouts of 1 (Transformer Engine's fused cast and transpose; delayed scaling knows the largest
# value from steps before); dynamic scaling reads twice. Rowwise products are CUTLASS's: torchao's README has 10 % over
# bf16 with them and 25 % tensorwise on Llama 3 8B, 8 x H100; that and torchtitan's tables are what the rate is from.
# Blocks of 128 (DeepSeek-AI 2024, arXiv:2412.19437, section 3.3.2) are accumulated outside of the matrix units; that of
# them nobody here measured. Blocks of 32 are scaled inside of Blackwell's. The largest value of a block is found in
# the tile that a kernel has read once for both layouts (Transformer Engine's cast_mxfp8_2D_kernel and its blockwise
# quantize_transpose, read 2026-11-27); a layout has a scale of 1 byte for 32 values, or of 4 for 128.
RECIPES = {
    recipe.name: recipe
    for recipe in (
        Recipe("delayed", 4.0, turns=True, kept_bytes=1.0),
        Recipe("current", 6.0, turns=True, kept_bytes=1.0),
        Recipe("tensorwise", 6.0),
        Recipe("rowwise", 6.0, 0.6),
        Recipe("blockwise", 4.0625, 0.8, kept_bytes=1 + 4 / 128),
        Recipe("mxfp8", 4.0625, kept_bytes=1 + 1 / 32),
    )
}
# Operands in blocks of 16, gradients of weights through a random Hadamard transform, and some layers in bf16 (NVIDIA
# 2025, arXiv:2509.25149, section 3). The rate is from MLPerf's logs of Llama 3.1 405B on 512 GB200 in a layout: 0.17 s
# a micro-batch in fp8 (training 5.0, tyche_ngpu512), 0.12 s in NVFP4 (5.1), transform and bf16 layers left out there.
NVFP4 = Recipe("nvfp4", 10.0, 0.9, kept_bytes=1 / 2 + 1 / 16)
# Signs of a recipe in what tables call a precision: fp8-cs is current scaling, fp8-sc are blocks ("subchannels").
SIGNS = {
    "rowwise": "rowwise",
    "tensorwise": "tensorwise",
    "mx": "mxfp8",
    "block": "blockwise",
    "-sc": "blockwise",
    "-cs": "current",
    "-ds": "delayed",
}
PLAIN = Recipe("", 0.0)


def recipe_of(precision: str, usual: str) -> str:
    """Return the name of the recipe that a table's word for its precision tells, else the program's `usual` one."""
    return next((name for sign, name in SIGNS.items() if sign in precision.lower()), usual)
