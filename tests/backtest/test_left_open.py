"""What a stranger's row leaves open, and what of a machine nobody prints: by hand on shapes of published runs."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from backtest_examples import LLAMA, case_of

from paceline.backtest.anchor import anchor_smallest
from paceline.backtest.layout import schedules_of
from paceline.backtest.machine import SOCKET_BYTES_PER_SECOND
from paceline.backtest.price import Interval, Priced, TermSeconds, contexts_of, price_cases
from paceline.backtest.rows import Reader
from paceline.backtest.schema import StepRow
from paceline.backtest.score import Scored
from paceline.backtest.shape import shape_of
from paceline.cluster.resolve import resolve_cluster
from paceline.plan.cost.collectives.within_passes import loss_collective, stream_collectives
from paceline.plan.cost.constants import read_constants
from paceline.plan.cost.time.axes import axis_components, seconds_of
from paceline.plan.cost.time.compute import SELECTIVE_SECONDS_PER_OPERATOR
from paceline.plan.cost.time.ring import ring
from paceline.plan.search.values import TIE_RATIO
from paceline.spec.cluster import ClusterSpec
from paceline.spec.forecast import Z80

# Nemotron-4 340B (arXiv:2406.11704, section 2.3): 1,536 H100, batches of 768 sequences, 10.3 s a step.
NEMOTRON = StepRow(
    source="a report", program="megatron-lm", model="nemotron4-340b", arch="gpt", layers=96, hidden=18432,
    ffn_hidden=73728, heads=96, kv_heads=8, vocab=256000, seq_len=4096, accelerator="H100", n_devices=1536,
    precision="bf16", tp=8, pp=12, cp=1, dp=16, zero_stage="1", global_batch=768, pp_schedule="interleaved",
    measured_step_s=10.3,
)  # fmt: skip


def schedules(program: str, pp: int, layers: int, name: str = "") -> list[tuple[str, int]]:
    return schedules_of(replace(LLAMA, program=program, pp_schedule=name, recompute=""), pp, layers, [])


def test_a_program_that_can_interleave_may_have_done_so_where_no_schedule_is_named() -> None:
    assert schedules("megatron-lm", 4, 32) == [("1f1b", 1), *(("interleaved", chunks) for chunks in (2, 4, 8))]
    assert schedules("megatron-lm", 4, 32, "1f1b") == [("1f1b", 1)], "named is named"
    for program in ("deepspeed", "nanotron", "pytorch-fsdp2"):
        assert schedules(program, 4, 32) == [("1f1b", 1)]


def test_a_table_that_states_the_other_choices_did_not_interleave() -> None:
    stated, marks = replace(LLAMA, program="megatron-lm", micro_batch=2, recompute="full"), list[str]()
    assert schedules_of(stated, 4, 32, marks) == [("1f1b", 1)] and marks == ["1F1B assumed"]
    assert len(schedules_of(replace(stated, recompute=""), 4, 32, [])) == 4, "what is computed again is open too"
    assert schedules_of(replace(stated, vpp=2), 4, 32, []) == [("interleaved", 2)], "stated is stated"


def test_the_first_and_the_last_stage_may_have_a_layer_fewer() -> None:
    # 126 layers of Llama 3 405B over 16 devices: 32 stages of 4 and 64 of 2, each with two layers fewer at the ends.
    # And 128 of one, where the ends have no layer.
    several = [("interleaved", chunks) for chunks in (2, 4, 8)]
    assert schedules("megatron-lm", 16, 126) == [("1f1b", 1), *several]
    assert schedules("torchtitan", 8, 126, "Interleaved1F1B") == [("interleaved", 2)], "what torchtitan has by default"


def test_pax_computes_something_again_and_its_own_attention_is_not_fused() -> None:
    # Its 5B on 256 A100, 8 sequences each, with and without layers of Transformer Engine.
    row = replace(
        NEMOTRON, program="paxml", model="gpt-5b", layers=24, hidden=4096, ffn_hidden=16384, heads=32, kv_heads=32,
        vocab=50304, seq_len=2048, accelerator="A100-80GB", n_devices=256, tp=1, pp=1, dp=256, zero_stage="fsdp3",
        micro_batch=8, global_batch=2048, pp_schedule="",
    )  # fmt: skip
    case, _ = Reader().case(row)
    assert case is not None and {plan.recompute for plan in case.plans} == {"selective", "full"}
    plain, engine = (shape_of(replace(row, precision=precision))[0] for precision in ("bf16", "te-bf16"))
    assert plain is not None and engine is not None
    assert (plain.flash, plain.dropout, engine.flash) == (False, False, True)
    # Scores in 2 bytes, 8 x 32 x 2048 x 2048 of them, 24 layers: written, read and written by softmax, read; in
    # backward as much twice, and once more in recompute. At 2 TB/s at least 24 x 2.1e9 x 16 / 2e12 = 0.41 s a step.
    (first, second) = price_cases([case, Reader().case(replace(row, precision="te-bf16"))[0]])  # type: ignore[list-item]
    assert isinstance(first, Priced) and isinstance(second, Priced)
    assert 0.41 < first.step_seconds.value - second.step_seconds.value < 3 * 0.41


def test_layers_of_gpt_with_experts_drop_scores_out_where_these_are_written() -> None:
    """Of 8 heads and 4 x 1,024 tokens over tp 2, a layer keeps 16.8e6 scores in 2 B, what is left of them, and a mask.

    Experts of Llama's kind drop nothing.
    """
    row = replace(
        LLAMA, program="megatron-lm", model="moe-tiny", arch="moe", layers=12, hidden=512, ffn_hidden=2048, heads=8,
        kv_heads=8, vocab=50304, seq_len=1024, experts=8, topk=1, tp=2, dp=4, ep=2, micro_batch=4, zero_stage="1",
        attention_kernel="unfused",
    )  # fmt: skip
    kept = {}
    for name, kernel in (("moe-tiny", "unfused"), ("moe-tiny", "flash"), ("mixtral", "unfused"), ("mixtral", "flash")):
        case = case_of(row, model=name, attention_kernel=kernel)
        sheet = contexts_of([case], read_constants())[0][0].sheet(case.plans[0])
        blocks = sheet.context.shapes.blocks
        at = next(place for place, block in enumerate(blocks) if block.kind == "experts")
        kept[name, kernel] = 4 * sheet.kept_bytes[0][0, at]
    scores = 4 * 8 * 1024**2 / 2
    softmax = 4 * 1024 * 8 * 4 / 2  # what a fused kernel keeps in its place, a number in fp32 for each head
    masks = 2 * 4 * 1024 * 512 / 2  # of both dropouts of the stream, a byte a value
    assert kept["moe-tiny", "unfused"] - kept["moe-tiny", "flash"] == pytest.approx(5 * scores + masks - softmax)
    assert kept["mixtral", "unfused"] - kept["mixtral", "flash"] == pytest.approx(2 * scores - softmax)


def test_megatrons_reduce_scatters_wait_after_gradients_of_weights_where_ranks_share_the_sequence() -> None:
    shared, apart = (case_of(program="megatron-lm", tp=2, dp=4, sp=sp, zero_stage="1") for sp in (1, 0))
    for case, hidden in ((shared, True), (apart, False)):
        sheet = contexts_of([case], read_constants())[0][0].sheet(*case.plans)
        (tensor,) = [column for column in axis_components(sheet) if column.name == "tensor communication"]
        gather, scatter = stream_collectives(sheet)
        whole = sum(seconds_of(sheet.ring("tp"), each) for each in (gather, scatter, loss_collective(sheet)))
        # A layer has two gathers and two sums in each pass, and two gathers more: of six gathers two, of four sums two.
        beside = seconds_of(sheet.ring("tp"), gather) / 3 + seconds_of(sheet.ring("tp"), scatter) / 2
        assert tensor.values == pytest.approx(whole - beside * hidden, rel=0.05)


def test_stages_of_one_layer_leave_the_embedding_and_the_head_stages_of_their_own() -> None:
    # Llama 3 405B (arXiv:2407.21783, table 4): 126 layers over 16 devices of eight stages, 8,192 H100, batches of 2,048
    # sequences, 430 TFLOP/s by 6 FLOPs a parameter that is multiplied and attention whole: 12.0 s.
    row = replace(
        NEMOTRON, model="llama3-405b", arch="llama", layers=126, hidden=16384, ffn_hidden=53248, heads=128, kv_heads=8,
        vocab=128256, seq_len=8192, n_devices=8192, pp=16, vpp=8, dp=64, zero_stage="2", micro_batch=1,
        global_batch=2048, recompute="none", measured_step_s=12.0,
    )  # fmt: skip
    case, reason = Reader().case(row)
    assert case is not None, reason
    (plan,) = case.plans
    assert (plan.stages[0], plan.stages[-1], set(plan.stages[1:-1])) == (0, 0, {1}) and len(plan.stages) == 128
    context, _ = contexts_of([case], read_constants())[0]
    parts = context.sheet(plan).rows.parts.counts.sum(axis=1)
    assert parts.max() == 9, "a rank in the middle has eight layers, an end seven with two more blocks at most"
    (priced,) = price_cases([case])
    assert isinstance(priced, Priced) and priced.step_seconds.value == pytest.approx(12.0, rel=0.10)
    assert Reader().case(replace(row, layers=125))[0] is None, "three layers are missing"
    assert Reader().case(replace(row, layers=15, vpp=None, pp_schedule="1f1b"))[0] is None


@pytest.mark.parametrize(
    "changes",
    [{"accelerator": "H100"}, {"accelerator": "B200"}, {"kv_heads": 8}],
    ids=["Hopper", "Blackwell", "grouped queries"],
)
def test_what_is_younger_than_flash_attention_uses_it(changes: dict[str, object]) -> None:
    old = replace(NEMOTRON, accelerator="A100", kv_heads=None)
    before, _ = shape_of(old)
    after, marks = shape_of(replace(old, **changes))  # type: ignore[arg-type]
    assert before is not None and after is not None
    assert not before.flash and after.flash and "fused attention assumed" in marks


def test_a_row_of_a_published_run_is_within_its_interval() -> None:
    (priced,) = price_cases([case_of(NEMOTRON)])
    assert isinstance(priced, Priced) and priced.step_seconds.low_80 < 10.3 < priced.step_seconds.high_80


def test_every_host_of_a_pod_has_an_adapter() -> None:
    # Two pods of 4,096 TPU v4 in hosts of four: a 100 Gb/s adapter a host is 3.1e9 bytes/s a chip, not 3.1e6.
    cluster, _ = resolve_cluster(ClusterSpec(device="tpu-v4", devices=8192, devices_per_node=4096))
    assert cluster.links[-1].bytes_per_second.value == pytest.approx(12.5e9 / 4)
    constants = read_constants()
    rates = ring(cluster, constants, np.array([8192]), np.array([1])).bytes_per_second["all_gather"]
    assert rates[0] <= 300e9, "never more than the torus gives"


def test_a_mesh_of_links_gives_pairs_and_halves_of_a_node_less() -> None:
    """A DGX-1's V100 has six links of 25e9 bytes/s: one or two to a neighbour, four into its half."""
    constants, share = read_constants(), read_constants().node_link_share
    cluster, _ = resolve_cluster(ClusterSpec(device="v100-sxm2", devices=8))
    rates = ring(cluster, constants, np.array([2, 4, 8]), np.array([1, 1, 1])).bytes_per_second["all_reduce"]
    assert rates == pytest.approx([25e9 * share, 100e9 * share, 150e9 * share])
    seconds = ring(cluster, constants, np.array([2]), np.array([1])).seconds("all_reduce", np.array([1e9]), np.ones(1))
    hops = 2 * constants.node_hop_seconds + constants.collective_seconds  # up and down the tree, and the start
    assert seconds == pytest.approx([1e9 / (25e9 * share) + hops])
    half, _ = resolve_cluster(ClusterSpec(device="v100-sxm2", devices=4, devices_per_node=4))
    rates = ring(half, constants, np.array([2, 4]), np.array([1, 1])).bytes_per_second["all_gather"]
    assert rates == pytest.approx([25e9 * share, 100e9 * share]), "of half a node too"
    switched, _ = resolve_cluster(ClusterSpec(device="a100-80", devices=8))
    rates = ring(switched, constants, np.array([2, 8]), np.array([1, 1])).bytes_per_second["all_reduce"]
    assert rates[0] == rates[1], "behind a switch any two have all links"


def test_collectives_through_sockets_are_not_as_fast_as_the_adapter() -> None:
    row = replace(LLAMA, n_devices=16, dp=16, devices_per_node=4, inter_bw="200Gbps/node")
    fast = case_of(row).cluster.links[-1].bytes_per_second
    assert (fast.value, fast.source) == (200e9 / 8 / 4, "published")
    for notes in ("NCCL over sockets of one adapter", "TCP between nodes"):
        slow = case_of(row, notes=notes).cluster.links[-1].bytes_per_second
        assert (slow.value, slow.source) == (SOCKET_BYTES_PER_SECOND, "measured")
    assert case_of(row, notes="GPUDirect-TCPX").cluster.links[-1].bytes_per_second.value == fast.value
    slower = case_of(row, inter_bw="10Gbps/node", notes="sockets").cluster.links[-1].bytes_per_second
    assert slower.value == 10e9 / 8 / 4, "an adapter that is slower still decides"


def test_where_nothing_fits_the_fastest_is_taken_of_those_that_memory_cannot_tell_apart() -> None:
    # 13B of whole copies with 4-byte gradients: 78e9 bytes and more on 80e9, and yet it ran.
    row = replace(LLAMA, program="megatron-lm", model="llama-13b", layers=40, hidden=5120, ffn_hidden=13824, heads=40)
    row = replace(row, n_devices=64, dp=64, zero_stage="1", micro_batch=None, recompute="none", global_batch=2048,
                  measured_step_s=200.0)  # fmt: skip
    (priced,) = price_cases([case_of(row)])
    assert isinstance(priced, Priced) and not priced.fits
    slower, _ = price_cases([case_of(row, micro_batch=1), case_of(row, micro_batch=32)])
    assert isinstance(slower, Priced)
    assert priced.step_seconds.value <= slower.step_seconds.value * TIE_RATIO
    assert priced.memory_bytes <= slower.memory_bytes * math.exp(read_constants().memory_95)


def test_the_smallest_row_of_a_series_has_the_fewest_devices_and_of_those_the_shortest_sequence() -> None:
    def row(devices: int, seq_len: int, factor: float) -> Scored:
        case = case_of(n_devices=devices, dp=devices, seq_len=seq_len, measured_step_s=10.0 * factor)
        sure = math.exp(0.2 * Z80)  # a deviation of 0.2: an anchor has 0.8 of its departure from its series
        interval = Interval(10.0, 10.0 / sure, 10.0 * sure, 10.0 / sure**2, 10.0 * sure**2)
        return Scored(case, Priced(case.plans[0], interval, 0.0, True, (TermSeconds("products", "products", 10.0),)))

    rows = [row(16, 1024, 9.0), row(8, 8192, 3.0), row(8, 2048, 2.0)]
    (series,) = anchor_smallest(rows).series
    assert series.devices == 8 and series.factor == pytest.approx(2.0**0.8)


def test_a_plain_checkpoint_around_attention_asks_no_policy() -> None:
    # A policy in Python sees every operator where torchtitan recomputes by operator, and none in Megatron-LM.
    policy = 2 * SELECTIVE_SECONDS_PER_OPERATOR
    tiny = {"layers": 4, "hidden": 256, "heads": 2, "ffn_hidden": 512, "seq_len": 128, "micro_batch": 1, "vocab": 512}
    seconds = {}
    for program in ("megatron-lm", "torchtitan"):
        for recompute in ("none", "selective"):
            (priced,) = price_cases([case_of(**tiny, program=program, recompute=recompute, global_batch=8)])
            assert isinstance(priced, Priced)
            seconds[program, recompute] = sum(term.seconds for term in priced.terms if term.kind == "host")
    extra = {name: seconds[name, "selective"] - seconds[name, "none"] for name in ("megatron-lm", "torchtitan")}
    launches = 4 * 15 * read_constants().launch_seconds  # of the operators of four layers, started again
    assert extra["megatron-lm"] == pytest.approx(launches, rel=0.01)
    assert extra["torchtitan"] > launches + 4 * 15 * policy, "more, since every operator is asked about in both passes"


def test_devices_that_fill_no_racks_are_hosts_of_four_that_share_one() -> None:
    cluster, _ = resolve_cluster(ClusterSpec(device="gb200", devices=128))
    assert (cluster.devices_per_node, cluster.domain) == (4, 64)
    racks, _ = resolve_cluster(ClusterSpec(device="gb200", devices=144))
    assert (racks.devices_per_node, racks.domain) == (72, 72)
