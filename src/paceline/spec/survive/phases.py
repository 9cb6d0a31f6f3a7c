"""The phases of a run's process: where the process is at a moment. Heartbeats tell the phase, faults strike in it."""

from __future__ import annotations

# In the order in which a process comes through them; a number in a heartbeat is a place in this list.
PHASES = (
    "starting", "rendezvous", "load", "data", "loop", "forward", "backward", "reduce", "update", "check", "evaluate",
    "save", "ended", "meet",
)  # fmt: skip

TOLD = {
    "starting": "starting its process",
    "rendezvous": "meeting its peers",
    "load": "building the model and loading its state",
    "data": "reading a batch",
    "loop": "in the loop's own code, between two steps",
    "forward": "in the forward and backward passes",
    "backward": "in a backward pass",
    "reduce": "reducing gradients over the ranks",
    "update": "updating the weights",
    "check": "checking that ranks agree",
    "evaluate": "evaluating",
    "save": "saving a checkpoint",
    "ended": "after its last step",
    "meet": "waiting for its peers between two steps",
}

IN_A_STEP = ("data", "forward", "backward", "reduce", "update")  # what every step does, so that its time is known
AT_WORK = ("forward", "backward", "reduce", "update")  # and where a rank waits for nobody but its peers
MEETS = "meet"  # whoever is there waits for those that are elsewhere
ENDED = "ended"  # the run is over: what follows is the user's, of which nobody knows how long it takes
