"""From a plan to the brief of its ranks: micro-batch confirmed, price said, budget held, plan proven. Every run has it.

`session.start` does this for `train` and `fit`, `session.begin` for `Run` and ranks that a launcher has started, and
`session.nodes.coordinate` for several nodes.
"""

from __future__ import annotations

from collections.abc import Callable

from paceline.plan.explain.headline import headline_lines
from paceline.plan.planned import Planned
from paceline.session.confirm.micro_batch import confirm_micro_batch
from paceline.session.ready.brief_of_plan import make_brief
from paceline.session.ready.budget import check_budget
from paceline.session.ready.disk import disk_lines
from paceline.session.ready.prove import prove
from paceline.session.ready.same_task import check_same_task
from paceline.spec.journal.kinds import DecisionRecord
from paceline.supervise.standby import Standby
from paceline.supervise.told.brief import Brief

Say = Callable[[str], None]


def confirm_and_price(planned: Planned, say: Say) -> tuple[Planned, tuple[DecisionRecord, ...]]:
    """Confirm the plan's micro-batch where the spec asks for that, say plan and price, and return what was decided.

    Raises where the run's directory holds another task's run, or the price is beyond the run's budget.
    """
    check_same_task(planned.spec)
    planned, decisions = confirm_micro_batch(planned, say)
    for line in (*headline_lines(planned), *disk_lines(planned)):
        say(line)
    check_budget(planned, say)
    return planned, decisions


def proven_brief(
    planned: Planned, decisions: tuple[DecisionRecord, ...], say: Say, standby: Standby | None = None
) -> Brief:
    """Prove the plan and return the brief of its ranks. `decisions` are those that were made since planning.

    The proof's processes are forked from `standby`, where there is one.
    """
    proven = prove(planned, say, standby)
    return make_brief(planned, proven.record, (*decisions, *proven.decisions))
