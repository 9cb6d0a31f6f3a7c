"""Small decoders and batches for the tests beside this file."""

from __future__ import annotations

import torch

from paceline.task.models.decoder import Decoder
from paceline.task.models.init import initialise
from paceline.task.models.shape import DecoderConfig

# The longest way through the tiny decoders below: two layers of products over 32 and 48 features, 12 keys and a softmax
# each, norms, the head, and back with sums over 36 tokens.
OPERATIONS = 1000


def tiny(**changes: object) -> DecoderConfig:
    shape = {"hidden": 32, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 8, "ffn": 48, "vocab": 50, "max_seq": 16}
    return DecoderConfig("tiny", **{**shape, **changes})  # type: ignore[arg-type]


def built(config: DecoderConfig, dtype: torch.dtype = torch.float32) -> Decoder:
    model = Decoder(config)
    initialise(model, seed=1)
    return model.to(dtype)


def batch(config: DecoderConfig, rows: int = 3, seq: int = 12) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(0, config.vocab, (rows, seq + 1), generator=generator)
    labels = tokens[:, 1:].clone()
    labels[0, :4] = -100
    return tokens[:, :-1], labels
