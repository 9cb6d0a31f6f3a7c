"""SamplesSpec: the `[task.samples]` table of a spec. Texts that a language model writes while it is trained."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.config.declared import Declared
from paceline.config.fields import option
from paceline.errors import ConfigError
from paceline.units import Amount


@dataclass(frozen=True)
class SamplesSpec(Declared, table="task.samples"):
    """What a language model is to continue now and then, for the journal and the report."""

    prompts: tuple[str, ...] = option((), "texts that the model continues; none leaves samples out")
    every: Amount = option(
        Amount(100, "steps"),
        "steps, samples or tokens between samples; the last step has some too",
        quantity="amount",
        units=("steps", "samples", "tokens"),
    )
    tokens: int = option(32, "tokens that are written for each prompt", minimum=1)
    temperature: float = option(
        0.0, "0 takes the likeliest token each time; else logits are divided by it and tokens drawn by seed and step",
        minimum=0.0,
    )  # fmt: skip

    def refuse_contradictions(self) -> None:
        """Raise ConfigError for a prompt without a character."""
        if not all(self.prompts):
            raise ConfigError("task.samples.prompts has an empty text", "there is nothing to continue", "a character")
