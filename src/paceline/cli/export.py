"""Writes a run's weights as safetensors: for the built-in models in Hugging Face's layout, with config.json.

The newest checkpoint that is sound in every byte is taken, or the one of --step; `--step best` is the one of the best
evaluation by task.evaluate.metric, of those that were saved after one. A built-in model is then loaded by
`LlamaForCausalLM.from_pretrained(OUT)`; one that came from a folder of Hugging Face by the folder's own class, with its
tokenizer beside it; one of your own is in OUT/model.safetensors under its own names, tied weights once.

Of a run with adapters (task.adapter) these alone are written, in the names and files of peft, whose
`PeftModel.from_pretrained(base, OUT)` loads them; --merge writes whole weights with the adapters added to them.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from paceline.cli.json.shapes import EXPORT
from paceline.cli.output import print_json, say_folded
from paceline.cli.parser import step_or_best

EXAMPLE = "paceline export runs/stdlib-code weights"
CODES = (74,)
PEFT = "PeftModel.from_pretrained loads it on the base model"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `paceline export`."""
    parser.add_argument("run_dir", metavar="RUN_DIR", type=Path, help="a run's directory: the one with `checkpoints`")
    parser.add_argument("out", metavar="OUT", type=Path, help="the folder to write; it is made where there is none")
    parser.add_argument(
        "--step", metavar="N", type=step_or_best, help="the checkpoint of this step, or of the best evaluation (best)"
    )
    parser.add_argument(
        "--merge", action="store_true", help="of a run with adapters, whole weights with the adapters added to them"
    )


def execute(options: argparse.Namespace) -> int:
    """Run `paceline export`."""
    from paceline.session.verbs.weights import export_run

    found = export_run(options.run_dir, options.out, options.step, merge=options.merge)
    if options.json:
        print_json({
            "run_dir": str(options.run_dir), "checkpoint": str(found.checkpoint), "step": found.step,
            "out": str(found.out), "weights_format": found.format, "architecture": found.architecture,
            "files": [file.name for file in found.files],
            "bytes": found.bytes, "skipped": found.skipped,
        }, EXPORT)  # fmt: skip
        return 0
    for reason in found.skipped:
        say_folded(f"skipped  {reason}")
    loads = PEFT if found.format == "peft" else "by the module's own names"
    if any(file.name == "classes.json" for file in found.files):
        loads += "; classes.json says what its outputs are, docs/guide/predicting.md how to ask it"
    loads = f"{found.architecture}.from_pretrained loads it" if found.architecture else loads
    say_folded(f"export   step {found.step} to {found.out} ({found.bytes:,} bytes; {loads})")
    return 0
