"""A run on several nodes, as one node sees it: this node's supervisor, and the coordinator where that runs here.

Each node's supervisor holds a link to the one coordinator. Whoever gets the lock of the run's directory is the
coordinator: node 0 tries first; where the coordinator is lost, the nodes try one after the other.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from paceline.cluster.machine import torch_without_cuda, visible_gpus
from paceline.errors import ConfigError, PacelineError, Requeue
from paceline.lock import holder_here
from paceline.patience import Patience
from paceline.run.process.handover import hand_over
from paceline.said import say_line
from paceline.scratch import Scratch
from paceline.session.nodes.loss import LossTeller
from paceline.session.survive import WORKER, starter_of
from paceline.spec.arguments import run_directory
from paceline.spec.load import Spec
from paceline.supervise.again.generations import SPARE
from paceline.supervise.groups import collect
from paceline.supervise.logs.aside import printed_aside
from paceline.supervise.nodes.agent import Agent
from paceline.supervise.nodes.link import NodeLink, NoPeer, knock
from paceline.supervise.nodes.meeting import NOT_ELECTED, STEPPED_DOWN, Meeting, find_meeting
from paceline.supervise.parent import end_with_launcher, end_with_step, name_process
from paceline.supervise.signals import forward_signals
from paceline.supervise.told.typed import typed_command
from paceline.system.end_of_parent import PARENT_VARIABLE
from paceline.units import plural

Say = Callable[[str], None]
COORDINATOR = "paceline.session.nodes.coordinate"
LOOK_SECONDS = 0.02
BACK_SECONDS = 5.0


@dataclass(frozen=True)
class Seat:
    """What a launcher has said of this node where it is a part of a machine: its ranks' environment, and how many such
    parts a machine has. Nothing and 0 for a machine of its own."""

    environ: Mapping[str, str] = field(default_factory=dict)
    per_machine: int = 0


@dataclass(frozen=True)
class Attended:
    """How a run has ended for a node: with which exit code, by which error where no rank has said it, and by which
    error at all, as its coordinator tells."""

    exit_code: int
    error: Mapping[str, object] | None = None
    told: Mapping[str, object] | None = None


@printed_aside()
def attend_run(spec: Spec, say: Say = say_line, seat: Seat | None = None, script: Sequence[str] = ()) -> Attended:
    """Supervise this node's ranks of a run on several nodes to its end.

    Each rank is `python SCRIPT`, or trains the spec where there is no script. Raises a PacelineError where the spec
    cannot be handed to other processes, or the run is not found.
    """
    nodes = spec.run.nodes
    nodes.check()
    devices = devices_here(spec)
    (end_with_launcher if seat is not None else end_with_step)(os.environ)
    seat = seat or Seat()
    name_process(f"paceline-node-{nodes.node}")
    with Scratch("node") as name:
        folder = Path(name)
        path = hand_over(spec, folder)
        words = list(script) or ["-m", WORKER, str(path)]
        start = starter_of(words, dict(os.environ), spec, say)
        spare = run_directory(spec) / SPARE / f"node-{nodes.node}"
        agent = Agent(folder, start, nodes.node, devices, os.environ, seat.environ, spare)
        flag = forward_signals(agent.send)
        attendance = Attendance(spec, agent, path, say, seat.per_machine, script)
        try:
            return Attended(attendance.run(), agent.error, agent.told)
        finally:
            agent.close()
            attendance.close()
            flag.release()


def devices_here(spec: Spec) -> int:
    """Return how many devices this node has for the run.

    Raises ConfigError where the devices of the cluster cannot be shared out evenly among its nodes.
    """
    nodes, devices = spec.run.nodes, spec.cluster.devices
    if nodes.devices:
        return nodes.devices
    if devices % nodes.count:
        raise ConfigError(
            f"cluster.devices = {devices} on {plural(nodes.count, 'node')}",
            "each node has its part of them, and nodes are alike",
            f"cluster.devices = {nodes.count * max(1, devices // nodes.count)}, or leave it unset",
        )
    if devices:
        return devices // nodes.count
    gpus = [] if spec.cluster.device not in ("auto", "cuda") or torch_without_cuda() else visible_gpus()
    return max(1, len(gpus))


class Attendance:
    """This node's part in the run: with one coordinator after the other, of which some may run here."""

    def __init__(
        self, spec: Spec, agent: Agent, path: Path, say: Say, per_machine: int = 0, script: Sequence[str] = ()
    ) -> None:
        """`path` is where the spec is handed over; `per_machine` nodes are on each machine, 0 where all are alone."""
        self._per_machine, self._script = per_machine, script
        self._spec, self._nodes, self._agent, self._path, self._say = spec, spec.run.nodes, agent, path, say
        self._run_dir = run_directory(spec)
        self._coordinator: subprocess.Popen[bytes] | None = None
        self._link: NodeLink | None = None
        self._met: Meeting | None = None  # where the coordinator of that link is
        self._loss = LossTeller(spec, lambda: bool(agent.stopped), say)
        self._host = ""  # this node's address, once another has been connected to

    def run(self) -> int:
        """Return the exit code of the run, when it has ended."""
        self._agent.hello()  # waits until the standby is ready
        while True:
            found = self._join()
            if isinstance(found, int):
                return found
            self._link, self._host = found, found.address
            code = self._agent.serve(found)
            found.close()
            if code is not None:
                return self._ended(code)
            self._say(f"nodes    node {self._nodes.node} has lost the coordinator: {found.because}")
            if not self._agent.stopped:
                self._loss.begin(self._met, found.because)
            self._end_silent(found)
            self._agent.halt()

    def close(self) -> None:
        """End the coordinator where it runs here."""
        if self._coordinator is not None:
            collect([self._coordinator])
            self._coordinator = None

    def _ended(self, code: int) -> int:
        """Return the exit code, after the coordinator here has written its report."""
        if self._coordinator is not None:
            self._coordinator.wait()
        return code

    # ---- who coordinates -------------------------------------------------------------------------------------------

    def _end_silent(self, link: NodeLink) -> None:
        """End the coordinator where it runs here and says nothing, as one that was stopped: it would keep the lock.

        No other node can end it, and none could take its place. One that has closed the link lives, and is left alone.
        """
        process = self._coordinator
        if link.is_silent and process is not None and self._met is not None and self._met.process == process.pid:
            self._say(f"nodes    the coordinator here, process {process.pid}, is ended: another takes its place")
            self.close()

    def _join(self) -> NodeLink | int:
        """Return a link to the coordinator, which may have to be started here first, or the run's exit code."""
        nodes, had_one = self._nodes, self._link is not None
        # Where a coordinator was lost nodes try one after the other, as `_delay` says; at a start node 0 alone does.
        patience = Patience(nodes.wait + 2 * nodes.lost_after * (nodes.count if had_one else 1))
        turn = time.monotonic() + self._delay()
        others = _OthersRun(self._run_dir, 2 * nodes.lost_after)
        while True:
            over = self._looked_after()
            if over is not None and over >= 0 and over not in (NOT_ELECTED, STEPPED_DOWN):
                return over  # it has said why
            if over is not None:
                turn = time.monotonic() + (0.0 if over < 0 else self._back_after(over))
            link = self._connected()
            if link is not None:
                return link
            if not had_one and self._coordinator is None:
                others.look()
            may = nodes.node == 0 or had_one
            if self._coordinator is None and may and time.monotonic() >= turn and not self._agent.stopped:
                self._coordinator = self._start()
            if self._agent.stopped and self._coordinator is None:
                return Requeue.exit_code
            if patience.is_over:
                raise PacelineError(
                    f"node {nodes.node} finds no coordinator of the run",
                    f"{self._run_dir / 'nodes.json'} names none that answers, after {nodes.wait:g} s",
                    "start node 0; run.dir must be storage that all nodes share, and node 0 be reached from here",
                )
            time.sleep(LOOK_SECONDS)  # until somebody is there

    def _back_after(self, code: int) -> float:
        """Return after how many seconds this node tries again: the greater part of the nodes goes before it."""
        lost = self._nodes.lost_after
        return BACK_SECONDS + 4 * lost if code == STEPPED_DOWN else min(lost, 1.0)

    def _delay(self) -> float:
        """Return after how many seconds this node is to try: the others' turn comes first, node by node."""
        if self._coordinator is not None or self._link is None:
            return 0.0
        meeting = find_meeting(self._run_dir)
        gone = meeting.node if meeting else 0
        return self._nodes.lost_after * ((self._nodes.node - gone - 1) % self._nodes.count) / 2

    def _looked_after(self) -> int | None:
        """Return how the coordinator here has ended, None where it runs or there was none."""
        code = self._coordinator.poll() if self._coordinator is not None else None
        if self._coordinator is not None and code is not None:
            collect([self._coordinator])
            self._coordinator = None
        return code

    def _connected(self) -> NodeLink | None:
        meeting = find_meeting(self._run_dir)
        if meeting is None:
            return None
        try:
            seconds = self._nodes.lost_after / 2
            lines = knock(meeting.address, meeting.secret, self._agent.hello(), seconds)
        except NoPeer:
            return None
        if self._coordinator is not None and meeting.node != self._nodes.node:
            collect([self._coordinator])  # it has come too late
            self._coordinator = None
        self._met = meeting
        return NodeLink(lines, self._nodes.lost_after)

    def _start(self) -> subprocess.Popen[bytes]:
        """Start the coordinator here."""
        host, port = self._nodes.address
        words: Sequence[str] = (
            sys.executable, "-m", COORDINATOR, str(self._path), self._host if self._link else host, str(port),
            str(self._nodes.node), str(self._per_machine), *typed_command(),
        )  # fmt: skip
        environ = {**os.environ, PARENT_VARIABLE: str(os.getpid())}
        if self._script:  # whose task may come from modules beside it
            environ["PYTHONPATH"] = os.pathsep.join(each for each in (sys.path[0], environ.get("PYTHONPATH")) if each)
        return subprocess.Popen(words, env=environ, process_group=0)


class _OthersRun:
    """Finds out that another run has the directory: a coordinator announces itself as soon as it has it."""

    def __init__(self, run_dir: Path, seconds: float) -> None:
        self._run_dir, self._seconds = run_dir, seconds
        self._token = ""
        self._patience = Patience(seconds)

    def look(self) -> None:
        """Raise RunInUse where one process has had the directory for so long, and nobody could be connected to."""
        found = holder_here(self._run_dir)
        token = found[0] if found else ""
        if token != self._token:
            self._token, self._patience = token, Patience(self._seconds)
        if found and self._patience.is_over:
            raise found[1]
