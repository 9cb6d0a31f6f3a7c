"""The decisions that code looks for in a journal, by what was decided on. All others are there for people alone."""

from __future__ import annotations

MICRO_BATCH = "micro_batch"  # a later start begins with the one that the run has settled on
GLOBAL_BATCH = "global_batch"  # a batch that grows by what is measured grows again as it did
ROLLBACK = "rollback"  # from there on a step that was made is made with other samples
STRAGGLER = "straggler"  # a slow rank whose process was replaced once is not replaced again
CALLED_OFF = "stop by a callback"  # a run that was stopped at its last step has ended
PLAN = "plan"  # which plan a start trains under, from what its spec asks for
