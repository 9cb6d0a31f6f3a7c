"""Noise on the embeddings of tokens while a model is trained: NEFTune (Jain et al. 2023, arXiv:2310.05914).

    x <- x + alpha / sqrt(seq * hidden) * e,  e even over -1..1

The noise is drawn where the embedding returns, for each sample, so it is the same on every layout (run/numerics/
randomness). There is none in evaluations, nor in the reference that preference pairs are held against.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from paceline.errors import ConfigError

HELD_AS = "paceline_noise"  # the attribute of an embedding that has noise


class EmbeddingNoise:
    """A hook that adds noise to what an embedding returns in training."""

    def __init__(self, alpha: float) -> None:
        self.alpha = alpha
        self.is_on = True
        # Where ranks share a sequence, of which each embeds a part: how many tokens the whole one has.
        self.whole_length: Callable[[], int | None] | None = None

    def __call__(self, module: nn.Module, args: tuple[Any, ...], out: Tensor) -> Tensor:
        """Return the embeddings [rows, seq, hidden] of tokens [rows, seq] with noise; in fp32 or wider till the end."""
        handed_on = args[0].is_floating_point()  # a last pipeline stage holds the embedding for its head alone
        if handed_on or not (module.training and self.is_on):
            return out
        length = args[0].shape[-1]  # of what is embedded, of which `out` may be a part
        if self.whole_length is not None:  # this rank's part is filled up: its length is not the sequence's
            length = self.whole_length() or length
        wide = torch.promote_types(out.dtype, torch.float32)
        drawn = torch.rand_like(out, dtype=wide) * 2 - 1
        return (out.to(wide) + self.alpha / math.sqrt(length * out.shape[-1]) * drawn).to(out.dtype)


def add_noise(model: nn.Module, alpha: float) -> None:
    """Have a model's embedding of tokens add noise in training, in place; one that does so already is left as it is.

    Raises ConfigError where no embedding of tokens is known, or other noise is there.
    """
    held = list(noises(model))
    if any(noise.alpha != alpha for noise in held):
        raise ConfigError("the model's embedding has other noise already", "an earlier run gave it", "a fresh model")
    if held:
        return
    embedding = _embedding_of(model)
    noise = EmbeddingNoise(alpha)
    setattr(embedding, HELD_AS, noise)
    embedding.register_forward_hook(noise)


def noises(model: nn.Module) -> Iterator[EmbeddingNoise]:
    """Yield what adds noise in a model."""
    for module in model.modules():
        if isinstance(noise := getattr(module, HELD_AS, None), EmbeddingNoise):
            yield noise


def _embedding_of(model: nn.Module) -> nn.Module:
    """Return the embedding of tokens: what transformers says, or the only one that is trained or built to train."""
    try:
        told = getattr(model, "get_input_embeddings", lambda: None)()
    except NotImplementedError:  # models of images
        told = None
    if isinstance(told, nn.Module):
        return told
    found = {name: each for name, each in model.named_modules() if isinstance(each, nn.Embedding) and each.training}
    if len(found) != 1:
        raise ConfigError(
            f"task.embedding_noise with {type(model).__name__}",
            f"it has the embeddings {', '.join(found)}, and which of them is of tokens is not known" if found
            else "it has no nn.Embedding",
            "get_input_embeddings() of the model that returns it, or embedding_noise = 0",
        )  # fmt: skip
    return next(iter(found.values()))
