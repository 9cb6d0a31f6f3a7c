"""`paceline.verify_loop` on strangers' right loops: told equal, or refused in words that say what to do."""

from __future__ import annotations

from typing import Any

import odd_loops
import pytest
import right_loops
import torch
import updating_loops
from distributed import run_kept, run_ranks

from paceline.errors import ConfigError
from paceline.verify.loops.reference import ASIDE

RIGHT: dict[str, tuple[Any, ...]] = {
    "a GAN's judge": (right_loops.gan, "judge"),
    "a GAN's maker": (right_loops.gan, "maker"),
    "two optimizers and a schedule": (right_loops.two_optimizers,),
    "gradients cleared at the end": (right_loops.cleared_at_the_end, False),
    "a gradient penalty": (right_loops.gradient_penalty,),
    "contrast with gathered negatives": (right_loops.contrast, False),
    "a teacher that follows": (right_loops.teacher,),
    "layers frozen in turn": (right_loops.in_turn,),
    "policy gradients of drawn actions": (right_loops.policy,),
    "LBFGS": (right_loops.lbfgs,),
    "gradients changed in place, in lists": (right_loops.changes_gradients, "in lists"),
    "gradients changed in place, one by one": (right_loops.changes_gradients, "one by one"),
    "time comes first": (right_loops.time_first,),
    "a loss scale by hand": (right_loops.amp_by_hand, "fp64"),
    "a loss scale by hand in fp32": (right_loops.amp_by_hand, "fp32"),
    "accumulation by hand": (right_loops.accumulated,),
    "a child called module": (right_loops.of_model, "own module"),
    "blocks computed again": (right_loops.of_model, "recomputed"),
    "compiled blocks": (right_loops.of_model, "compiled blocks"),
    "a compiled model": (right_loops.of_model, "compiled"),
    "weight norm by hooks": (right_loops.of_model, "weight norm by hooks"),
    "spectral norm, evaluated": (right_loops.of_model, "spectral norm, evaluated"),
    "whole numbers": (right_loops.of_model, "whole numbers"),
    "a loss that rank 0 alone tells": (right_loops.of_model, "DDP"),
    "statistics kept from before": (right_loops.statistics, "kept"),
    "sparse gradients": (odd_loops.sparse_gradients, True),
    "gradients normalised by row": (odd_loops.normalised_gradient, True),
    "ranks that share their rows, and say so": (right_loops.same_batch, True),
    "gradients averaged by the optimizer": (updating_loops.reduced_by_the_optimizer, 2),
    "gradients added up by the optimizer": (updating_loops.reduced_by_the_optimizer, 1),
    "clipped by value, as is said": (updating_loops.clipped_by_value, "said"),
    "sharpness-aware": (updating_loops.sharpness_aware,),
    "packed rows": (updating_loops.packed, False),
    "targets in lists": (updating_loops.targets_in_lists,),
    "advantages that sum to zero": (updating_loops.advantages,),
}


@pytest.mark.parametrize("what", RIGHT)
def test_a_right_loop_is_equal(what: str) -> None:
    results = run_kept(*RIGHT[what][:1], 2, *RIGHT[what][1:])
    assert all(result.equal for result in results), results[0].text


@pytest.mark.parametrize("kind", ["plain", "autocast", "statistics"])
def test_micro_batches_of_one_device_are_held_too(kind: str) -> None:
    """Parts in bf16 round otherwise by the number of rows, and are not called rows that see each other."""
    found = right_loops.pieces_by_hand(kind)
    assert (found.verdict == "unequal") is (kind == "statistics"), found.text
    assert ("not a sum over rows" in found.text) is (kind == "statistics")


def test_rows_that_see_each_other_within_a_rank_are_told() -> None:
    """One device that takes the same pieces computes the same numbers, and is not what is meant."""
    for given in ((right_loops.contrast, True), (right_loops.statistics, "own")):
        results = run_kept(given[0], 2, *given[1:])
        for result in results:
            assert result.equal is False and result.first_difference.quantity == "whole batch"
            assert "not a sum over rows" in result.text and 'coupled = "batch"' in result.text


@pytest.mark.parametrize(("loop", "at"), [((updating_loops.packed, True), 1), ((updating_loops.asleep,), 2)])
def test_rows_that_see_each_other_where_it_hardly_shows_are_told(loop: tuple[Any, ...], at: int) -> None:
    """Numbers of segments that go on hide nothing; what sleeps behind zeros shows in the second step."""
    for result in run_kept(loop[0], 2, *loop[1:]):
        assert result.equal is False and result.first_difference.family == "loss not a sum over rows"
        assert result.first_difference.step == at


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ((updating_loops.reduced_by_the_optimizer, 0), "it is not reduced over the ranks"),
        ((updating_loops.divided_twice,), "once too often"),
        ((updating_loops.clipped_by_value, "unsaid"), "clipped by value at 0.01"),
        ((updating_loops.clipped_by_value, "by parameter"), "times a number of its own below one"),
    ],
    ids=["reduced by nobody", "divided twice", "clipped by value", "clipped by parameter"],
)
def test_an_update_that_one_device_lacks_is_told_with_the_way_to_say_it(given: tuple[Any, ...], says: str) -> None:
    for result in run_kept(given[0], 2, *given[1:]):
        assert result.equal is False and result.first_difference.quantity == "gradients"
        assert says in result.mistake and says in result.text


def test_gradients_that_see_the_rows_of_a_rank_alone_are_told() -> None:
    """The loss is a sum over rows; each rank normalises a gradient of its own rows, as one device in pieces does."""
    for result in run_kept(odd_loops.normalised_gradient, 2, False):
        assert result.equal is False and result.first_difference.quantity == "whole batch"
        assert result.first_difference.name == "gradient" and "though the loss is" in result.text


def test_a_sparse_gradient_that_is_not_summed_is_told() -> None:
    for result in run_kept(odd_loops.sparse_gradients, 2, False):
        assert result.equal is False and result.first_difference.name == "embed.weight"


def test_a_buffer_that_the_step_moves_by_itself_is_named() -> None:
    """One device knows nothing of it: that is no defect of the loop, and the words say what to do."""
    for result in run_kept(odd_loops.buffer_of_the_step, 2):
        assert result.equal is False and result.first_difference.step == 2
        assert "buffer mean is not one device's when step 2 begins" in result.text


@pytest.mark.parametrize("shared", [False, True])
def test_a_buffer_that_evaluations_alone_read_is_held_among_ranks(shared: bool) -> None:
    """No loss and no gradient shows it: told "equal" though what is evaluated and saved depended on the rank."""
    for result in run_kept(odd_loops.buffer_of_evaluations, 2, shared):
        assert result.equal is shared, result.text
        assert shared or "every rank moves buffer mean by its own rows" in result.text


@pytest.mark.parametrize("kind", ["divided", "reduced", "of plain"])
def test_a_loop_whose_weights_have_hooks_is_right_where_one_device_is(kind: str) -> None:
    """A loop's own hooks that end as one device does, and a model's that `plain=` has too, which lost them."""
    for result in run_kept(odd_loops.hooked_weight, 2, kind):
        assert result.equal, result.text


@pytest.mark.parametrize(
    "kind", ["masked", "divided once more", "of a rank", "normalised", "counted", "of plain alone"]
)
def test_a_hook_that_one_device_lacks_is_told_and_no_loop_is_right_by_its_own(kind: str) -> None:
    """A mask, which is the model's, and a mean made twice look alike: who wrote it says so by `plain=`."""
    for result in run_kept(odd_loops.hooked_weight, 2, kind):
        assert result.equal is False and result.first_difference.name == "0.weight", result.text
        named = "0.weight has a hook" in result.text and "plain=module" in result.text
        assert named is (kind != "of plain alone")


def test_of_no_rows_none_are_the_same() -> None:
    """Three ranks: two of them have run out of data."""
    results = run_kept(right_loops.no_rows, 3)
    assert results[0].equal, results[0].text


def test_the_reference_leaves_the_random_numbers_of_accelerators_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds: list[int] = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeds.append)
    assert right_loops.of_model("own module").equal
    assert ASIDE not in seeds


def test_actions_that_are_drawn_are_told_as_not_reproducible() -> None:
    result = run_kept(right_loops.drawn_actions, 2)[0]
    assert result.equal is False and result.first_difference.family == "not reproducible"


@pytest.mark.parametrize(
    ("loop", "given", "what", "advice"),
    [
        (right_loops.same_batch, (False,), "ranks 0 and 1 have the same batch in step 1", "DistributedSampler"),
        (right_loops.cleared_at_the_end, (True,), "no parameter has a gradient after step 1", "zero_grad"),
        (right_loops.thawed, (), "was frozen when the proof began", "requires_grad = True"),
        (right_loops.told_a_word, (), "the step returned str, which is no loss", "None to leave it out"),
        (right_loops.objective_on_its_own, (), "calls the loop's own model", "the model it is given"),
        (right_loops.objective_with_peers, (), "calls other ranks by itself: allreduce", "sums alone"),
        (right_loops.optimizer_of_its_own, (), "an optimizer of other parameters", "made of them"),
        (right_loops.no_optimizer, (), "returned list, which has no step", "optimizers"),
        (
            right_loops.follows_the_loss,
            (),
            "ReduceLROnPlateau, whose step() wants metrics".replace("()", r"\(\)"),
            "a fixed rate",
        ),
        (right_loops.update_that_fails, (), "the update fails on one device", "what the loop updates its own with"),
    ],
)
def test_what_cannot_be_compared_is_refused_in_words(loop: Any, given: Any, what: str, advice: str) -> None:
    with pytest.raises(ConfigError, match=what) as error:
        run_ranks(loop, 2, *given)
    assert advice in error.value.try_
