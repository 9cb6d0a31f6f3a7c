"""RecoverySpec: the `[run.recovery]` table of a spec. What is tried when processes of a run are lost, and how often."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.config.declared import Declared
from paceline.config.fields import option
from paceline.config.values import literal
from paceline.errors import ConfigError

# Clouds whose metadata service tells of a machine's end, by the name that an option may have in place of a URL.
NOTICE_SERVICES = {
    "aws": "http://169.254.169.254/latest/meta-data/spot/instance-action",
    "gcp": "http://metadata.google.internal/computeMetadata/v1/instance/preempted",
    "azure": "http://169.254.169.254/metadata/scheduledevents?api-version=2020-07-01",
}

LEAVE = "leave"  # of `on_notice`


@dataclass(frozen=True)
class RecoverySpec(Declared, table="run.recovery"):
    """How often a run goes on by itself after a fault, in which processes, and on how many devices."""

    retries: int = option(
        3, "how often one call goes on after a failure of the program; 0 ends it at the first", minimum=0
    )
    preemption_retries: int = option(
        100,
        "how often one call goes on after a rank was killed or stopped from outside; 0 ends it at the first",
        minimum=0,
    )
    supervise: bool = option(
        True,
        "let a process that torchrun or srun started supervise its rank, as a process of its own, so that a fault is "
        "survived; where off, it is the rank, and a fault ends the run",
    )
    standby: bool = option(
        True, "keep a process that has imported torch, from which ranks are forked; where off, each imports it anew"
    )
    reform: bool = option(
        True, "let the ranks that are left form the next world in their own processes, instead of ending them"
    )
    devices_file: str = option(
        "", "a file that holds the number of devices that are there; without one it stays as it was at the start"
    )
    min_devices: int = option(
        1,
        "fewest devices that the run goes on with when some are lost; with fewer it ends with exit code 75",
        minimum=1,
    )
    max_devices: int = option(
        0, "most devices that the run uses when more are there; 0 is as many as it began with", minimum=0
    )
    worth: float | None = option(
        10.0,
        "forecast saving from which more devices are worth the change to them; none takes whatever device is there",
        quantity="duration",
        minimum=0.0,
    )
    prepare: bool = option(
        True,
        "plan, and prove, ahead for the world that the loss of a device or a node would leave, beside training; where "
        "off, that is done when it is lost",
    )
    notice: float | None = option(
        None,
        "from a notice to the end of the machine: where the last save took longer, the newest checkpoint counts",
        quantity="duration",
        above=0.0,
    )
    notice_file: str = option("", "a file whose appearance is a preemption notice; looked for on each node")
    notice_url: str = option(
        "",
        "aws, gcp or azure, whose metadata service announces preemptions, or a URL that answers with status 200 and a"
        " text, not NONE or FALSE, as a preemption notice; asked on each node",
    )
    on_notice: str = option(
        LEAVE,
        "what the notice of one of several nodes does: after a checkpoint that node leaves, and the others go on as a "
        "smaller world where min_devices are left (leave), or the whole run ends with 75 (stop)",
        choices=(LEAVE, "stop"),
    )

    @property
    def may_go_on(self) -> bool:
        """Whether any fault is survived."""
        return bool(self.retries or self.preemption_retries)


def check_notice(policy: RecoverySpec) -> None:
    """Raise ConfigError for a `notice_url` that nobody could ask."""
    url = policy.notice_url
    if url and url not in NOTICE_SERVICES and not url.startswith(("http://", "https://")):
        raise ConfigError(
            f"run.recovery.notice_url = {literal(url)} cannot be asked",
            f"it is no URL, and none of {', '.join(NOTICE_SERVICES)}",
            'notice_url = "aws", or "http://..."',
        )
