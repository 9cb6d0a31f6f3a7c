"""The coordinator of a run on several nodes: `python -m paceline.session.nodes.coordinate SPEC HOST PORT NODE`.

A node's supervisor starts it. It holds the lock of the run's directory, plans, proves, forms one world of the nodes'
ranks after the other, and reports. Where it ends by a signal another one takes its place.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Collection
from pathlib import Path

from paceline.errors import PacelineError, Requeue, RunInUse, StorageError, WorkerDied
from paceline.lock import RunLock, take
from paceline.patience import Patience
from paceline.plan.planned import Planned, plan_task
from paceline.run.process.handover import take_over
from paceline.said import say_line
from paceline.session.closing import close_run
from paceline.session.nodes.while_waiting import looked_for
from paceline.session.ready.brief import confirm_and_price, proven_brief
from paceline.session.replanner import Replanner
from paceline.session.watch.alerting import alerts_beside
from paceline.session.watch.exporting import exports_beside
from paceline.session.watch.hours import refuse_outside
from paceline.spec.arguments import run_directory
from paceline.spec.journal.redact import Redactor
from paceline.spec.load import Spec
from paceline.spec.survive.recovery import RecoverySpec
from paceline.supervise.again.fallen import TakenOver
from paceline.supervise.again.generations import Generations
from paceline.supervise.again.judge import Judge, Reached, reached_by
from paceline.supervise.again.spent_by_worlds import SpentSoFar
from paceline.supervise.blame import Outcome
from paceline.supervise.logs.aside import printed_aside, printer_here
from paceline.supervise.nodes.fleet import Fleet
from paceline.supervise.nodes.meeting import (
    NOT_ELECTED,
    STEPPED_DOWN,
    Meeting,
    announce,
    find_meeting,
    leave,
)
from paceline.supervise.nodes.member import of_runs
from paceline.supervise.parent import end_with_parent, name_process
from paceline.supervise.supervisor import explain
from paceline.supervise.told.generation import JudgedSoFar
from paceline.system.descriptors import make_room
from paceline.units import plural

Say = Callable[[str], None]
LOOK_SECONDS = 0.05
BACKLOG = 128
PRINTED_SECONDS = 1.0  # for who reads what is printed, where this process ends at once
BACK_SECONDS = 2.0  # that the nodes of a world have to come to the coordinator that takes over; later ones join a world
# That the node of the lost coordinator has once all others are there: where it lives, it heard of the loss with them.
LAST_SECONDS = 0.5


@printed_aside()
def main() -> int:
    """Coordinate the run that the command line names, and return its exit code."""
    end_with_parent(number=signal.SIGKILL)
    name_process("paceline-coord")
    path, host, port, node, per_machine, *typed = sys.argv[1:]
    sys.argv = typed or [""]  # the run's command is what was typed on this node; nobody's own is ever empty
    return coordinate(take_over(Path(path)), host, int(port), int(node), int(per_machine))


def coordinate(spec: Spec, host: str, port: int, node: int, per_machine: int = 0, say: Say = say_line) -> int:
    """Coordinate a run at an address of this node; return the run's exit code, or `NOT_ELECTED`.

    `per_machine` nodes share a machine each; 0 where each is one.
    """
    run_dir = run_directory(spec)
    lock = _elected(run_dir, spec.run.nodes.lost_after)
    if lock is None:
        return NOT_ELECTED
    gone = find_meeting(run_dir)  # where the coordinator before was
    with lock, _server(host, port) as server:
        server.setblocking(False)
        make_room(spec.run.nodes.count)
        meeting = announce(run_dir, host, server.getsockname()[1], node)
        say(f"nodes    node {node} coordinates at {host}:{meeting.port}")
        fleet = Fleet(spec.run.nodes, server, meeting.secret, lock, say)
        fleet.node = node
        fleet.steps_down = lambda: _step_down(lock, say)
        fleet.hands_over = functools.partial(_hand_over, lock, meeting, say)
        outcome = Outcome(1)  # of whatever ends this process here
        try:
            outcome = _outcome(spec, fleet, lock, say, per_machine, gone)
            close_run(outcome, lock, Redactor(spec.run.redact), say)
            explain(outcome)
        finally:
            fleet.end(outcome)
    return outcome.exit_code


def _elected(run_dir: Path, seconds: float) -> RunLock | None:
    """Return the lock of the run's directory, None where somebody else keeps it."""
    patience = Patience(seconds)
    while True:
        try:
            return take(run_dir)
        except RunInUse:
            if patience.is_over:
                return None
        time.sleep(LOOK_SECONDS)  # for the coordinator before to be gone


def _outcome(spec: Spec, fleet: Fleet, lock: RunLock, say: Say, per_machine: int, gone: Meeting | None) -> Outcome:
    try:
        refuse_outside(spec.run.when)
        return _run(spec, fleet, lock, say, per_machine, gone)
    except Requeue as stop:
        say(f"stop     {stop.because}")
        return Outcome(stop.exit_code)
    except PacelineError as error:
        return Outcome(error.exit_code, error.as_dict())


def _run(spec: Spec, fleet: Fleet, lock: RunLock, say: Say, per_machine: int, gone: Meeting | None) -> Outcome:
    """Plan for the nodes that come, prove, and train."""
    _gather(spec, fleet, gone)
    if not fleet.members:
        raise PacelineError("no node has joined", f"none came in {spec.run.nodes.wait:g} s", "start the nodes again")
    taken, most = _taken_over(fleet, gone), fleet.per_node * spec.run.nodes.count
    per_node = fleet.devices_of_machine(per_machine)
    if taken is not None:
        lock.continue_from(taken.number)
    judged = _counted(fleet, spec.run.recovery, reached_by(lock.run_dir), taken)
    taken = dataclasses.replace(taken, judged=judged) if taken is not None else None
    planned = _planned(spec, fleet, taken, per_node, say)
    planned, decisions = confirm_and_price(planned, say)
    brief = proven_brief(planned, decisions, say)
    policy = dataclasses.replace(spec.run.recovery, max_devices=spec.run.recovery.max_devices or most)
    with (
        exports_beside(spec, say),
        alerts_beside(spec, say, supervises=True, goes_on=taken is not None) as alerts,
        contextlib.closing(Replanner(spec, say, per_node)) as replanner,
    ):
        generations = Generations(
            fleet, brief, lock, policy, say, Redactor(spec.run.redact), replanner, spec.run.health, alerts.tell,
            spec.run, functools.partial(looked_for, spec.run, lock.run_dir),
        )  # fmt: skip
        alerts.outcome = generations.run(taken)
    return alerts.outcome


def _taken_over(fleet: Fleet, gone: Meeting | None) -> TakenOver | None:
    """Return the world that another coordinator has left, None where there was none; `gone` is where that was.

    It is not lost where its node has left at a notice, and no rank is missing that has not left with it.
    """
    taken = fleet.take_over()
    if taken is None or gone is None or gone.left_world != taken.number:
        return taken
    has_left = taken.processes.keys() - taken.standing.keys() <= set(gone.left_ranks)
    return dataclasses.replace(taken, left=gone.left) if has_left else taken


def _counted(fleet: Fleet, policy: RecoverySpec, reached: Reached, taken: TakenOver | None) -> JudgedSoFar:
    """Return what is counted of failures, with the coordinator before, if one was lost; the nodes know from now on.

    Raises WorkerDied where coordinators are lost one after the other: each node in turn would take over, for ever,
    also where none has formed a world yet, as when the first plan has no memory.
    """
    before = fleet.judged_before()
    judge = Judge(policy, reached, before)
    judge.note_steps(reached)
    is_lost = before is not None and not (taken is not None and taken.left)
    if is_lost and not (ruling := judge.came_further(reached)).goes_on:
        raise WorkerDied(
            "the coordinator was lost, as those before it were",
            ruling.because,
            "look at what the nodes printed, and at their memory; started again, it resumes from the last checkpoint",
        )
    fleet.note_judged(judge.so_far)
    return judge.so_far


def _planned(spec: Spec, fleet: Fleet, taken: TakenOver | None, per_node: int, say: Say) -> Planned:
    """Return the plan for the nodes that are there."""
    devices = fleet.devices() or 0
    if len(fleet.members) == spec.run.nodes.count:
        here = math.gcd(devices, per_node)  # machines that differ, as by tasks of Slurm's, count as smaller ones
        if here < per_node and not spec.cluster.groups:
            say(f"nodes    planned as machines of {plural(here, 'device')}: {devices} are no whole ones of {per_node}")
        cluster = dataclasses.replace(spec.cluster, devices=devices, devices_per_node=here)
        return plan_task(spec if spec.cluster.groups else dataclasses.replace(spec, cluster=cluster), say=say)
    say(f"nodes    {len(fleet.members)} of {spec.run.nodes.count} nodes are there: {plural(devices, 'device')}")
    if devices < spec.run.recovery.min_devices:
        raise PacelineError(
            f"{plural(devices, 'device')} here, and run.recovery.min_devices is {spec.run.recovery.min_devices}",
            f"{plural(spec.run.nodes.count - len(fleet.members), 'node')} did not come in {spec.run.nodes.wait:g} s",
            "start the other nodes, or a longer run.nodes.wait",
        )
    precision = taken.plan.precision if taken is not None else spec.plan.precision
    return Replanner(spec, say, per_node).planned(devices, precision)[0]


def _gather(spec: Spec, fleet: Fleet, gone: Meeting | None) -> None:
    """Return when the nodes are there: all at a start, and those of the world before where it is taken over.

    `gone` is where the coordinator of that world was, whose node may come last, or has left at a notice.
    """
    nodes, waited = spec.run.nodes, SpentSoFar()
    fleet.gather(lambda: 1, nodes.wait)
    before = {number for member in fleet.members.values() for number in of_runs(member.was.get("members", ()))}
    if not before:
        with looked_for(spec.run, run_directory(spec)) as notice:

            def is_over() -> str:
                return waited.limit_reached(spec.run) or notice()

            fleet.gather(lambda: nodes.count, nodes.wait, is_over)
            if len(fleet.members) < nodes.count and (because := is_over()):
                raise Requeue(f"{because} while waiting for {plural(nodes.count - len(fleet.members), 'node')}")
        return
    others = {number for number in before if gone is None or number != gone.node}
    if _have_come(fleet, others, min(nodes.lost_after, BACK_SECONDS)) and not (gone is not None and gone.left):
        _have_come(fleet, before, min(nodes.lost_after, LAST_SECONDS))


def _have_come(fleet: Fleet, nodes: Collection[int], seconds: float) -> bool:
    """Return whether these nodes are there, having waited for so many seconds at most."""

    def missing() -> bool:
        return any(number not in fleet.members for number in nodes)

    fleet.gather(lambda: len(fleet.members) + missing(), seconds)
    return not missing()


def _server(host: str, port: int) -> socket.socket:
    """Return a socket that nodes connect to: at the port that was asked for, or at another where that is taken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for wanted in (port, 0):
        try:
            return socket.create_server((host, wanted), family=family, backlog=BACKLOG)
        except OSError as error:
            last = error
    raise StorageError(f"cannot listen at {host}", str(last), "--rendezvous with an address of node 0 itself")


def _hand_over(lock: RunLock, meeting: Meeting, say: Say, world: int, ranks: Collection[int], because: str) -> None:
    """End this process at once: its machine is about to end, and a node that stays may take the lock."""
    with contextlib.suppress(StorageError):  # it is lost then, as the next coordinator finds, with its ranks
        if not lock.is_lost:  # else another one is announced there by now, whom the nodes would find no more
            leave(lock.run_dir, meeting, world, ranks, because)
    _end_here(lock, "nodes    this coordinator goes with its node: another takes its place", say)


def _step_down(lock: RunLock, say: Say) -> None:
    """End this process at once: the greater part of the nodes is elsewhere, and may take the lock."""
    told = "nodes    the greater part of the nodes is lost: this coordinator steps down, so that they may go on"
    _end_here(lock, told, say)


def _end_here(lock: RunLock, told: str, say: Say) -> None:
    say(told)
    lock.release()
    if (printer := printer_here()) is not None:  # whose thread ends with this process
        printer.close(PRINTED_SECONDS)
    sys.stdout.flush()
    os._exit(STEPPED_DOWN)


if __name__ == "__main__":
    sys.exit(main())
