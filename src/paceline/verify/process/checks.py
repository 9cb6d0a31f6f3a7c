"""The checks of a proof: a check holds a plan against one device in one way, inside a world of ranks.

Every rank calls a check as (task, plan, world, source, items_per_sample, steps, kept) and gets the same record. `kept`
is a dictionary in which a check keeps what the next one of the same task can use again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

from paceline.spec.proof.records import CheckName, CheckProof
from paceline.verify.compare.copies import compare_copies
from paceline.verify.compare.layout import compare
from paceline.verify.compare.rates import rates
from paceline.verify.compare.whole_batch import whole_batch
from paceline.verify.low.low import low
from paceline.verify.story.story import story

Check = Callable[..., CheckProof]

CHECKS: Mapping[CheckName, Check] = {
    "steps": compare,  # updates of the layout, tensor by tensor, against the same updates of one device
    "low": low,  # in bf16 or fp16: formats, decisions, updates and an evaluation against one device of the same casts
    "low, brief": functools.partial(low, brief=True),  # the same with less measuring
    "plain attention": functools.partial(compare, plain=True),  # one layer at the real length, against no kernel
    "copies": compare_copies,  # copies that are not summed exactly, against one device that takes them in turn
    "story": story,  # a whole run: its loop, evaluations, checkpoint, and resumes on other layouts
    "story on copies": functools.partial(story, on_copies=True),  # where a layout with parts of weights is refused
    "rates": rates,  # the learning rates of a schedule of the user's own: the same on all ranks, and alone?
    "whole batch": whole_batch,  # the loss of one device: is it a sum over rows?
}
