"""How the load of experts is kept even, defined so that no layout and no accumulation changes it.

**"sequence"**, an auxiliary loss: the formula of Switch Transformers (Fedus et al. 2022, arXiv:2101.03961, equations 4
to 6) as in transformers' `load_balancing_loss_func`, but over each sequence and each layer alone, as DeepSeek-V3's
sequence-wise balance loss is (2024, arXiv:2412.19437, equations 17 to 20). The loss over a whole batch multiplies
two means over its tokens, so it would depend on how the batch is cut; the loss of a sequence does not.

**"bias"**, no auxiliary loss (Wang et al. 2024, arXiv:2408.15664; DeepSeek-V3, section 2.1.2): a bias per expert is
added to the router's probabilities for the selection alone, and after each step moves by a fixed amount against
the sign of the expert's excess load, which is counted over the whole global batch.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from paceline.spec.data.labels import IGNORED

SequenceSum = Callable[[Tensor], Tensor]


def expert_counts(chosen: Tensor, experts: int, real: Tensor | None = None) -> Tensor:
    """Return how many tokens of each row chose each expert, [rows, experts] in fp32; `chosen` is [rows, seq, top_k].

    `real`, bool [rows, seq], says which tokens count; by default all.
    """
    flat = chosen.flatten(1)
    if real is None:
        ones = torch.ones((), dtype=torch.float32, device=chosen.device).expand_as(flat)
    else:
        ones = real.unsqueeze(2).expand_as(chosen).flatten(1).float()
    return torch.zeros(flat.shape[0], experts, device=chosen.device).scatter_add_(1, flat, ones)


def sequence_balance(
    probabilities: Tensor, counts: Tensor, top_k: int, over_sequence: SequenceSum | None = None
) -> Tensor:
    """Return the balance loss of each row, [rows]: experts x the sum over experts of load x mean probability.

    Load is the part of the row's tokens that chose the expert. `probabilities` [rows, seq, experts] add up to one for
    each token and to zero for padding, `counts` [rows, experts] are those of `expert_counts` with `top_k` choices a
    token. An even load gives top_k, all tokens on the same experts give as much as `experts`. Gradients flow through
    the probabilities alone. Where ranks share sequences, `over_sequence` sums over them, and their results add up.
    """
    if over_sequence is not None:
        counts = over_sequence(counts)
    counts = counts.to(probabilities.dtype)
    tokens = (counts.sum(dim=1) / top_k).clamp(min=1)  # [rows]; a row of padding alone has none
    return counts.shape[1] / tokens.square() * (counts * probabilities.sum(dim=1)).sum(dim=1)


def before_last_label(labels: Tensor) -> Tensor:
    """Return which tokens of `labels` [rows, seq] are no padding, bool: those up to the row's last label that counts.

    What follows it changes nothing in a causal model's loss, whether it fills up a short sample or a rank's share.
    Tokens before it without a label of their own (a prompt, say) do, and count.
    """
    return (labels != IGNORED).flip(1).cumsum(dim=1).flip(1) > 0


def bias_step(bias: Tensor, counts: Tensor, rate: float) -> None:
    """Move the selection bias [experts] in place by `rate` towards experts that got less than the mean of `counts`."""
    excess = counts * counts.numel() - counts.sum()  # whole numbers, so that the sign is exact
    bias.sub_(rate * excess.sign().to(bias.dtype))
