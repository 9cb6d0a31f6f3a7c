"""How many tokens' logits exist at a time. Imports no torch: the memory forecast and the loss both ask here."""

from __future__ import annotations

LOGITS_LIMIT_ELEMENTS = 2**27  # 512 MiB in fp32: large enough for efficient products, small beside the weights


def loss_chunk_tokens(vocab: int, limit_elements: int = LOGITS_LIMIT_ELEMENTS) -> int:
    """Return the tokens whose logits [tokens, vocab] are computed at a time."""
    return max(1, limit_elements // vocab)
