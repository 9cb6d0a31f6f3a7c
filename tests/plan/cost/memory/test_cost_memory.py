"""Memory terms: by hand, and the orders that must hold whatever the numbers."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_examples import block, cluster, memory_terms, opened, plan, profile

from paceline.plan.cost.sheet import PricedTask
from paceline.spec.layout import Layout


def bytes_of(chosen, layers=4, devices=4, optimizer="adamw"):
    context = PricedTask(profile(layers), cluster(devices), chosen.batch_samples, 1, optimizer)
    return {term.name: term.value for term in memory_terms(context, chosen)}


def total(chosen, layers=4, devices=4):
    return sum(bytes_of(chosen, layers, devices).values())


def test_single_device_by_hand():
    held = bytes_of(plan(Layout(), 2), devices=1)
    assert held["weights"] == held["gradients"] == 4 * 5e6 and held["optimizer state"] == 8 * 5e6
    assert held["activations"] == 2 * 5 * (4e5 * 4 + 1e5 * 4)
    assert held["transients"] == 2 * 4 * 1e5 and held["weight copies"] == 0 and held["runtime"] == 1e8
    assert bytes_of(plan(Layout(), 2), devices=1, optimizer="sgd")["optimizer state"] == 4 * 5e6


def test_bf16_keeps_fp32_state_and_halves_activations():
    held = bytes_of(plan(Layout(), 2, precision="bf16"), devices=1)
    assert held["weights"] == 4 * 5e6 and held["weight copies"] == 2 * 5e6
    assert held["activations"] == 2 * 5 * (4e5 * 2 + 1e5 * 4)


def test_fp64_doubles_the_state():
    held = bytes_of(plan(Layout(), 1, precision="fp64"), devices=1)
    assert held["weights"] == 8 * 5e6 and held["optimizer state"] == 16 * 5e6


def test_sharding_divides_the_state_and_gathers_two_units():
    held = bytes_of(plan(Layout(dp_shard=4), 2))
    assert held["weights"] == held["gradients"] == 5e6 and held["optimizer state"] == 2 * 5e6
    assert held["weight copies"] == 4 * 3e6  # the root and two blocks
    whole = bytes_of(plan(Layout(dp_shard=4), 2, zero=1))
    assert whole["gradients"] == 4 * 5e6 * 1.25 and whole["weight copies"] == 4 * 5e6
    dropped = bytes_of(plan(Layout(dp_shard=4), 2, zero=3, whole_gradients=True))
    assert dropped["gradients"] == 4 * 5e6 * 1.25 and dropped["weight copies"] == 4 * 3e6
    at_once = bytes_of(plan(Layout(dp_shard=4), 16, zero=3, whole_gradients=True))
    assert at_once["gradients"] == 5e6, "of a single micro-batch they are scattered as they come"


def test_recompute_keeps_inputs_and_one_working_block():
    held = bytes_of(plan(Layout(), 1, recompute="full"), devices=1)["activations"]
    assert held == (4e5 + 1e5) * 4 + 4 * 5e4 * 4 + (4e5 + 1e5) * 4  # embedding, four inputs, one block at work


@pytest.mark.parametrize(("logits", "is_head"), [(1e5, False), (2e6, True)])
def test_the_head_is_done_before_a_block_is_computed_again(logits: float, is_head: bool) -> None:
    """A block that is computed again has 2e6 bytes and 4e5 of its gradients; the head `logits` and as many gradients.

    Of the two moments the larger counts; what the other one needs more is free by then, in blocks of other sizes.
    """
    head = block("head", "head", recomputable=False, saved_elements=logits, saved_fp32_elements=0.0,
                 transient_elements=logits)  # fmt: skip
    model = opened(dataclasses.replace(profile(4), blocks=(*profile(4).blocks, head)))
    context = PricedTask(model, cluster(1, "cuda"), 64, 1)
    held = {term.name: term.value for term in memory_terms(context, plan(Layout(), 1, recompute="full"))}
    kept, working = (4e5 + 1e5) * 4 + 4 * 5e4 * 4, (4e5 + 1e5) * 4
    assert held["activations"] == kept + (4 * logits if is_head else working)
    assert held["transients"] == 4 * (logits if is_head else 1e5)
    in_all = kept + 4 * logits + working + 4 * max(logits, 1e5)
    assert held["allocator buffers"] == in_all - held["activations"] - held["transients"]
    plain = {term.name: term.value for term in memory_terms(context, plan(Layout(), 1))}
    assert plain["activations"] == 5 * (4e5 + 1e5) * 4 + 4 * logits and plain["allocator buffers"] == 0


layouts = st.sampled_from([Layout(dp_replicate=4), Layout(dp_replicate=2, dp_shard=2), Layout(dp_shard=4)])
chosen = st.builds(
    plan,
    layouts,
    st.integers(1, 16),
    zero=st.sampled_from([1, 2, 3]),
    recompute=st.sampled_from(["none", "selective", "full"]),
    precision=st.sampled_from(["fp32", "bf16"]),
)


@settings(max_examples=60, deadline=None)
@given(chosen, st.integers(1, 8))
def test_memory_grows_with_the_micro_batch(first, more):
    second = plan(
        first.layout,
        first.micro_batch + more,
        zero=first.zero,
        recompute=first.recompute,
        precision=first.precision,
        accumulation=first.accumulation,
    )
    assert total(second) > total(first)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 8), st.sampled_from(["fp32", "bf16"]), st.sampled_from([2, 4]), st.integers(4, 12))
def test_zero_classes_are_ordered(micro_batch, precision, shards, layers):
    layout = Layout(dp_shard=shards)
    by_class = [total(plan(layout, micro_batch, precision=precision, zero=zero), layers, shards) for zero in (1, 2, 3)]
    assert by_class[0] > by_class[1] > by_class[2]


@settings(max_examples=30, deadline=None)
@given(layouts, st.integers(4, 16))
def test_recompute_modes_are_ordered(layout, micro_batch):
    none, selective, full = (
        total(plan(layout, micro_batch, recompute=mode), layers=12) for mode in ("none", "selective", "full")
    )
    assert none > selective > full


def test_no_term_is_negative():
    for value in bytes_of(plan(Layout(dp_replicate=2, dp_shard=2), 3, recompute="selective")).values():
        assert value >= 0


def test_state_of_zeros_own_example():
    """Figure 1 of Rajbhandari et al. 2020: 7.5 billion parameters with Adam, 120 GB on one device, 1.9 GB over 64."""
    times = 7.5e9 / 5e6  # what is priced here has 5 million

    def state_gb(layout, zero, devices):
        held = bytes_of(plan(layout, 1, zero=zero), devices=devices)
        return times * (held["weights"] + held["gradients"] + held["optimizer state"]) / 1e9

    assert state_gb(Layout(), 3, 1) == pytest.approx(120)
    assert state_gb(Layout(dp_replicate=64), 3, 64) == pytest.approx(120, rel=0.01), "copies share nothing"
    assert state_gb(Layout(dp_shard=64), 3, 64) == pytest.approx(1.9, abs=0.05)


def test_activations_of_several_micro_batches_add_up():
    one, three = (bytes_of(plan(Layout(), rows), devices=1)["activations"] for rows in (1, 3))
    assert three == 3 * one


def late(chosen, devices=1, **changes):
    """Return a plan's terms on a GPU, of a model whose gradients are of the size of what its passes hold."""
    context = PricedTask(opened(profile(4, **changes)), cluster(devices, "cuda"), chosen.batch_samples, 1)
    return {term.name: term.value for term in memory_terms(context, chosen)}


def test_gradients_of_one_micro_batch_come_as_activations_go():
    one, two = (late(plan(Layout(), rows, batch=16)) for rows in (16, 8))
    assert one["held in turn"] == -one["gradients"], "none is there when the forward pass ends"
    assert "held in turn" not in two, "the second micro-batch meets those of the first"


def test_the_end_of_the_backward_pass_holds_all_gradients():
    held = late(plan(Layout(), 1, batch=1), saved_elements=1e3, saved_fp32_elements=0.0)
    state = held["weights"] + held["gradients"] + held["optimizer state"] + held["runtime"]
    assert sum(held.values()) == pytest.approx(state + 4 * 1e5), "and the gradient of what the first block returns"
    before = state - 4 * 1e6 + held["activations"] + held["transients"]
    assert sum(held.values()) > before, "while what the first block keeps is there, its gradient is not"


def test_late_blocks_with_all_parameters_come_before_early_activations_go():
    """A network whose first block keeps everything and whose last one has all weights: nothing is held in turn."""
    first = block("layers.0", parameters=1, saved_elements=2e7, saved_fp32_elements=0.0)
    last = block("layers.1", parameters=5_000_000, saved_elements=1.0, saved_fp32_elements=0.0)
    model = opened(dataclasses.replace(profile(1), blocks=(first, last)))
    context = PricedTask(model, cluster(1, "cuda"), 1, 1)
    held = {term.name: term.value for term in memory_terms(context, plan(Layout(), 1, batch=1))}
    assert -held.get("held in turn", 0.0) <= 1e-3 * held["gradients"]
    turned = opened(dataclasses.replace(model, blocks=(last, first)))
    context = PricedTask(turned, cluster(1, "cuda"), 1, 1)
    held = {term.name: term.value for term in memory_terms(context, plan(Layout(), 1, batch=1))}
    assert -held["held in turn"] >= 0.99 * held["gradients"]


def test_a_traced_block_may_have_all_gradients_before_any_activation_goes():
    whole = dataclasses.replace(profile(1), blocks=(block("all"),), source="traced")
    chosen = plan(Layout(), 1, batch=1)
    held = memory_terms(PricedTask(opened(whole), cluster(1, "cuda"), 1, 1), chosen)
    assert all(term.name != "held in turn" for term in held)


@pytest.mark.parametrize("layout", [Layout(dp_replicate=2), Layout(dp_shard=2), Layout(tp=2), Layout(pp=2)])
def test_gradients_are_there_throughout_where_ranks_meet(layout):
    assert "held in turn" not in late(plan(layout, 4, batch=4 * layout.data_degree), devices=2)


def test_an_update_of_an_operator_after_the_other_has_values_of_its_own():
    chosen = plan(Layout(), 1, batch=1)
    model = opened(profile(4, saved_elements=1e3, saved_fp32_elements=0.0))
    fused, plain = (
        sum(t.value for t in memory_terms(PricedTask(model, cluster(1, "cuda"), 1, 1, name), chosen))
        for name in ("adamw", "nadam")
    )
    assert plain > fused
