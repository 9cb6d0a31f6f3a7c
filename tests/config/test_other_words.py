"""An error names the option that is meant, by its meaning, also where a newcomer has the word of another tool."""

from __future__ import annotations

import importlib
import re
import tomllib
from pathlib import Path

import pytest

import paceline
from paceline.cli.main import VERBS, _verb_parser
from paceline.cli.parser import Parser
from paceline.config.other_words import _OF_COMMANDS, _OPTIONS, _VALUES, _VERBS, option_meant, verb_meant
from paceline.errors import ConfigError
from paceline.spec.load import parse_spec
from paceline.units import parse_amount

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("written", "told"),
    [
        ("task.batch_size=8", "task.global_batch"),  # 'batch_rows' is nearest in letters
        ("task.batch=8", "task.global_batch"),
        ("task.epochs=3", "task.stop"),
        ("task.learning_rate=0.1", "task.optimizer.lr"),  # 'task.growth.learning_rate' is another thing
        ("run.output_dir=x", "run.dir"),  # 'group_read'
        ("run.save_steps=5", "run.checkpoint_every"),  # 'alerts'
        ("cluster.gpus=8", "cluster.devices"),  # 'groups'
        ("cluster.gpu=8", "cluster.devices"),  # 'pue'
        ("task.data.num_workers=4", "nothing"),  # 'document_tokens'
        ("task.data.max_length=4", "task.data.seq_len"),  # 'max_bytes'
        ("plan.gradient-checkpointing=true", "plan.recompute"),
        ("task.adapter.r=8", "task.adapter.rank"),
        ("task.adapter.kind=qlora", 'base_dtype = "nf4"'),
        ("task.optimizer.groups=[{params = ['head.*']}]", 'match = ["'),  # 'arguments' is nearest in letters
        ("task.optimizer.groups=[{match = ['head.*'], lr = 0.1}]", "lr_scale = "),  # task.optimizer.lr is of all
        ("task.class_weights=[1.0, 5.0]", "task.objective"),  # 'data'
        ("task.optimizer.betas=[0.9, 0.95]", "beta2 = "),
        ("task.model.num_local_experts=8", "task.model.experts"),
        ("task.model.num_experts_per_tok=2", "task.model.top_k"),
        ("task.model.expert=8", "'experts'"),  # plan.ep
        ("task.data.context=2048", "task.data.seq_len"),  # plan.cp
        ("plan.context=2", "plan.cp = 2"),
        ("plan.expert=2", "plan.ep = 2"),
        ("run.checkpoint_every=10min", '"100 steps"'),  # run.time_limit alone, which ends the run
        ("plan.precision=bfloat16", "'bf16'"),
        ("plan.goal=cheapest", "'money'"),
        ("task.schedule.kind=linear_with_warmup", 'kind = "linear", warmup ='),
        ("task.schedule.kind=cosine_with_restarts", "CosineAnnealingWarmRestarts"),  # 'constant' is nearest in letters
        ("task.schedule.kind=polynomial", "PolynomialLR"),
        ("task.schedule.kind=inverse_sqrt", "a function of the step"),
    ],
)
def test_the_word_of_another_tool_is_answered_by_its_meaning(written: str, told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_spec("", "x.toml", [written])
    assert told in caught.value.try_


def test_what_is_near_in_letters_and_what_is_called_so_elsewhere_stay() -> None:
    for written, told in [
        ("task.optimizer.weigth_decay=1", "weight_decay"),
        ("run.seed=3", "task.seed"),
        ("task.warmup=3", "task.schedule.warmup"),
        ("run.wandb=true", "run.exports.wandb"),
        ("run.checkpoints.every='5 steps'", "'run.checkpoint_every'"),  # 'task.samples.every' is called so
    ]:
        with pytest.raises(ConfigError) as caught:
            parse_spec("", "x.toml", [written])
        assert told in caught.value.try_, caught.value


@pytest.mark.parametrize(
    ("written", "because", "told"),
    [
        ("task.adapter.kind=LoRA", "it takes one of", "did you mean 'lora'?"),  # all choices were listed
        ("run.alerts.sinks='slack'", "text was given", "such as [{ kind = "),  # the example was of optimizers' groups
        ("cluster.devices=2.5", "a number with a fraction", "2 or 3"),  # the default and the documentation were told
        ("task.global_batch='64'", "it has no unit", "add a unit"),  # unit '(none)'
        ("run.time_limit='2 fortnights'", "there is no unit 'fortnights'", '"2 h"'),
    ],
)
def test_what_to_write_is_of_the_option_that_is_wrong(written: str, because: str, told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_spec("", "x.toml", [written])
    assert because in caught.value.because and told in caught.value.try_, caught.value


def test_in_python_and_on_the_command_line_too() -> None:
    with pytest.raises(ConfigError, match="global_batch"):
        paceline.Task(batch_size=8)  # type: ignore[call-arg]
    parser = Parser(prog="paceline plan")
    parser.add_argument("--set")
    parser.add_argument("--all", action="store_true")
    with pytest.raises(ConfigError, match=r"--set: task\.global_batch"):
        parser.read(["--batch-size", "8"])
    with pytest.raises(ConfigError) as caught:
        parser.read(["--lors"])  # '--all' has the dashes of every option, and no more
    assert "did you mean" not in caught.value.try_
    with pytest.raises(ConfigError, match=r"did you mean '--all'"):
        parser.read(["--alll"])


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("dash --out page.html", "did you mean '--export'?"),  # '--port' is nearest in letters
        ("dash --html page.html", "did you mean '--export'?"),  # '--host'
        ("dash --address 0.0.0.0", "did you mean '--host'?"),
        ("dash --prot 80", "did you mean '--port'?"),
        ("plan --output plan.png", "did you mean '--picture'?"),
        ("plan --quiet", "one of: "),  # '--budget'
        ("bill --out bill.csv", "did you mean '--export'?"),  # '--until'
        ("export runs/a --out folder", "OUT is written without an option"),
        ("export --checkpoint 3", "did you mean '--step'?"),
        ("evaluate --num-samples 3", "did you mean '--samples'?"),
        ("evaluate --data test.csv", "SOURCE is written without an option"),
        ("report --run-dir runs/a", "RUN_DIR is written without an option"),
        ("train --config a.toml", "SPEC is written without an option"),
        ("train --output-dir a", "run.dir"),
        ("logs --tail 5", "did you mean '--last'?"),
        ("probe --format json", "one of: "),  # '--forget', which would have measured all anew
        ("train --n 3", "one of: "),  # '--no-verify'
    ],
)
def test_the_option_of_another_verb_or_tool_is_answered_by_its_meaning(line: str, told: str) -> None:
    verb, *words = line.split()
    with pytest.raises(ConfigError) as caught:
        _verb_parser(verb, importlib.import_module(f"paceline.cli.{verb}")).read([*words])
    assert told in caught.value.try_


def test_each_option_that_is_told_is_one_of_some_verb() -> None:
    there = set[str]()
    for verb in VERBS:
        for action in _verb_parser(verb, importlib.import_module(f"paceline.cli.{verb}"))._actions:
            there |= set(action.option_strings or [str(action.metavar or action.dest)])
    assert {meant for words in _OF_COMMANDS.values() for meant in words} <= there


@pytest.mark.parametrize(
    ("word", "told"),
    [
        ("launch", "paceline train SPEC"),  # 'alerts' and 'schema' are nearest in letters
        ("resume", "paceline train SPEC"),  # 'probe'
        ("sweep", "paceline compare"),
        ("predict", "paceline export"),
        ("watch", "paceline dash"),  # 'bench'
        ("stop", "kill -TERM"),
        ("advice", "paceline plan SPEC --explain"),  # 'dash'
        ("explain", "paceline plan SPEC --explain"),  # 'export'
        ("diff", "paceline compare"),
        ("pln", "did you mean 'plan'?"),
        ("tiny.toml", "paceline train tiny.toml"),
        ("train.py", "python train.py"),
    ],
)
def test_the_verb_of_another_tool_is_answered_by_its_meaning(word: str, told: str) -> None:
    assert told in verb_meant(word, VERBS)


def test_every_verb_that_is_answered_is_there() -> None:
    """What is told names verbs that exist, and pages that do; no verb of ours is answered by another one."""
    assert not VERBS.keys() & _VERBS.keys()
    for said in _VERBS.values():
        assert set(re.findall(r"paceline (\w+)", said)) <= VERBS.keys(), said
        assert all((ROOT / page).is_file() for page in re.findall(r"docs/[\w/-]+\.md", said)), said


def test_every_answer_is_a_line_that_a_spec_takes() -> None:
    """And so is what the page for those who come from another tool says."""
    checked = 0
    page = (ROOT / "docs" / "guide" / "coming-from.md").read_text(encoding="utf-8").partition("```")[0]
    assert page.count(" = ") > 25
    for said in {*_OPTIONS.values(), *_VALUES.values(), *page.splitlines()}:
        for line in re.findall(r"(?:task|plan|cluster|run)\.[\w.]+ = (?:\{.*?\}|\[.*?\]|\"[^\"]*\"|[\w.-]+)", said):
            tomllib.loads(line)
            parse_spec("", "x.toml", [line.replace(" = ", "=", 1)])
            checked += 1
    assert checked > 30


def test_an_option_of_this_table_is_never_answered_by_one_of_another() -> None:
    assert "warmup" in option_meant("warm_up", ["warmup", "kind"])


@pytest.mark.parametrize(("text", "unit"), [("10 iterations", "steps"), ("8 rows", "samples"), ("3 epoc", "epochs")])
def test_the_unit_of_another_tool(text: str, unit: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_amount(text)
    assert unit in caught.value.try_


def test_a_choice_that_is_empty_text_is_seen() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_spec("", "x.toml", ["task.adapter.base_dtype=int4"])
    assert 'one of: "", ' in caught.value.because and "'nf4'" in caught.value.try_
