"""NodesSpec: the `[run.nodes]` table of a spec. The nodes of a run, each with a supervisor of its own."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.config.declared import Declared
from paceline.config.fields import option
from paceline.errors import ConfigError

PORT = 29400  # torchrun's own, where none is given


@dataclass(frozen=True)
class NodesSpec(Declared, table="run.nodes"):
    """How many supervisors a run has, which of them this one is, and when one counts as lost."""

    count: int = option(
        1, "nodes of the run: on each the same command is started, with another `node`; run.dir is storage of all",
        minimum=1,
    )  # fmt: skip
    node: int = option(0, "the number of this node, from 0", minimum=0)
    rendezvous: str = option("", "HOST or HOST:PORT of node 0, as the other nodes reach it")
    devices: int = option(
        0, "devices of this node; 0 is its part of cluster.devices, or every GPU, or one CPU device", minimum=0
    )
    lost_after: float = option(
        5.0, "a node, or the coordinator, is lost that has told nothing for so long on an idle machine",
        quantity="duration", above=0.0,
    )  # fmt: skip
    wait: float = option(
        60.0, "how long nodes are waited for: at the start, and where fewer than run.recovery.min_devices are left",
        quantity="duration", minimum=0.0,
    )  # fmt: skip

    @property
    def address(self) -> tuple[str, int]:
        """The host and the port of node 0. Raises ConfigError where they cannot be read."""
        host, _, port = self.rendezvous.rpartition(":") if ":" in self.rendezvous else (self.rendezvous, "", str(PORT))
        if not host or not port.isdigit() or not 0 < int(port) < 2**16:
            raise ConfigError(
                f"run.nodes.rendezvous = '{self.rendezvous}' is no address",
                f"a run on {self.count} nodes meets at HOST:PORT of node 0",
                f"--rendezvous node0.example:{PORT}",
            )
        return host.strip("[]"), int(port)

    def check(self) -> None:
        """Raise ConfigError for a node that there is not, or one that could not find the others."""
        _ = self.address
        if self.node >= self.count:
            raise ConfigError(
                f"run.nodes.node = {self.node}", f"the nodes of the run are 0 to {self.count - 1}", "--node 0"
            )
