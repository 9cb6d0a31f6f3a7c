"""What `paceline verify` finds out: the proofs of one layout or of many, and how the verb ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from paceline.errors import ConfigError, PacelineError, VerificationFailed, suggestion
from paceline.session.ahead import proof_ahead
from paceline.spec.arguments import plan_spec
from paceline.spec.load import Spec
from paceline.spec.proof.records import Proof
from paceline.verify.compare.tolerance import DTYPES
from paceline.verify.process.every import verify_all
from paceline.verify.process.start import failure_of, verify_spec

TORCH_NAMES = {"float32": "fp32", "float64": "fp64"}
Say = Callable[[str], None]


@dataclass(frozen=True)
class Verification:
    """The proofs of one layout or of many; `equal` tells whether all that could be had are equal to one device."""

    equal: bool
    layouts: tuple[Proof, ...]

    @property
    def refused(self) -> tuple[Proof, ...]:
        """The layouts that cannot be had; `refused_because` says why not."""
        return tuple(proof for proof in self.layouts if proof.refused_because)

    @property
    def unequal(self) -> tuple[Proof, ...]:
        """The layouts that were tried and are not equal, or could not be proven."""
        return tuple(proof for proof in self.layouts if not proof.equal and not proof.refused_because)

    @property
    def exit_code(self) -> int:
        """0 where all are equal, 3 where none can be had, 4 where one is not equal."""
        return 0 if self.equal else 3 if len(self.refused) == len(self.layouts) else 4

    def failure(self, spec: str = "SPEC") -> PacelineError | None:
        """Return the error of the first layout that differs, else of the first that could not be proven, or None.

        `spec` stands for the spec file in the command that the error suggests.
        """
        for proof in self.unequal:
            if proof.first_difference:
                return failure_of(proof, spec)
        for proof in self.unequal:
            name = proof.layout
            alone = f"paceline verify {spec} --layout {name.replace(' ', ',')}"
            return VerificationFailed(f"layout {name} cannot be proven", str(proof.error), alone)
        return None


def verification(
    spec: Spec,
    *,
    layout: str | None = None,
    every: int = 0,
    steps: int = 3,
    dtypes: Sequence[str] | None = None,
    say: Say | None = None,
    progress: Say | None = None,
) -> Verification:
    """Return the proof of a layout (None: the planner's), or of every layout of 2 to `every` ranks.

    `progress` hears of each layout as it ends. Raises ConfigError for a layout beside `every`, and for precisions that
    are none.
    """
    precisions = precisions_of(dtypes or (("fp64",) if every else DTYPES))
    if every and layout:
        raise ConfigError("every and layout exclude each other", "every=N proves every layout", "one of the two")
    if layout is not None:
        plan_spec(layout)  # what is wrong with its text is told before a process is started
    with proof_ahead() as standby:
        if every:
            found = verify_all(spec, every, steps=steps, dtypes=precisions, say=say, progress=progress, standby=standby)
        else:
            found = [verify_spec(spec, layout=layout, steps=steps, dtypes=precisions, say=say, standby=standby)]
    tried = [proof for proof in found if not proof.refused_because]
    return Verification(bool(tried) and all(proof.equal for proof in tried), tuple(found))


def precisions_of(names: Sequence[str]) -> tuple[str, ...]:
    """Return the precisions to compare in, each once; torch's names of them are understood."""
    dtypes = tuple(dict.fromkeys(TORCH_NAMES.get(name.strip(), name.strip()) for name in names))
    for dtype in dtypes:
        if dtype not in DTYPES:
            because = f"layouts are compared in {' and '.join(DTYPES)}"
            raise ConfigError(f"unknown precision '{dtype}'", because, suggestion(dtype, DTYPES))
    return dtypes
