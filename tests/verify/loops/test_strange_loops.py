"""`paceline.verify_loop` on loops whose ranks begin apart or hold parts, and on loops that clip: the right cause."""

from __future__ import annotations

import pytest
import strange_loops
from distributed import run_kept, run_ranks

from paceline.errors import ConfigError


@pytest.mark.parametrize("kind", ["of FSDP1", "cut by hand"])
def test_parts_that_nothing_describes_are_refused_in_words(kind: str) -> None:
    """torch's words for two sizes that do not fit ended the ranks."""
    with pytest.raises(ConfigError, match=r"has the shape \[.*\] on rank 0, and \[.*\] on one device") as error:
        run_ranks(strange_loops.parts_of_weights, 2, kind)
    assert "fully_shard" in error.value.try_


def test_ranks_that_begin_with_other_weights_are_told_as_that() -> None:
    """It was told as another forward pass; a loop that brings its weights together first is right."""
    for result in run_kept(strange_loops.begins_apart, 2, False):
        assert result.equal is False and result.first_difference.quantity == "initial", result.text
        assert "ranks start from different weights" in result.text
    for result in run_kept(strange_loops.begins_apart, 2, True):
        assert result.equal, result.text


def test_of_a_loop_that_clips_the_mistake_is_named_beside_the_clipping() -> None:
    """Its gradient was held against one that is not clipped: "it is 0.07 times what one device has", of every loop."""
    assert all(result.equal for result in run_kept(strange_loops.clipped, 2, "as torch does"))
    wrong_loss = run_kept(strange_loops.clipped, 2, "another loss")[0]
    assert wrong_loss.equal is False and wrong_loss.first_difference.quantity == "loss"
    assert "times" not in (wrong_loss.mistake or ""), wrong_loss.text
    own_formula = run_kept(strange_loops.clipped, 2, "by a norm alone")[0]
    assert own_formula.equal is False and own_formula.first_difference.quantity == "gradients"
    assert "1 + " in own_formula.text and "0.0" not in (own_formula.mistake or ""), own_formula.text
