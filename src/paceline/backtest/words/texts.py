"""Lengths of the texts that a sequence is packed of, as a row of a table says them."""

from __future__ import annotations

import re

from paceline.backtest.schema import StepRow
from paceline.plan.cost.programs.known import program_of

SAID = re.compile(r"\b(?:texts|documents|samples|examples) of (?:about |some |~)?(\d[\d,]*) tokens\b")
TUNED = re.compile(r"\bfine-?tun|\bsft\b|\bq?lora\b")
APART = re.compile(r"\b(?:unpacked|not packed|no packing|without packing|padded)\b")
MOCK = re.compile(r"\bmock\b")  # data of as many tokens as a sequence has, unless a row says otherwise


def text_tokens(row: StepRow, marks: list[str]) -> int:
    """Return the tokens of the texts that a row's sequences are packed of, as its notes or its program say; else 0.

    A program's recipes of fine-tuning pack texts of their own data unless the notes say that nothing is packed.

    Example: "packed texts of 512 tokens" are 512; NeMo's LoRA in sequences of 4,096 has SQuAD's of about 240.
    """
    notes, sequence = row.notes.lower(), row.seq_len or 0
    if APART.search(notes):
        return 0
    if said := SAID.search(notes):
        tokens = int(said[1].replace(",", ""))
        return tokens if tokens < sequence else 0
    tokens = program_of(row.program, row.zero_stage)[0].tunes_texts
    if not 0 < tokens < sequence or not TUNED.search(notes) or MOCK.search(notes):
        return 0
    marks.append(f"texts of {tokens} tokens in a sequence, as {row.program} packs them")
    return tokens
