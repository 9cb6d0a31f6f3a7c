"""Preference pairs: the loss by hand and as trl writes it, on every layout, and the rows of a file of pairs."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from distributed import run_ranks
from tests_shared import decoder_task, plan_of
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from paceline.errors import ConfigError, DataError
from paceline.run.assemble import assemble
from paceline.run.loop.evaluate import evaluate
from paceline.run.loop.loader import held_out_ids
from paceline.run.process.world import World, join_world
from paceline.session.verbs.adapted import without_teacher
from paceline.spec.adapt.adapter import Adaptation, AdapterSpec
from paceline.spec.adapt.preference import PreferenceSpec
from paceline.spec.data.mix import MixSpec
from paceline.spec.layout import Layout
from paceline.spec.load import Spec
from paceline.spec.model_folder import FRESH
from paceline.spec.plan import Plan
from paceline.spec.proof.records import CheckProof
from paceline.spec.task import DataSpec, ModelSpec, Task
from paceline.spec.watch.evaluate import EvaluateSpec
from paceline.task.adapt.preference import PreferenceLoss, adapters_off, log_ratios
from paceline.task.adapt.referenced import trained_of
from paceline.task.data.pairs import PreferencePairs, preference_pairs
from paceline.task.data.source import open_sources
from paceline.task.data.sources.tokenizer import ByteTokenizer
from paceline.task.metrics.resolve import metrics_of
from paceline.task.models.build import build_model
from paceline.task.models.huggingface.start import start_lines
from paceline.task.objective import next_token
from paceline.task.profile.apart import trace_here
from paceline.task.profile.limits import REFERENCED, check_reference
from paceline.task.settled import settle
from paceline.verify.compare.layout import compare

SEQ, VOCAB = 12, 61
MODEL = ModelSpec("llama-1m", hidden=32, layers=2, heads=4, kv_heads=2, ffn=40, vocab=VOCAB, tied=False)
LORA = AdapterSpec(kind="lora", rank=3, init="random")


class Pairs:
    """A source of random pairs of which parts do not count."""

    samples, items_per_sample, unit, vocab, fingerprint = 200, 1, "samples", VOCAB, "pairs"

    def read(self, ids: np.ndarray, positions: np.ndarray | None = None) -> dict[str, torch.Tensor]:
        """Return pairs that depend on their ids alone."""
        tokens, labels = torch.empty(len(ids), 2, SEQ, dtype=torch.int64), torch.empty(len(ids), 2, SEQ).long()
        for row, number in enumerate(ids):
            generator = torch.Generator().manual_seed(int(number))
            drawn = torch.randint(0, VOCAB, (2, SEQ + 1), generator=generator)
            tokens[row], labels[row] = drawn[:, :-1], drawn[:, 1:]
            labels[row, :, : int(number) % 7] = -100
        return {"tokens": tokens, "labels": labels}


def built(adapter: AdapterSpec = LORA) -> Any:
    return build_model(MODEL, VOCAB, SEQ, seed=3, adaptation=Adaptation(adapter)).double()


def by_hand(model: Any, tokens: torch.Tensor, labels: torch.Tensor) -> float:
    """Return the log-probability of a row's labels, one by one."""
    logits = model(tokens[None])[0]
    chances = (logits.softmax(-1)[at, int(label)] for at, label in enumerate(labels) if label != -100)
    return sum(math.log(float(chance.detach())) for chance in chances)


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_the_loss_is_that_of_the_paper(smoothing: float) -> None:
    model, batch = built(), Pairs().read(np.arange(3))
    loss, count = PreferenceLoss(0.3, smoothing)(model, batch)
    expected = 0.0
    for tokens, labels in zip(batch["tokens"], batch["labels"], strict=True):
        own = [by_hand(model, *row) for row in zip(tokens, labels, strict=True)]
        with adapters_off(model):
            base = [by_hand(model, *row) for row in zip(tokens, labels, strict=True)]
        h = 0.3 * ((own[0] - base[0]) - (own[1] - base[1]))
        expected -= (1 - smoothing) * -math.log(1 + math.exp(-h)) + smoothing * -math.log(1 + math.exp(h))
    assert int(count) == 3 and float(loss.detach()) == pytest.approx(expected, rel=1e-9)


def test_the_loss_is_that_of_trl() -> None:
    # trl's DPOTrainer, loss_type "sigmoid": logits are ratios of the model's pair less ratios of the reference's.
    model, batch = built(), Pairs().read(np.arange(4))
    chosen, rejected = log_ratios(model, batch).unbind(1)
    margins = chosen - rejected
    theirs = -F.logsigmoid(0.1 * margins) * (1 - 0.05) - F.logsigmoid(-0.1 * margins) * 0.05
    torch.testing.assert_close(PreferenceLoss(0.1, 0.05)(model, batch)[0], theirs.sum())


def test_at_the_start_a_model_prefers_what_its_base_does() -> None:
    model = built(dataclasses.replace(LORA, init="kaiming"))
    loss, count = PreferenceLoss()(model, Pairs().read(np.arange(5)))
    torch.testing.assert_close(loss / count, torch.tensor(math.log(2.0), dtype=torch.float64))
    loss.backward()
    assert all((p.grad is None) == (not p.requires_grad) for p in model.parameters())


def task() -> Task:
    spec = PreferenceSpec(beta=0.5, label_smoothing=0.1)
    return decoder_task(model=MODEL, data=Pairs(), objective="dpo", adapter=LORA, preference=spec)


GIVEN = {"name": "llama-1m", "hidden": 32, "layers": 2, "heads": 4, "kv_heads": 2, "ffn": 40, "tied": False}
COPIED = ModelSpec(REFERENCED, arguments={"model": GIVEN, "vocab": VOCAB, "seq_len": SEQ})


def copied_task(**changes: Any) -> Task:
    """Return a task in which all of the model is trained, beside a copy of it."""
    return dataclasses.replace(task(), model=COPIED, adapter=AdapterSpec(), **changes)


def test_a_copy_holds_what_the_model_was_at_the_start() -> None:
    model, batch = build_model(COPIED, VOCAB, SEQ, seed=3).double(), Pairs().read(np.arange(4))
    loss, count = PreferenceLoss(has_copy=True)(model, batch)
    torch.testing.assert_close(loss / count, torch.tensor(math.log(2.0), dtype=torch.float64))
    before = build_model(MODEL, VOCAB, SEQ, seed=3).double()
    with torch.no_grad():
        for number, parameter in enumerate(model.model.parameters()):
            parameter.add_(0.01 * number)
    ratios = log_ratios(model, batch)
    for pair, tokens, labels in zip(ratios, batch["tokens"], batch["labels"], strict=True):
        for found, *row in zip(pair, tokens, labels, strict=True):
            assert float(found.detach()) == pytest.approx(by_hand(model.model, *row) - by_hand(before, *row), rel=1e-9)
    assert set(model.state_dict()) == set(before.state_dict())
    assert all(not p.requires_grad for p in model.reference.parameters())
    assert trained_of(COPIED) == ModelSpec(**GIVEN) and trained_of(MODEL) is None


def test_a_copy_is_priced_as_frozen_weights_and_a_forward_pass() -> None:
    profile = trace_here(copied_task())
    blocks = {block.name: block for block in profile.blocks}
    copy = blocks["reference.model.layers.1"]
    assert copy.frozen_parameters == copy.parameters and copy.backward_products == copy.saved_elements == 0.0
    assert blocks["model.layers.1"].backward_products == 2.0 and not blocks["model.layers.1"].frozen_parameters
    assert profile.parameters == 2 * profile.trained_parameters


def test_a_model_that_is_trained_whole_gets_its_copy_and_says_so(tmp_path: Path) -> None:
    (tmp_path / "pairs.jsonl").write_text(json.dumps({"prompt": "a", "chosen": "b", "rejected": "c"}) + "\n")
    data = DataSpec("paceline.task.data.pairs:preference_pairs", {"path": str(tmp_path / "pairs.jsonl"), "seq_len": 9})
    spec = Spec(
        task=dataclasses.replace(task(), model=ModelSpec("llama-1m", layers=2), adapter=AdapterSpec(), data=data)
    )
    settled = settle(spec)
    assert settled.spec.task.model == ModelSpec(
        REFERENCED, arguments={"model": {"name": "llama-1m", "layers": 2}, "vocab": 257, "seq_len": 9}
    )
    assert "frozen copy" in settled.decisions[0].because
    assert settle(settled.spec).spec == settled.spec and without_teacher(settled.spec.task).model == spec.task.model


WORDS = {"<|endoftext|>": 0, "a": 1, "b": 2, "c": 3}


def folder_of_words(folder: Path) -> Path:
    """Make a folder of a model of four words, and return it."""
    folder.mkdir()
    config = {"architectures": ["GPTNeoXForCausalLM"], "model_type": "gpt_neox", "vocab_size": 4, "hidden_size": 8}
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer(WordLevel(WORDS, unk_token="a"))
    tokenizer.add_special_tokens(["<|endoftext|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def test_pairs_of_a_mixture_are_of_the_folders_tokens_too(tmp_path: Path) -> None:
    """They stayed bytes. A part that names a tokenizer keeps it; one that leaves its arguments out has the task's."""
    folder = folder_of_words(tmp_path / "folder")
    for name, words in (("one", "abc"), ("two", "bca")):
        line = json.dumps(dict(zip(("prompt", "chosen", "rejected"), words, strict=True)))
        (tmp_path / f"{name}.jsonl").write_text(line + "\n")
    source = "paceline.task.data.pairs:preference_pairs"
    of_task, of_part = ({"path": str(tmp_path / f"{name}.jsonl"), "seq_len": 4} for name in ("one", "two"))
    named = {**of_part, "tokenizer": "bytes"}
    parts = (MixSpec(source, "one"), MixSpec(source, "two", arguments=of_part), MixSpec(source, arguments=named))
    data = DataSpec(mix=parts[:2], arguments=of_task)
    adapter = AdapterSpec(kind="lora")
    asked = dataclasses.replace(task(), model=ModelSpec(f"hf:{folder}"), adapter=adapter, data=data)
    settled = settle(Spec(task=asked))
    train, _ = open_sources(settled.spec.task.data, 7)
    assert train.vocab == len(WORDS) and train.samples == 2
    assert train.read(np.arange(2))["labels"][:, :, 0].tolist() == [[2, 3], [3, 1]]
    assert [each.what for each in settled.decisions] == [f"task.data.mix.{name}.arguments" for name in ("one", "two")]
    assert all("folder's tokens" in each.because for each in settled.decisions)
    assert settle(settled.spec).spec == settled.spec and json.dumps(settled.decisions[0].after)
    kept = settle(Spec(task=dataclasses.replace(asked, data=DataSpec(mix=parts[2:])))).spec.task.data
    assert kept.mix[0].arguments == named


@pytest.mark.parametrize("kind", ["none", "lora"])
def test_pairs_for_a_folder_are_of_its_tokens(tmp_path: Path, kind: str) -> None:
    """They were bytes, of which the model knew other meanings, and the folder's tokenizer was named as theirs."""
    folder = folder_of_words(tmp_path / "folder")
    (tmp_path / "pairs.jsonl").write_text(json.dumps({"prompt": "a", "chosen": "b", "rejected": "c"}) + "\n")
    arguments: dict[str, Any] = {"path": str(tmp_path / "pairs.jsonl"), "seq_len": 4}
    data = DataSpec("paceline.task.data.pairs:preference_pairs", arguments)
    adapter = AdapterSpec(kind=kind)
    settled = settle(
        Spec(task=dataclasses.replace(task(), model=ModelSpec(f"hf:{folder}"), adapter=adapter, data=data))
    )
    assert isinstance(settled.spec.task.data, DataSpec)
    pairs = preference_pairs(**settled.spec.task.data.arguments)
    assert isinstance(pairs, PreferencePairs) and pairs.vocab == len(WORDS)
    assert pairs[0]["labels"][:, 0].tolist() == [2, 3]
    assert "folder's tokens" in settled.decisions[0].because
    assert settle(settled.spec).spec == settled.spec
    fresh = ModelSpec(f"hf:{folder}", weights=FRESH)
    (line,) = [line for line in start_lines(fresh, settled.spec.task.data) if "tokenizer" in line]
    assert line.startswith("which tokenizer is taken is up to paceline.task.data.pairs:preference_pairs")


def test_ipo_and_hinge_by_hand() -> None:
    model, batch = built(), Pairs().read(np.arange(3))
    ratios, lengths = log_ratios(model, batch), (batch["labels"] != -100).sum(-1)
    means = ratios / lengths
    expected = ((means[:, 0] - means[:, 1]) - 1 / (2 * 0.3)).square().sum()
    torch.testing.assert_close(PreferenceLoss(0.3, kind="ipo")(model, batch)[0], expected)
    margins = 0.3 * (ratios[:, 0] - ratios[:, 1])
    expected = sum(0.9 * max(0.0, 1 - float(m)) + 0.1 * max(0.0, 1 + float(m)) for m in margins.detach())
    assert float(PreferenceLoss(0.3, 0.1, "hinge")(model, batch)[0].detach()) == pytest.approx(float(expected))
    with pytest.raises(ConfigError, match="without effect"):
        check_reference(dataclasses.replace(task(), preference=PreferenceSpec(loss="ipo", label_smoothing=0.1)))


def measured(plan: Plan, world: World) -> Mapping[str, float]:
    """Return the metrics of seven pairs."""
    built = assemble(task(), plan, world, Pairs(), 1)
    metrics = metrics_of(EvaluateSpec(), Pairs(), built.stepper.turns[0].turn.objective)  # type: ignore[arg-type]
    return evaluate(built.stepper, Pairs(), 7, plan.layout.data_rank(world.rank), metrics).metrics  # type: ignore


def everywhere() -> list[Mapping[str, float]]:
    world = join_world("cpu", threads=1)
    return [measured(plan_of(layout, precision="fp64"), world) for layout in (Layout(dp_shard=2), Layout(tp=2))]


def test_rewards_are_measured_of_all_pairs_on_every_layout() -> None:
    model = build_model(MODEL, VOCAB, SEQ, seed=task().seed, adaptation=Adaptation(LORA)).double()
    with torch.no_grad():
        chosen, rejected = (0.5 * log_ratios(model, Pairs().read(held_out_ids(Pairs(), 7)))).unbind(1)
    expected = {
        "reward_chosen": float(chosen.mean()), "reward_rejected": float(rejected.mean()),
        "reward_accuracy": float((chosen > rejected).double().mean()),
        "reward_margin": float((chosen - rejected).mean()),
    }  # fmt: skip
    for found in run_ranks(everywhere, 2)[0]:
        assert found == pytest.approx(expected, rel=1e-9)
    with pytest.raises(ConfigError, match="of preference pairs"):
        metrics_of(EvaluateSpec(metrics=("reward_margin",)), Pairs(), next_token)  # type: ignore[arg-type]


def compared(asked: list[tuple[Plan, str]]) -> list[CheckProof]:
    """Return comparisons with one device."""
    world = join_world("cpu", threads=1)
    ipo = PreferenceSpec(loss="ipo")
    tasks = {
        "lora": task(),
        "dora": dataclasses.replace(task(), adapter=dataclasses.replace(LORA, kind="dora", dropout=0.2)),
        "copy": copied_task(preference=ipo),
    }
    return [compare(tasks[name], plan, world, Pairs(), 1, 2) for plan, name in asked]


ZERO_1, ZERO_3 = (plan_of(Layout(dp_shard=2), precision="fp64", zero=zero) for zero in (1, 3))
COPIES = plan_of(Layout(dp_replicate=2), precision="fp64", recompute="full")
TENSOR = plan_of(Layout(tp=2), precision="fp64")
SPREAD = plan_of(Layout(dp_replicate=2), precision="fp64", frozen="spread")


@pytest.mark.parametrize(
    "asked",
    [[(ZERO_1, "lora"), (ZERO_3, "dora"), (ZERO_3, "copy"), (COPIES, "copy"), (SPREAD, "copy")],
     [(TENSOR, "lora"), (TENSOR, "dora"), (COPIES, "dora")]],
    ids=("data", "tensor"),
)  # fmt: skip
def test_preference_pairs_equal_one_device(asked: list[tuple[Plan, str]]) -> None:
    for proof in run_ranks(compared, 2, asked)[0]:
        assert proof.equal, proof.first_difference


def test_a_reference_is_the_base_of_adapters_or_a_copy() -> None:
    for changes in ({"adapter": AdapterSpec()}, {"train": ("lm_head",)}, {"model": COPIED}):
        with pytest.raises(ConfigError, match="needs a frozen reference"):
            check_reference(dataclasses.replace(task(), **changes))
    check_reference(copied_task())
    with pytest.raises(ConfigError, match="without adapters"):
        PreferenceLoss()(build_model(MODEL, VOCAB, SEQ, 3), Pairs().read(np.arange(1)))


def test_rows_of_pairs() -> None:
    pairs, end = PreferencePairs([("ab", "cd", "e")], 6, ByteTokenizer()), ByteTokenizer().end_of_document
    row = pairs[0]
    assert row["tokens"].tolist() == [[*b"abcd", end, end], [*b"abe", end, end, end]]
    assert row["labels"].tolist() == [[-100, *b"cd", end, -100, -100], [-100, *b"e", end, -100, -100, -100]]
    short = PreferencePairs([("abcdef", "gh", "ijklmn")], 4, ByteTokenizer())[0]
    assert short["tokens"].tolist() == [[*b"efgh"], [*b"fijk"]]  # what is left of a prompt is its end
    assert short["labels"].tolist() == [[-100, *b"gh", end], [*b"ijkl"]]


def test_a_file_of_pairs(tmp_path: Path) -> None:
    lines = [{"prompt": f"{n} + 1 =", "chosen": f" {n + 1}", "rejected": " 0"} for n in range(5)]
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    train, held_out = preference_pairs(str(tmp_path / "pairs.jsonl"), 16, held_out=2)  # type: ignore[misc]
    assert (len(train), len(held_out), train.vocab) == (3, 2, ByteTokenizer().vocab)
    (tmp_path / "marked.jsonl").write_text("\ufeff" + json.dumps(lines[3]) + "\n", "utf-8")  # as Windows writes it
    marked = preference_pairs(str(tmp_path / "marked.jsonl"), 16)
    assert torch.equal(marked[0]["tokens"], held_out[0]["tokens"])  # type: ignore[index]
    (tmp_path / "wrong.jsonl").write_text('{"prompt": "a", "chosen": "b"}\n')
    with pytest.raises(DataError, match=r"wrong\.jsonl:1 is no preference pair"):
        preference_pairs(str(tmp_path / "wrong.jsonl"), 16)


QUESTION, OTHER = {"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "hm"}
GOOD, BAD = ({"role": "assistant", "content": text} for text in ("4", "5"))


@pytest.mark.parametrize("record", [
    {"prompt": [QUESTION], "chosen": [GOOD], "rejected": [BAD]},
    {"prompt": "2+2?", "chosen": [GOOD], "rejected": [BAD]},
    {"prompt": "2+2?", "chosen": [QUESTION, GOOD], "rejected": [QUESTION, BAD]},
    {"prompt": [QUESTION], "chosen": [QUESTION, GOOD], "rejected": [QUESTION, BAD]},
    {"chosen": [QUESTION, GOOD], "rejected": [QUESTION, BAD]},
    {"chosen": [{"from": "human", "value": "2+2?"}, {"from": "gpt", "value": "4"}], "rejected": [QUESTION, BAD]},
], ids=["prompt", "text", "text-and-whole", "prompt-and-whole", "whole", "sharegpt"])  # fmt: skip
@pytest.mark.parametrize(("template", "before", "after"), [
    ("plain", "user: 2+2?\nassistant: ", "\n"),
    ("chatml", "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n", "<|im_end|>"),
])  # fmt: skip
def test_pairs_of_messages_are_written_by_a_template(
    tmp_path: Path, record: dict[str, Any], template: str, before: str, after: str
) -> None:
    (tmp_path / "pairs.jsonl").write_text(json.dumps(record) + "\n")
    pairs = preference_pairs(str(tmp_path / "pairs.jsonl"), 100, template=template)
    assert isinstance(pairs, PreferencePairs)
    row, end = pairs[0], ByteTokenizer().end_of_document
    for side, answer in enumerate("45"):
        text = [*before.encode(), *answer.encode(), *after.encode()]
        assert row["tokens"][side].tolist()[: len(text)] == text
        counted = [label for label in row["labels"][side].tolist() if label != -100]
        assert counted == [*answer.encode(), *after.encode(), end]


def test_only_the_last_answer_of_a_conversation_counts(tmp_path: Path) -> None:
    record = {"prompt": [QUESTION, OTHER, QUESTION], "chosen": [GOOD], "rejected": [BAD]}
    (tmp_path / "pairs.jsonl").write_text(json.dumps(record) + "\n")
    row = preference_pairs(str(tmp_path / "pairs.jsonl"), 100)[0]  # type: ignore[index]
    assert [label for label in row["labels"][0].tolist() if label != -100][:-1] == [*b"4\n"]  # type: ignore[index]


@pytest.mark.parametrize(("record", "what"), [
    ({"prompt": "a", "chosen": [GOOD], "rejected": "b"}, "no preference pair"),
    ({"prompt": [QUESTION], "chosen": [GOOD], "rejected": [QUESTION]}, "wrong.jsonl:1"),
    ({"prompt": [QUESTION], "chosen": [GOOD, QUESTION], "rejected": [BAD]}, "has no answer"),
    ({"prompt": [QUESTION], "chosen": [{"said": 1}], "rejected": [BAD]}, "wrong.jsonl:1"),
])  # fmt: skip
def test_messages_that_are_no_pair_are_errors_with_their_line(tmp_path: Path, record: Any, what: str) -> None:
    (tmp_path / "wrong.jsonl").write_text(json.dumps(record) + "\n")
    with pytest.raises(DataError, match=what.replace(".", r"\.")):
        preference_pairs(str(tmp_path / "wrong.jsonl"), 16)


def test_texts_need_no_template_of_their_tokenizer(tmp_path: Path) -> None:
    """A folder's own was made for them too: they needed jinja2, and a template that can be read."""
    tokenizer = Tokenizer(WordLevel({"<|endoftext|>": 0, "a": 1}, unk_token="a"))
    tokenizer.add_special_tokens(["<|endoftext|>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{% no end"}))
    path = tmp_path / "pairs.jsonl"
    path.write_text('{"prompt": "a", "chosen": "a", "rejected": "a"}\n')
    pairs = preference_pairs(str(path), 4, tokenizer=str(tmp_path / "tokenizer.json"))
    assert isinstance(pairs, PreferencePairs) and pairs[0]["tokens"].shape == (2, 4)
    path.write_text(json.dumps({"prompt": [QUESTION], "chosen": [GOOD], "rejected": [BAD]}) + "\n")
    with pytest.raises(DataError, match="is no template"):
        preference_pairs(str(path), 4, tokenizer=str(tmp_path / "tokenizer.json"))


def test_an_answer_of_several_messages_keeps_its_prompt(tmp_path: Path) -> None:
    """They were taken for a whole conversation, and the prompt was lost without a word."""
    record = {"prompt": "2+2?", "chosen": [OTHER, GOOD], "rejected": [BAD]}
    (tmp_path / "pairs.jsonl").write_text(json.dumps(record) + "\n")
    pairs = preference_pairs(str(tmp_path / "pairs.jsonl"), 100)
    assert isinstance(pairs, PreferencePairs)
    text = [*b"user: 2+2?\nassistant: hm\nassistant: 4\n"]
    assert pairs[0]["tokens"][0].tolist()[: len(text)] == text
