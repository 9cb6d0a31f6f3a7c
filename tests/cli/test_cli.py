"""The command line: help, exit codes, messages and JSON, in process and in real processes."""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from runs import run_patiently, wait_until

from paceline.cli import main as cli
from paceline.cli import output, parser
from paceline.cli.main import VERBS, main
from paceline.errors import DoesNotFit, PacelineError, Requeue

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(*words: str, **settings: object) -> subprocess.CompletedProcess[str]:
    return run_patiently([sys.executable, "-m", "paceline", *words], 60, is_cold=True, **settings)


@pytest.fixture
def fake_verb(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A verb `fake` whose execute() each test replaces."""
    module = ModuleType("paceline.cli.fake", "A verb for tests.")
    module.EXAMPLE, module.CODES = "paceline fake", ()  # type: ignore[attr-defined]
    module.add_arguments = lambda parser: None  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "paceline.cli.fake", module)
    monkeypatch.setitem(cli.VERBS, "fake", "a verb for tests")
    return module


def raises(module: ModuleType, error: BaseException) -> None:
    def execute(options: argparse.Namespace) -> int:
        raise error

    module.execute = execute  # type: ignore[attr-defined]


def test_help_imports_neither_torch_nor_numpy_nor_other_verbs() -> None:
    script = (
        "import sys\nfrom paceline.cli.main import main\ncodes = [main(['--help']), main(['--version'])]\n"
        "loaded = [name for name in sys.modules if name.startswith('paceline.cli.')]\n"
        "codes += [main([verb, '--help']) for verb in sys.argv[1:]]\n"
        "print(codes, sorted(loaded), [name for name in ('torch', 'numpy', 'pyarrow') if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", script, *VERBS], capture_output=True, text=True, check=True)
    codes = [0] * (2 + len(VERBS))
    shell = [
        "paceline.cli.json",
        "paceline.cli.json.shapes",
        "paceline.cli.main",
        "paceline.cli.output",
        "paceline.cli.parser",
    ]
    assert done.stdout.splitlines()[-1] == f"{codes} {shell} []"


@pytest.mark.parametrize("verb", VERBS)
def test_every_help_ends_with_an_example_and_the_exit_codes(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([verb, "--help"]) == 0
    text = capsys.readouterr().out
    assert f"example:\n  paceline {verb}" in text and "exit codes:" in text and "--json" in text


def test_the_overview_documents_every_verb_and_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(f"  {verb} " in text and purpose in text for verb, purpose in VERBS.items())
    assert all(f"{code:>3}  {meaning}" in text for code, meaning in parser.EXIT_CODES.items())
    assert main([]) == 2 and main(["help"]) == 0


@pytest.mark.parametrize(
    ("words", "what", "fix"),
    [("pln", "unknown verb 'pln'", "did you mean 'plan'?"), ("--verison", "unknown option '--verison'", "--version"),
     ("plan --explian", "unknown option '--explian'", "did you mean '--explain'?"),
     ("plan --exp", "unknown option '--exp'", "--explain"), ("plan a b", "unexpected argument 'b'", "--help"),
     ("--set plan", "unknown option '--set'", "paceline VERB --set"), ("report", "RUN_DIR is missing", "--help"),
     ("train --steps 0", "--steps: '0' is not a whole number", "--help"), ("plan --set", "--set: expected", "--help"),
     ("probe --kind gpu", "--kind = 'gpu' is not a choice", "did you mean 'cuda'?"),
     ("plan --set cluster.device=gpu", "cluster.device = 'gpu' is not in the catalog", "did you mean 'cuda'?"),
     ("checkpoint list x", "ACTION = 'list' is not a choice", "did you mean 'ls'?"),
     ("checkpoint compare x y", "ACTION = 'compare' is not a choice", "did you mean 'diff'?"),
     ("report /nowhere", "'/nowhere' is not a run's directory", ""),
     ("verify --dtype fp31", "unknown precision", "fp32"),
     ("plan --set task.optimizer.lrr=1", "--set: unknown key 'task.optimizer.lrr'", "did you mean 'lr'?"),
     ("plan nowhere/x.toml", "there is no file 'nowhere/x.toml'", ""),
     ("train", "nothing is named to train", "paceline train SPEC"),  # it began the task of all defaults: eight hours
     ("plan --set cluster.device=H100-SXM5-80GB", "is not in the catalog", "h100-sxm"),  # 'a100-80'
     ("plan --set cluster.device=B200-180GB", "is not in the catalog", "b200"),
     ("verify --layout tensor=2", "plan = 'tensor=2' is not a plan", "plan.tp = 2"),  # all options were listed
     ("plan --set task.stop=2hours", "'2hours' is not an amount", 'run.time_limit = "2hours"'),
     ("plan --set task.stop=100B", "'100B' is not an amount", '"100 B tokens"'),
     ("plan --set task.optimizer.kind=adamw", "unknown key 'task.optimizer.kind'", "'name'"),  # 'task.adapter.kind'
     ("export nowhere out", "'nowhere' holds no checkpoints", "the directory of a run"),
     ("checkpoint ls nowhere", "'nowhere' holds no checkpoint", "the directory of a run"),
     ("compare a.toml b.toml", "a.toml is not a run's directory", "paceline plan"),
     ("plan --set task.model=meta-llama/Llama-3-70B", "there is no model at", "hf download meta-llama/Llama-3-70B")],
)  # fmt: skip
def test_usage_errors(words: str, what: str, fix: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words.split()) == 2
    captured = capsys.readouterr()
    assert not captured.out and captured.err.startswith("error: ")
    lines = captured.err.splitlines()
    assert what in lines[0] and lines[1].startswith("  because  ") and lines[2].startswith("  try      ")
    assert fix in lines[2]


def test_errors_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--json", "--set", "plan.zero=9"]) == 2
    fields = json.loads(capsys.readouterr().out)
    assert fields["exit_code"] == 2 and fields["error"] == "ConfigError" and "plan.zero = 9" in fields["what"]
    assert main(["plan", "--json", "--nonsense"]) == 2
    assert json.loads(capsys.readouterr().out)["exit_code"] == 2


@pytest.mark.parametrize(
    ("error", "code", "says"),
    [(DoesNotFit("no layout fits", "8 GiB", "fewer"), 3, "error: no layout fits\n  because  8 GiB\n  try      fewer"),
     (Requeue("the time limit is near"), 75, "requeue: stopped early\n  because  the time limit is near"),
     (KeyboardInterrupt(), 130, "stop: interrupted"), (SystemExit(7), 7, "")],
)  # fmt: skip
@pytest.mark.parametrize("as_json", [False, True])
def test_each_ending_has_its_exit_code(
    error: BaseException, code: int, says: str, as_json: bool, fake_verb: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    raises(fake_verb, error)
    assert main(["fake", "--json"] if as_json else ["fake"]) == code
    captured = capsys.readouterr()
    assert captured.err.startswith(says)
    if as_json and says:
        assert json.loads(captured.out)["exit_code"] == code
    else:
        assert not captured.out


def test_a_defect_shows_its_traceback_and_asks_for_a_report(
    fake_verb: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    in_ours = str(Path(cli.__file__).with_name("of_ours.py"))
    exec(compile("def execute(options):\n    return 1 / 0", in_ours, "exec"), fake_verb.__dict__)
    assert main(["fake", "--json"]) == 1
    captured = capsys.readouterr()
    assert "Traceback" in captured.err and "paceline fake --json" in captured.err and "report it" in captured.err
    assert json.loads(captured.out)["because"] == "ZeroDivisionError: division by zero"


def test_an_error_of_the_users_own_code_is_no_defect_of_ours(
    fake_verb: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    """A metric, a callback or an objective that raised was told as a defect of ours, to be reported."""
    raises(fake_verb, ZeroDivisionError("by nothing"))  # which this file does
    assert main(["fake", "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert (told["error"], told["because"]) == ("OwnCode", "ZeroDivisionError: by nothing")
    assert told["what"].startswith("your own code failed at test_cli.py:")
    fake_verb.execute = lambda options: json.loads("{")  # type: ignore[attr-defined]  # a library's error is its caller's
    assert main(["fake"]) == 1
    assert "your own code failed at test_cli.py:" in capsys.readouterr().err


def test_a_reader_that_leaves_is_no_error() -> None:
    command = f"{sys.executable} -m paceline plan --provenance; echo code $? >&2"
    shell = subprocess.run(["bash", "-c", f"({command}) | true"], capture_output=True, text=True, check=True)
    assert shell.stderr in ("code 141\n", "code 0\n")  # 0 where the pipe took it all before its reader left
    with subprocess.Popen(
        [sys.executable, "-m", "paceline", "schema"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout and process.stderr
        process.stdout.close()
        wait_until(lambda: process.poll() is not None)
        assert process.returncode == 141 and process.stderr.read() == b""


def test_provenance_in_a_real_process() -> None:
    done = run("plan", str(EXAMPLES / "stdlib-code.toml"), "--provenance", "--set", "task.seed=3")
    rows = {line.split(" = ")[0]: line.rsplit("  ", 1)[1] for line in done.stdout.splitlines()}
    assert done.returncode == 0 and not done.stderr
    assert (rows["task.seed"], rows["plan.zero"]) == ("--set", "default")
    assert rows["task.model.name"] == f"{EXAMPLES / 'stdlib-code.toml'}:6"


def test_provenance_and_schema_and_models_as_json() -> None:
    done = run("plan", "--provenance", "--json", "--set", "task.stop=5 steps")
    values = json.loads(done.stdout)
    assert values["spec"]["task"]["stop"] == "5 steps" and values["provenance"]["task.stop"] == "--set"
    assert json.loads(run("schema").stdout)["properties"].keys() == {"task", "cluster", "plan", "run"}
    assert json.loads(run("plan", "--models", "--json").stdout)["models"]["llama-8b"]["parameters"] == 8_030_261_248


def test_an_encoding_without_our_characters_is_no_error() -> None:
    done = run("plan", "--provenance", "--set", "task.model.name=µ×", env={"PYTHONIOENCODING": "ascii", "PATH": ""})
    assert done.returncode == 0 and "\\xb5\\xd7" in done.stdout


def test_colour_only_on_a_terminal_that_wants_it(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal:
        def isatty(self) -> bool:
            return True

    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert output.paint("x", "red", Terminal()) == "\x1b[31mx\x1b[0m"  # type: ignore[arg-type]
    monkeypatch.setenv("NO_COLOR", "1")
    assert output.paint("x", "red", Terminal()) == "x"  # type: ignore[arg-type]
    monkeypatch.delenv("NO_COLOR")
    assert output.paint("x", "red", sys.stdout) == "x"


def test_json_holds_no_number_that_json_lacks(capsys: pytest.CaptureFixture[str]) -> None:
    output.print_bare({"a": float("nan"), "b": (1, {"c": float("inf")}), "d": Path("x"), 3: PacelineError})
    values = json.loads(capsys.readouterr().out)
    assert values["a"] is None and values["b"] == [1, {"c": None}] and values["d"] == "x" and "3" in values


def test_stdout_is_kept_for_json() -> None:
    script = (
        "import subprocess, sys\nfrom paceline.cli.output import stdout_to_stderr\n"
        "with stdout_to_stderr():\n    print('mine')\n    subprocess.run([sys.executable, '-c', \"print('child')\"])\n"
        "print('json')\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "json\n" and done.stderr == "mine\nchild\n"


def test_the_short_options_of_train(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    start = ModuleType("paceline.session.start")
    start.train = lambda spec, standby: seen.append(spec) or 6  # type: ignore[attr-defined,func-returns-value]
    monkeypatch.setitem(sys.modules, "paceline.session.start", start)
    assert (
        main(["train", "--steps", "5", "--run-dir", "a b", "--no-verify", "--record-samples", "--set", "task.seed=1"])
        == 6
    )
    (spec,) = seen
    assert str(spec.task.stop) == "5 steps" and spec.run.dir == "a b" and spec.task.seed == 1
    assert not spec.run.verify and spec.run.record_samples
    assert (spec.provenance["task.stop"], spec.provenance["run.dir"]) == ("--steps", "--run-dir")
