"""A node's supervisor: it starts and ends ranks as the coordinator says, and tells the coordinator how the ranks do.

Ranks stay when the coordinator is lost: they come to a halt between two steps, stand by with what they hold, and go on
in the world that the next coordinator forms. They end with this process, however it ends.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.patience import Patience
from paceline.spec.journal.timing.clock import passed_seconds
from paceline.supervise import supervisor
from paceline.supervise.again.generations import make_room
from paceline.supervise.again.held_state import HeldState
from paceline.supervise.blame import errors_told
from paceline.supervise.control import ABORT_NAME, CALL_NAME, CONTROL_VARIABLE, Control
from paceline.supervise.groups import Process, collect, ending_of, kill_group, signal_group, signal_process
from paceline.supervise.nodes.held_in_memory import PiecesFolder
from paceline.supervise.nodes.interface import interface_of
from paceline.supervise.nodes.link import NodeLink
from paceline.supervise.nodes.lookout import Lookout
from paceline.supervise.parent import NODE_VARIABLE
from paceline.supervise.pulses.sight import NearSight
from paceline.supervise.pulses.silences import HangLimits
from paceline.supervise.starting import Starter
from paceline.supervise.told.brief import BRIEF_FILE, brief_from_json
from paceline.supervise.told.generation import GENERATION_FILE, Generation, read_generation
from paceline.system.end_of_parent import PARENT_VARIABLE

HERE = "@folder@"  # stands for the folder of whoever reads a message
LOOK_SECONDS = 0.02
ERRORS_SECONDS = 0.2  # between two looks for what ranks have told
CALL_SECONDS = 2.0  # that ranks have to come to the next step boundary, when the coordinator is lost
INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


class Agent:
    """The ranks of a run on this node."""

    def __init__(
        self,
        folder: Path,
        starter: Starter,
        node: int,
        devices: int,
        environ: Mapping[str, str],
        seat: Mapping[str, str] | None = None,
        spare: Path | None = None,
    ) -> None:
        """`seat` is what the environment of ranks says whose node is a part of a machine, whatever the coordinator.

        `spare` takes the folder of a world where `folder`, which is among temporary files, has no room for it.
        """
        self._seat, self._spare = seat or {}, spare
        self._base = folder  # where the folder of this world is
        self.error: Mapping[str, object] | None = None  # by which the run has ended, where no rank was ever here
        self.told: Mapping[str, object] | None = None  # and wherever the ranks were
        self.folder, self.node, self.devices = folder, node, devices
        self._starter, self._environ, self._control = starter, environ, Control(folder)
        self._pieces = PiecesFolder(node)
        self._processes: dict[int, Process] = {}  # by the coordinator's number
        self._told: set[int] = set()  # those of which the end is told
        self._ranks: dict[int, int] = {}  # of this world: rank -> number of its process
        self._before: dict[int, int] = {}  # of the world before
        self._generation, self._members = 0, list[list[int]]()
        self._judged: Mapping[str, Any] = {}  # by a coordinator that has formed no world yet
        self._environ_told: dict[str, str] = {}  # of the rank that was started last
        self._entered = 0.0  # when this world began here, in `passed_seconds`
        self._errors: set[int] = set()
        self._words: set[str] = set()  # for the ranks of this world, that are not left yet
        self._stood: dict[int, HeldState] = {}
        self._lookout: Lookout | None = None  # where hangs are looked for
        self._read, self._since = 0.0, 0.0
        self.stopped = ""

    # ---- with a coordinator ----------------------------------------------------------------------------------------

    def hello(self) -> dict[str, object]:
        """Return what a coordinator is told of this node: what it has, and what is left of the world before."""
        older = [number for number in self._processes if number not in self._ranks.values()]
        collect([self._processes.pop(number) for number in older])
        standing = {rank: each.held for rank, each in self._control.look(self._generation).items()}
        ended = {number: ending_of(process) for number, process in self._processes.items()}
        brief = self._world_folder / BRIEF_FILE
        lost_for = passed_seconds() - self._since if self._since else 0.0  # not a moment: machines count apart
        return {
            "node": self.node, "devices": self.devices, "rung": self._starter.rung(), "generation": self._generation,
            "ranks": [[rank, number, ended[number]] for rank, number in self._ranks.items() if number in ended],
            "standing": [[rank, held.as_dict()] for rank, held in standing.items()], "members": self._members,
            "lost_for": lost_for, "brief": brief.read_text() if self._generation else "", "spent": self._spent(),
            "judged": self._judged or (dataclasses.asdict(self._begun().judged) if self._generation else {}),
        }  # fmt: skip

    def _spent(self) -> tuple[float, float]:
        """Return the seconds and the money that the run has taken, as the world that is left had it when it began."""
        if not self._generation:
            return 0.0, 0.0
        seconds, told = passed_seconds() - self._entered, self._begun()
        usd_per_second = brief_from_json((self._world_folder / BRIEF_FILE).read_text()).usd_per_second
        return told.begun_after + seconds, told.usd_before + seconds * usd_per_second

    def _begun(self) -> Generation:
        """Return what the world that is left was told when it began."""
        return read_generation(self._world_folder / GENERATION_FILE)

    def serve(self, link: NodeLink) -> int | None:
        """Do what the coordinator says, until it says how the run ends, and return that; None where it is lost."""
        self._stood, self._errors = {}, set()
        stopped = ""
        while True:
            for message in link.taken(LOOK_SECONDS):
                if "end" in message:
                    self.told = message.get("error")
                    self.error = self.told if not self._generation else None
                    return int(message["end"])
                self._do(message, link)
            if link.is_lost:  # after a look at what has come: this process may have been busy
                break
            if self.stopped != stopped:
                stopped = self.stopped
                link.send({"stopped": stopped})
            self._tell(link)
        self._since = passed_seconds()
        return None

    def send(self, number: int) -> None:
        """Pass a stop signal on to every rank."""
        self.stopped = f"received {signal.Signals(number).name} on node {self.node}"
        for process in self._processes.values():
            signal_process(process, number)

    def halt(self) -> None:
        """Have the ranks stand by without a coordinator; those that cannot are ended."""
        patience, grace = Patience(CALL_SECONDS), Patience(CALL_SECONDS + supervisor.GRACE_SECONDS)
        if self._generation:
            self._words.add(f"{self._world_folder.name}/{CALL_NAME}")
        while True:
            self._leave_words()
            running = {
                rank
                for rank, number in self._ranks.items()
                if number in self._processes and ending_of(self._processes[number]) is None
            }
            if running <= set(self._control.look(self._generation)):
                return
            if patience.is_over or len(running) < len(self._ranks):
                self._words.add(f"{self._world_folder.name}/{ABORT_NAME}")
            if grace.is_over:
                for rank in running - set(self._control.look(self._generation)):
                    kill_group(self._processes[self._ranks[rank]])
            time.sleep(LOOK_SECONDS)  # a wait for several processes at once, not a synchronisation

    def close(self) -> None:
        """End all that runs here for the run."""
        self._control.dismiss()
        collect(list(self._processes.values()))
        self._control.close()
        self._starter.close()
        self._pieces.close()

    # ---- what it is told -------------------------------------------------------------------------------------------

    @property
    def _world_folder(self) -> Path:
        return self._base / f"generation-{self._generation}"

    def _do(self, message: Mapping[str, Any], link: NodeLink) -> None:
        if "world" in message:
            self._enter(message)
        elif "start" in message:
            self._environ_told = {**(self._environ_told if message["changed"] else {}), **message["environ"]}
            place = self._placed(self._environ_told, link)
            self._told.discard(message["start"])  # of a process before: each coordinator counts by itself
            self._processes[message["start"]] = self._starter(place)
            if self.stopped:  # before this one could be told
                signal_process(self._processes[message["start"]], signal.SIGTERM)
            self._ranks[int(place["RANK"])] = message["start"]
        elif "answers" in message:
            self._answer(message["answers"], link)
        elif "signal" in message:
            self._signal(message)
        elif "collect" in message:
            process = self._processes.pop(message["collect"], None)
            if process is not None:
                collect([process])
            link.send({"collected": message["collect"], "code": process.wait() if process else -signal.SIGKILL})
        elif "word" in message:
            self._words.add(message["word"])
        elif "ask" in message and self._lookout is not None:
            self._lookout.ask(message["ask"], message["by_signal"])
        elif "scrutiny" in message and self._lookout is not None:
            self._lookout.attend(message["scrutiny"], message["load"])
        elif "judged" in message:
            self._judged = message["judged"]
        elif "pieces" in message:
            link.send({"pieces": self._pieces.listed()})
        elif "port" in message:
            link.send({"port": free_port(link.address)})

    def _enter(self, message: Mapping[str, Any]) -> None:
        """Make room for the next world."""
        self._before, self._ranks = self._ranks, {}
        self._generation, self._members, self._entered = message["world"], message["members"], passed_seconds()
        self._base = self._with_room(f"generation-{self._generation}")
        for name, text in message["files"].items():
            (self._world_folder / name).write_text(text.replace(HERE, str(self._base)))
        self._errors, self._stood, self._lookout, self._judged, self._words = set(), {}, None, {}, set()
        if message["limits"] is not None:
            limits = HangLimits(**message["limits"])
            ranks = self._ranks.keys()
            self._lookout = Lookout(NearSight(self._world_folder, ranks, limits, self._process_of), ranks)

    def _with_room(self, name: str) -> Path:
        """Return where the folder of a world is, which has this name. Raises OSError where there is room nowhere."""
        try:
            make_room(self.folder / name)
            return self.folder
        except OSError:
            if self._spare is None:
                raise
            make_room(self._spare / name)
            return self._spare

    def _process_of(self, rank: int) -> int | None:
        """Return the number of a rank's process on this machine, None where it is none of this node's."""
        process = self._processes.get(self._ranks.get(rank, 0))
        return process.pid if process is not None else None

    def _answer(self, answers: Mapping[str, Mapping[str, Any]], link: NodeLink) -> None:
        told: dict[int, dict[str, object]] = {}
        for old, answer in answers.items():
            place = self._placed(answer["place"], link)
            told[int(old)] = {**answer, "place": place}
            self._ranks[int(place["RANK"])] = self._before[int(old)]
        self._control.dismiss(told)

    def _placed(self, environ: Mapping[str, str], link: NodeLink) -> dict[str, str]:
        """Return what a rank's environment has besides, on this node."""
        interface = interface_of(link.address)
        found = {name: interface for name in INTERFACES if interface and name not in self._environ}
        found |= {PARENT_VARIABLE: str(os.getpid()), NODE_VARIABLE: str(self.node)}
        found |= self._pieces.environ()
        told = {name: value.replace(HERE, str(self._base)) for name, value in environ.items()}
        if CONTROL_VARIABLE in told:  # the channel is where this supervisor began
            told |= self._control.environ()
        return {**found, **told, **self._seat}

    def _signal(self, message: Mapping[str, Any]) -> None:
        process = self._processes.get(message["signal"])
        if process is None:
            return
        if not message["group"]:
            signal_process(process, message["number"])
        elif message["number"] == signal.SIGKILL:
            kill_group(process)
        else:
            signal_group(process, message["number"])

    # ---- what it tells ---------------------------------------------------------------------------------------------

    def _leave_words(self) -> None:
        """Leave what ranks are to find. A disk may have no room for a name: then it is tried again."""
        with contextlib.suppress(OSError):
            for word in sorted(self._words):
                (self._base / word).touch()
                self._words.discard(word)

    def _tell(self, link: NodeLink) -> None:
        self._leave_words()
        codes = {number: ending_of(process) for number, process in self._processes.items() if number not in self._told}
        ended = {number: code for number, code in codes.items() if code is not None}
        now = time.monotonic()
        gone = [rank for rank, number in self._ranks.items() if number in ended or number in self._told]
        if self._generation and (now - self._read > ERRORS_SECONDS or ended):
            self._read = now
            for error in errors_told(self._world_folder, gone):
                if error.rank not in self._errors:
                    self._errors.add(error.rank)
                    age = passed_seconds() - error.time  # not a moment: machines count apart
                    link.send({"error": {**error.words, "time": age}})
        for number, code in ended.items():
            self._told.add(number)
            link.send({"ended": number, "code": code})
        standing = {rank: each.held for rank, each in self._control.look(self._generation).items()}
        if standing != self._stood:
            self._stood = standing
            told = [[rank, held.as_dict()] for rank, held in standing.items()]
            link.send({"standing": told, "generation": self._generation})
        for message in self._lookout.news(gone, now) if self._lookout is not None else ():
            link.send({**message, "generation": self._generation})


def free_port(address: str) -> int:
    """Return a port of this machine that nobody listens at."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with contextlib.closing(socket.socket(family)) as probe:
        probe.bind((address, 0))
        return int(probe.getsockname()[1])
