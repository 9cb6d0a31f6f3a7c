"""The resume contract: what of a spec may change between two starts of one run, option by option.

The machines may change, and so may the plan; the experiment may not. A clause holds for an option or a whole table; of
two that match, the longer one counts. An option of a Task without a clause is a mistake that a test finds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from paceline.errors import ConfigError
from paceline.spec.data.mix import MixSpec
from paceline.spec.load import Spec, spec_to_dict


class OnResume(StrEnum):
    """What happens where an option is not what it was at the start before."""

    FREE = "free"  # nothing is said
    NOTICE = "notice"  # the run goes on, and the change is a decision in the journal
    REFUSED = "refused"  # ConfigError, exit code 2


FREE, NOTICE, REFUSED = OnResume.FREE, OnResume.NOTICE, OnResume.REFUSED


@dataclass(frozen=True)
class Clause:
    """What a change of one option, or of any option of a table, means."""

    of: str
    on_resume: OnResume
    because: str
    moves_rate: bool = False  # whether the learning rate follows from it


@dataclass(frozen=True)
class Change:
    """An option that is not what it was, and the clause that holds for it."""

    option: str
    before: object
    after: object
    clause: Clause

    def __str__(self) -> str:
        return f"{self.option} was {self.before!r} and is now {self.after!r}"


EXPERIMENT = "it makes another experiment"
RATE = "the learning rate takes another course from here on; the first step that it changes is named"
LENGTH = "the run becomes longer or shorter, and a schedule that follows its length with it"
CONTENT = "the data may move: their fingerprint is compared instead, and other content is refused"
ORDER = "another sample would stand at every place"
UPDATES = "the coming updates differ; the weights and the optimizer's state are kept"
MIX = "task.data.mix"
ROUNDS = "the same experiment, rounded otherwise"

CLAUSES = (
    Clause("task.name", FREE, "a name"),
    Clause("task.model", REFUSED, EXPERIMENT),
    Clause("task.data", NOTICE, CONTENT),
    Clause("task.data.tokenizer", REFUSED, EXPERIMENT),
    Clause("task.data.vocab", REFUSED, EXPERIMENT),
    Clause("task.data.seq_len", REFUSED, EXPERIMENT),
    Clause("task.data.cross_documents", REFUSED, EXPERIMENT),
    Clause("task.data.validation_fraction", REFUSED, "samples would move between training and validation"),
    Clause("task.data.collate", REFUSED, EXPERIMENT),
    Clause("task.data.rows", REFUSED, EXPERIMENT),
    Clause("task.data.document_tokens", REFUSED, EXPERIMENT),
    Clause("task.data.shuffle", REFUSED, ORDER),
    Clause("task.data.shuffle_block", REFUSED, ORDER),
    Clause("task.data.shuffle_window", REFUSED, ORDER),
    Clause("task.data.shuffle_bucket", REFUSED, ORDER),
    Clause(MIX, REFUSED, ORDER),
    Clause("task.data.cache_dir", FREE, "where tokens are kept, not which"),
    Clause("task.data.image_size", REFUSED, EXPERIMENT),
    Clause("task.data.augment", REFUSED, EXPERIMENT),
    Clause("task.data.normalise", REFUSED, EXPERIMENT),
    Clause("task.data.cache_images", FREE, "what is kept on disk, not what is read"),
    Clause("task.data.images_in_memory", FREE, "what is kept in memory, not what is read"),
    Clause("task.data.cache_limit", FREE, "how many bytes are kept, not which are read"),
    Clause("task.objective", REFUSED, EXPERIMENT),
    Clause("task.turns", REFUSED, EXPERIMENT),
    Clause("task.adapter", REFUSED, EXPERIMENT),
    Clause("task.train", REFUSED, EXPERIMENT),
    Clause("task.preference", REFUSED, EXPERIMENT),
    Clause("task.embedding_noise", REFUSED, EXPERIMENT),
    Clause("task.optimizer", NOTICE, UPDATES),
    Clause("task.optimizer.name", REFUSED, "the state of one optimizer is not another's"),
    Clause("task.optimizer.lr", NOTICE, RATE, moves_rate=True),
    Clause("task.schedule", NOTICE, RATE, moves_rate=True),
    Clause("task.callbacks", NOTICE, "what they decide may differ from here on"),
    Clause("task.samples", FREE, "what the model writes changes nothing"),
    Clause("task.evaluate", NOTICE, "what is measured of the weights, and when that ends training"),
    Clause("task.evaluate.sets", FREE, "what is measured of the weights"),
    Clause("task.global_batch", REFUSED, EXPERIMENT),
    Clause("task.batch_rows", REFUSED, EXPERIMENT),
    Clause("task.growth", REFUSED, EXPERIMENT),
    Clause("task.selection", REFUSED, EXPERIMENT),
    Clause("task.stop", NOTICE, LENGTH, moves_rate=True),
    Clause("task.seed", REFUSED, "the order of samples and all random numbers follow from it"),
    Clause("cluster", FREE, "the machines may change"),
    Clause("plan", FREE, "the plan may change: the state is resharded, and the journal names both layouts"),
    Clause("plan.precision", NOTICE, ROUNDS),
    Clause("plan.sync", REFUSED, "copies have state of their own, or are summed otherwise"),
    Clause("run", FREE, "what is written, how often, and when the run stops"),
    Clause("run.accept_data", FREE, "the change of the data that it accepts is told itself"),
    Clause("run.tf32", NOTICE, ROUNDS),
    Clause("run.health.on_nonfinite", NOTICE, "it decides which updates are made"),
    *(
        Clause(f"run.health.{name}", NOTICE, "it decides which updates are made")
        for name in ("on_spike", "spike_window", "spike_deviations", "most_skips", "skips_window")
    ),
    Clause("run.replay", NOTICE, "whether a resume is held against the journal is on record"),
    Clause("run.cudnn_benchmark", NOTICE, ROUNDS),
    Clause("run.deterministic", NOTICE, ROUNDS),
)


def clause_of(option: str) -> Clause | None:
    """Return the clause that holds for an option, by its dotted name from `task`, `cluster`, `plan` or `run` on."""
    matching = [clause for clause in CLAUSES if option == clause.of or option.startswith(clause.of + ".")]
    return max(matching, key=lambda clause: len(clause.of), default=None)


def changes_between(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[Change]:
    """Return every option for which there is a clause and in which two specs as data differ.

    An option that an earlier release did not know had its default then, of a source of a mixture too.
    """
    defaults = dict(_flat(spec_to_dict(Spec())))
    before, after = ({**defaults, **_with_whole_mix(dict(_flat(each)))} for each in (then, now))
    differing = [option for option in {**before, **after} if before.get(option) != after.get(option)]
    clauses = {option: clause_of(option) for option in differing}
    return [
        Change(option, before.get(option), after.get(option), clause)
        for option, clause in clauses.items()
        if clause is not None
    ]


def check_contract(then: Mapping[str, object], now: Mapping[str, object], run_dir: object) -> list[Change]:
    """Return the changes between two specs as data that are to be told; raise ConfigError naming all refused ones."""
    changes = changes_between(then, now)
    refused = [change for change in changes if change.clause.on_resume == REFUSED]
    if refused:
        names = ", ".join(change.option for change in refused)
        reasons = dict.fromkeys(change.clause.because for change in refused)  # each with the changes that it is of
        told = {why: [str(change) for change in refused if change.clause.because == why] for why in reasons}
        raise ConfigError(
            f"{run_dir} holds a run of another task: {names} {'differs' if len(refused) == 1 else 'differ'}",
            "; ".join(f"{', '.join(changes)}: {why}" for why, changes in told.items()),
            "undo the change, or start a new run in another run.dir (unset, it is runs/ and task.name)",
        )
    return [change for change in changes if change.clause.on_resume == NOTICE]


def _with_whole_mix(options: dict[str, Any]) -> dict[str, Any]:
    """Return options by their dotted names in which every source of a mixture says all that a source may say."""
    if not isinstance(options.get(MIX), list):
        return options
    unsaid = {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(MixSpec()).items()}
    return {**options, MIX: [{**unsaid, **each} for each in options[MIX]]}


def _flat(values: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    """Yield (dotted key, value) of nested tables."""
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value
