"""Writes docs/published-cases.md: well-known published runs, priced by the planner, beside what was published.

`python docs/scripts/write_published_cases.py` writes it; a test compares it with what the planner says now. Takes a few
seconds, and torch for the convolutional net, which is traced.
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from paceline.cluster.resolve import resolve_cluster
from paceline.plan.cost.pricing import forecast_plan
from paceline.plan.cost.sheet import PricedTask
from paceline.plan.flops import flops_per_sample
from paceline.plan.search.found import memory_refusal
from paceline.plan.search.search import search
from paceline.spec.cluster import Cluster, ClusterSpec, Figure
from paceline.spec.forecast import Estimate, Forecast
from paceline.spec.layout import Layout
from paceline.spec.plan import Plan, PlanSpec
from paceline.spec.profile import ModelProfile
from paceline.task.profile.transformer import ExpertSizes, TransformerShape

PAGE = Path(__file__).parents[1] / "published-cases.md"
NOTE = "<!-- Written by docs/scripts/write_published_cases.py from what the planner says; edit the script instead. -->"

HEAD = """
# Published cases

Well-known runs, priced by the planner from their shapes and the catalog's figures alone, beside what their authors
published. Prices are of Paceline's own run on those machines; the published runs had other software. Intervals are of
80 %. MFU is given in two of the [five conventions](guide/plan/backtesting.md#five-ways-to-count-flops): `causal`, which
Paceline states everywhere, and `hardware`, with which the authors of that time counted. How far forecasts are off in
general says [Forecast accuracy](forecast-accuracy.md).
"""

GPT3 = TransformerShape(
    "gpt-175B", layers=96, hidden=12288, ffn=49152, heads=96, kv_heads=96, head_dim=128, vocab=51200, seq_len=2048,
    flash=False, dropout=True,
)  # fmt: skip
MT_NLG = replace(GPT3, name="gpt-530B", layers=105, hidden=20480, ffn=81920, heads=128, kv_heads=128, head_dim=160)
# DeepSpeed's program fills BERT's vocabulary of 30,522 up to a multiple of 8, which its matrix units ask for.
BERT_LARGE = TransformerShape(
    "BERT-Large", layers=24, hidden=1024, ffn=4096, heads=16, kv_heads=16, head_dim=64, vocab=30528, seq_len=128,
    causal=False, flash=False, dropout=True,
)  # fmt: skip
SWITCH_C = TransformerShape(
    "Switch-C", layers=30, hidden=2080, ffn=6144, heads=32, kv_heads=32, head_dim=64, vocab=32128, seq_len=512,
    biases=False, layer_norm=False, positions="none", cross_attention_layers=15, experts=ExpertSizes(2048, 1, 6144),
)  # fmt: skip


@dataclass(frozen=True)
class Priced:
    """A plan of a case, its price, and why it does not fit (empty: it does)."""

    plan: Plan
    forecast: Forecast
    does_not_fit: str


def page() -> str:
    """Return the page."""
    parts = [gpt3_lines(), mt_nlg_lines(), claim_lines(), resnet_lines(), bert_lines(), switch_lines()]
    return "\n".join([NOTE, *HEAD.split("\n"), *(line for part in parts for line in part)]).rstrip() + "\n"


def cluster_of(device: str, devices: int, per_node: int = 0) -> Cluster:
    """Return published devices."""
    return resolve_cluster(ClusterSpec(device=device, devices=devices, devices_per_node=per_node))[0]


def price(profile: ModelProfile, cluster: Cluster, plan: Plan, optimizer: str = "adamw") -> Priced:
    """Return one plan's price."""
    forecast = forecast_plan(profile, cluster, plan, batch_samples=plan.batch_samples, steps=1, optimizer=optimizer)
    context = PricedTask(profile, cluster, plan.batch_samples, 1, optimizer)
    return Priced(plan, forecast, memory_refusal(context, context.sheet(plan).columns))


def best(profile: ModelProfile, cluster: Cluster, batch: int, **asked: object) -> Priced:
    """Return the planner's choice."""
    spec = PlanSpec(**{"cp": 1, "ep": 1, **asked})  # type: ignore[arg-type]
    found = search(profile, cluster, spec, batch_samples=batch, steps=1).best
    return Priced(found.plan, found.forecast, "")


def interval(estimate: Estimate, scale: float, unit: str) -> str:
    """Return a value and its interval, scaled, for people."""
    low, value, high = (number(part * scale) for part in (estimate.low, estimate.value, estimate.high))
    return f"{value} {unit} ({low} to {high})"


def number(value: float) -> str:
    """Return a number with three digits at least."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def gibibytes(found: Priced) -> str:
    """Return the peak of memory, and whether it fits."""
    size = f"{found.forecast.peak_bytes.value / 2**30:,.0f} GiB"
    return f"{size}, does not fit" if found.does_not_fit else size


def utilisation(shape: TransformerShape, found: Priced, cluster: Cluster, convention: str = "causal") -> str:
    """Return the utilisation in a convention; nothing for `hardware` without the recompute that it counts."""
    if convention == "hardware" and found.plan.recompute != "full":
        return "-"
    peak = cluster.device.peak_flops[found.plan.precision] * cluster.devices
    flops = counted(shape, convention) * found.plan.batch_samples
    return f"{flops / (found.forecast.step_seconds.value * peak):.1%}"


def counted(shape: TransformerShape, convention: str) -> float:
    """Return the FLOPs of a sample in a convention, which are the same whatever the kernel of attention computes."""
    return flops_per_sample(replace(shape, flash=True).profile(), convention)


def table(header: str, rows: list[tuple[str, ...]]) -> Iterator[str]:
    """Yield a Markdown table."""
    yield header
    yield "|" + "---|" * (header.count("|") - 1)
    yield from (f"| {' | '.join(row)} |" for row in rows)


def prose(text: str) -> list[str]:
    """Return a paragraph as lines."""
    return textwrap.wrap(text, 118, break_long_words=False, break_on_hyphens=False)


def gpt3_lines() -> Iterator[str]:
    """Yield GPT-3 on 1,024 A100."""
    profile, devices, batch, steps = GPT3.profile(), 1024, 1536, 300e9 / 2048 / 1536
    cluster = cluster_of("a100-80", devices)
    then = price(profile, cluster, Plan(
        layout=Layout(dp_replicate=16, tp=8, pp=8), micro_batch=1, accumulation=96, batch_samples=batch,
        recompute="full", precision="fp16", schedule="interleaved", virtual_stages=3,
    ))  # fmt: skip
    fused = replace(GPT3, flash=True, dropout=False).profile()
    now = best(fused, cluster, batch, precision="bf16")
    published = steps * batch * counted(GPT3, "hardware") / (devices * 140e12) / 86400
    yield from ("", "## GPT-3 175B on 1,024 A100", "")
    yield from prose(
        "Published: 140 TFLOP/s per device (`hardware`), 34 days for 300 B tokens at a batch of 1,536 "
        "sequences (Narayanan et al. 2021, [arXiv:2104.04473](https://arxiv.org/abs/2104.04473), section 5). "
        f"Counted with their own equation, 140 TFLOP/s make {published:.1f} days."
    )
    yield ""
    header = "| plan | step | 300 B tokens | MFU `causal` | `hardware` | memory |"
    rows = [
        (
            f"{name}: {found.plan}",
            interval(found.forecast.step_seconds, 1, "s"),
            interval(found.forecast.step_seconds, steps / 86400, "days"),
            utilisation(GPT3, found, cluster),
            utilisation(GPT3, found, cluster, "hardware"),
            gibibytes(found),
        )
        for name, found in (("as then", then), ("the planner's choice, fused attention", now))
    ]
    yield from table(header, rows)
    yield ""
    yield from prose(
        "The layout was not printed; the first row has the one that the authors' rules give for this model "
        "and cluster: tensor parallel inside a node, as few stages as fit, full recompute."
    )


def mt_nlg_lines() -> Iterator[str]:
    """Yield 530 B at tp 8, pp 4, dp 32 on 1,024 A100."""
    profile, devices, batch = MT_NLG.profile(), 1024, 1536
    cluster = cluster_of("a100-80", devices)
    base = Plan(micro_batch=1, accumulation=48, batch_samples=batch, recompute="full", precision="bf16")
    rows, plain = [], 0.0
    for name, layout, zero in (
        ("plain copies", Layout(dp_replicate=32, tp=8, pp=4), 3),
        ("ZeRO-1", Layout(dp_shard=32, tp=8, pp=4), 1),
        ("ZeRO-2", Layout(dp_shard=32, tp=8, pp=4), 2),
        ("ZeRO-3", Layout(dp_shard=32, tp=8, pp=4), 3),
    ):
        found = price(profile, cluster, replace(base, layout=layout, zero=zero))
        plain = plain or found.forecast.peak_bytes.value
        rows.append(_mt_nlg_row(name, found, cluster))
    rows.append(_mt_nlg_row("the planner's choice", best(profile, cluster, batch, precision="bf16"), cluster))
    yield from ("", "## 530 B at tp 8, pp 4, dp 32 on 1,024 A100, batch 1,536", "")
    yield from prose(
        "Does it fit? Each device holds 1/32 of the model, 16.6 B parameters. With their gradients and the "
        f"optimizer's state unsharded that is {plain / 80e9:.1f} times what an A100 has; ZeRO-1 leaves whole gradients "
        "and weights, which alone are more than the device has. Only classes that shard gradients too fit, and "
        "those communicate for every one of 48 micro-batches, over the network between nodes, since tp fills "
        "the nodes:"
    )
    yield ""
    yield from table("| data parallelism | step | MFU `causal` | `hardware` | memory |", rows)
    yield ""
    yield from prose(
        "The published runs of this model had 35 stages (Smith et al. 2022, "
        "[arXiv:2201.11990](https://arxiv.org/abs/2201.11990), section 2.4)."
    )


def _mt_nlg_row(name: str, found: Priced, cluster: Cluster) -> tuple[str, ...]:
    text = f"{name}: {found.plan}" if name.startswith("the") else name
    shares = (utilisation(MT_NLG, found, cluster, convention) for convention in ("causal", "hardware"))
    return text, interval(found.forecast.step_seconds, 1, "s"), *shares, gibibytes(found)


def claim_lines() -> Iterator[str]:
    """Yield what 52 % and 124 PFLOP/s have to do with each other."""
    peak = 1024 * cluster_of("a100-80", 1024).device.peak_flops["bf16"]
    share = 124e15 / peak
    ratio = counted(MT_NLG, "hardware") / counted(MT_NLG, "model")
    causal = counted(MT_NLG, "model") / counted(MT_NLG, "causal")
    yield from ("", "### Is a claim of 52 % MFU with 124 PFLOP/s sustained consistent?", "")
    yield from prose(
        f"1,024 A100 have {peak / 1e15:.1f} PFLOP/s in bf16, so 124 PFLOP/s are {share:.1%}, and 52 % would be "
        f"{0.52 * peak / 1e15:.0f} PFLOP/s. As one quantity the two numbers contradict each other. They agree "
        f"if they count differently: with full recompute, hardware FLOPs of this model are {ratio:.3f} times "
        f"its model FLOPs, and {share:.1%} x {ratio:.3f} = {share * ratio:.1%}. Then 124 PFLOP/s are model "
        "FLOPs, and the 52 % is hardware utilisation (HFU), which counts what is computed twice, and not MFU. "
        f"The MFU is {share:.1%} with attention counted whole, {share / causal:.1%} as Paceline counts it."
    )


def resnet_lines() -> Iterator[str]:
    """Yield ResNet-50 on 256 P100."""
    profile, cluster = resnet_profile(), p100_cluster()
    plan = Plan(layout=Layout(dp_replicate=256), micro_batch=32, batch_samples=8192, precision="fp32")
    found = price(profile, cluster, plan, optimizer="sgd")
    minutes = 90 * 1_281_167 / 8192 / 60
    yield from ("", "## ResNet-50 on 256 P100", "")
    yield from prose(
        "Published: 90 epochs of ImageNet in one hour at a batch of 8,192 images, 32 on each device, in fp32 "
        "(Goyal et al. 2017, [arXiv:1706.02677](https://arxiv.org/abs/1706.02677)). The net is traced on "
        f"images without values: {profile.parameters:,} parameters, {profile.forward_flops / 2e9:.2f} G "
        "multiply-adds an image."
    )
    yield ""
    row = (
        str(plan),
        interval(found.forecast.step_seconds, 1e3, "ms"),
        interval(found.forecast.step_seconds, minutes, "minutes"),
        f"{found.forecast.mfu:.1%}",
        gibibytes(found),
    )
    yield from table("| plan | step | 90 epochs | MFU `causal` | memory |", [row])
    yield ""
    yield from prose(
        "The P100 is not in the catalog; its data sheet's figures were given: 10.6 TFLOP/s, 732 GB/s, 16 GB, "
        "80 GB/s of NVLink, and 50 Gb/s for each node of eight. Paceline itself would refuse this plan: "
        "BatchNorm over each device's part of the batch is another experiment than over the whole."
    )


def resnet_profile() -> ModelProfile:
    """Return ResNet-50's profile, traced on the meta device."""
    import torch
    from torch import Tensor, nn
    from torch.nn import functional as F

    from paceline.task.profile.traced import profile_module

    sys.path.insert(0, str(Path(__file__).parent))
    from resnet50 import ResNet50

    def objective(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        images, labels = batch
        return F.cross_entropy(model(images), labels, reduction="sum"), torch.ones(())

    with torch.device("meta"):
        model = ResNet50()
        batch = (torch.empty(4, 3, 224, 224), torch.empty(4, dtype=torch.long))
    return profile_module(model, batch, objective)


def p100_cluster() -> Cluster:
    """Return 32 nodes of eight P100: a V100's entry with the figures of the older device's data sheet."""
    base = cluster_of("v100-sxm2", 256, 8)

    def published(value: float) -> Figure:
        return Figure(value, "published", "NVIDIA P100 data sheet, 2016")

    device = replace(
        base.device,
        name="NVIDIA P100 SXM2 16GB",
        memory_bytes=published(16e9),
        memory_bytes_per_second=published(732e9),
        matmul_flops={"fp32": ((0, 10.6e12),)},
        peak_flops={"fp32": 10.6e12},
    )
    inside, between = base.links
    inside = replace(inside, bytes_per_second=published(80e9))
    between = replace(between, bytes_per_second=published(50e9 / 8 / 8))
    return replace(base, device=device, links=(inside, between))


PREDICTED = {128: 20, 512: 80}  # positions of a sequence that BERT predicts, by its length


def masked(profile: ModelProfile, share: float) -> ModelProfile:
    """Return the profile with a head that sees a share of the positions."""
    fields = ("matmul_flops", "moved_elements", "saved_elements", "saved_fp32_elements", "transient_elements")
    *others, head = profile.blocks
    seen = replace(head, **{name: share * getattr(head, name) for name in fields})
    return replace(profile, blocks=(*others, seen))


def bert_lines() -> Iterator[str]:
    """Yield BERT-Large on 1,024 V100."""
    cluster = cluster_of("v100-sxm3", 1024, 16)
    rows, total = [], Estimate(0.0, 0.0, 0.0, "published")
    for seq_len, batch, steps in ((128, 65536, 7038), (512, 32768, 1563)):
        profile = masked(replace(BERT_LARGE, seq_len=seq_len).profile(), PREDICTED[seq_len] / seq_len)
        found = best(profile, cluster, batch, tp=1, pp=1, precision="fp16")
        step = found.forecast.step_seconds
        whole = (part + steps * more for part, more in zip(_bounds(total), _bounds(step), strict=True))
        total = Estimate(*whole, "published")
        rows.append((
            f"{seq_len} tokens, {batch:,} sequences, {steps:,} steps: {found.plan}", interval(step, 1e3, "ms"),
            interval(step, steps / 60, "minutes"), utilisation(replace(BERT_LARGE, seq_len=seq_len), found, cluster),
            gibibytes(found),
        ))  # fmt: skip
    yield from ("", "## BERT-Large on 1,024 V100", "")
    yield from prose(
        "Published: 44 minutes ([DeepSpeed, May "
        "2020](https://www.deepspeed.ai/news/2020/05/18/bert-record.html)), and 67 minutes on the same number "
        "of devices before. The steps are those of You et al. 2019 "
        "([arXiv:1904.00962](https://arxiv.org/abs/1904.00962)); attention is not causal, so it is counted "
        "whole. The head sees the positions to predict alone, at most 20 of 128 and 80 of 512 as BERT's data has them "
        "(`max_predictions_per_seq`); the utilisation counts it as if it saw all."
    )
    yield ""
    yield from table("| phase | step | whole phase | MFU `causal` | memory |", rows)
    yield ""
    yield from prose(f"Together {interval(total, 1 / 60, 'minutes')}.")


def _bounds(estimate: Estimate) -> tuple[float, float, float]:
    return estimate.value, estimate.low, estimate.high


def switch_lines() -> Iterator[str]:
    """Yield the Switch transformer of 1.6 T parameters on 1,024 A100."""
    profile, cluster = SWITCH_C.profile(), cluster_of("a100-80", 1024)
    base = Plan(zero=3, micro_batch=2, batch_samples=2048, precision="bf16", recompute="full")
    rows = []
    for name, ep in (("experts sharded and gathered", 1), ("experts over 256 devices", 256), ("over all", 1024)):
        found = price(profile, cluster, replace(base, layout=Layout(dp_shard=1024, ep=ep)))
        step = interval(found.forecast.step_seconds, 1, "s")
        rows.append((name, step, utilisation(SWITCH_C, found, cluster), gibibytes(found)))
    yield from ("", "## A Switch transformer of 1.6 T parameters", "")
    yield from prose(
        "Published: 1,571 B parameters (Fedus et al. 2021, "
        "[arXiv:2101.03961](https://arxiv.org/abs/2101.03961), table 9); its shape makes "
        f"{profile.parameters / 1e9:,.0f} B, of which a token passes {profile.active_parameters / 1e9:.1f} B. "
        "No step time on devices of the catalog was published. On 1,024 A100, with 2^20 tokens a step, 512 "
        "positions in both halves of the model, and ZeRO-3:"
    )
    yield ""
    yield from table("| plan | step | MFU `causal` | memory |", rows)
    yield ""
    yield from prose(
        "Weights, gradients and optimizer state are 16 bytes a parameter, 25 TB, of the 82 TB that the "
        "devices have: what decides is not whether the state fits but that no device ever gathers the 2,048 "
        "experts of a layer."
    )


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
