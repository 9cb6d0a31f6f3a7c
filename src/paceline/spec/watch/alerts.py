"""AlertsSpec: the `[run.alerts]` table of a spec. What wakes somebody, how soon, and where it is sent."""

from __future__ import annotations

import re
from dataclasses import dataclass

from paceline.config.declared import Declared
from paceline.config.fields import option
from paceline.errors import ConfigError, suggestion

SEVERITIES = ("info", "warning", "critical")  # from the least
# Rule -> (how grave it is, when it fires). Each has a class in observe/alerts/rules.
RULES = {
    "no_step": ("critical", "no step for `no_step_medians` median steps (a warning), and for `no_step_minimum`"),
    "rank_down": ("critical", "a rank has died or hangs, or the whole run is gone without an end on record"),
    "not_finite": ("critical", "a loss that is no finite number"),
    "spike": ("warning", "a loss so many deviations (`spike_deviations`) above the median of the 64 steps before"),
    "plateau": ("warning", "the loss has not fallen in the last `plateau_share` of the planned steps"),
    "slow": ("warning", "steps are slower than `slow_share` below the forecast's rate, and beyond its interval"),
    "straggler": ("warning", "one rank computes `straggler_factor` times as long as the median"),
    "memory": ("warning", "`memory_share` of a device's memory is in use"),
    "disk": ("warning", "`disk_share` of the disk with the run's directory is in use"),
    "checkpoint_old": ("warning", "no checkpoint for `checkpoint_factor` times as many steps as there are between two"),
    "temperature": ("warning", "a device is hotter than `temperature_celsius`"),
    "budget": ("warning", "`run.budget.warn_at` of a budget is spent; critical where all of it is"),
    "finished": ("info", "the run has ended: a warning where it is to be started again, critical where it failed"),
}
SINKS = ("command", "file", "webhook", "slack", "discord", "apprise")
SECRET_SINKS = ("slack", "discord", "apprise")  # whose address is a secret itself
_VARIABLE = re.compile(r"(?:\$|env:)([A-Za-z_][A-Za-z0-9_]*)")
_HOURS = re.compile(r"(\d\d):(\d\d)-(\d\d):(\d\d)")


def variable_in(text: str) -> str:
    """Return the name of the environment variable that a text stands for, "$NAME" or "env:NAME"; "" for other text."""
    found = _VARIABLE.fullmatch(text)
    return found[1] if found else ""


@dataclass(frozen=True)
class AlertSinkSpec(Declared, table="run.alerts.sinks"):
    """Where alerts are sent. What is secret is named: "$NAME" or "env:NAME" is read from the environment."""

    kind: str = option(
        "command",
        "a shell command that gets the message as JSON on its standard input, a file of JSON lines, a webhook (JSON),"
        " one of Slack's or Discord's, or any service of apprise (extra 'alerts')",
        choices=SINKS,
    )
    to: str = option("", "the command, the file, or the URL; of slack, discord and apprise always '$NAME'")
    token: str = option("", "of a webhook: what it is given as `Authorization: Bearer`, as '$NAME'")
    least: str = option("warning", "what is less grave is not sent here", choices=SEVERITIES)
    rules: tuple[str, ...] = option((), "the rules that are sent here; empty: all")
    timeout: float = option(10.0, "how long one message may take", quantity="duration", above=0.0)

    def refuse_contradictions(self) -> None:
        """Raise ConfigError for a sink without an address, and for secrets that stand in the spec."""
        if not self.to:
            raise ConfigError("run.alerts.sinks.to is not set", f"a {self.kind} needs to know where", "to = ...")
        if self.kind in SECRET_SINKS and not variable_in(self.to):
            because = "its address is a secret, and a spec is kept in the journal"
            raise ConfigError(f"the address of a {self.kind} sink stands in the spec", because, 'to = "$NAME"')
        if self.token and not variable_in(self.token):
            because = "it is a secret, and a spec is kept in the journal"
            raise ConfigError("run.alerts.sinks.token stands in the spec", because, 'token = "$NAME"')
        _check_rules("run.alerts.sinks.rules", self.rules)


@dataclass(frozen=True)
class AlertsSpec(Declared, table="run.alerts"):
    """What wakes somebody. The defaults fire on what is wrong in nearly any run."""

    enabled: bool = option(True, "look at the rules while the run lives")
    sinks: tuple[AlertSinkSpec, ...] = option((), "where alerts are sent, besides the terminal and the journal")
    off: tuple[str, ...] = option((), f"rules that are not looked at: {', '.join(RULES)}")
    trace: tuple[str, ...] = option(
        (), "rules whose alert takes a trace of the next steps (`paceline trace`), once for each; 'memory' with tensors"
    )
    quiet: str = option("", "hours of the local clock, '22:00-07:00', in which only what is critical is sent")
    group: float = option(
        20.0, "alerts that are not critical wait so long for others, and are sent in one message",
        quantity="duration", minimum=0.0,
    )  # fmt: skip
    again: float = option(
        600.0, "an alert that fires again within this time is on record and is not sent again",
        quantity="duration", minimum=0.0,
    )  # fmt: skip
    no_step_medians: float = option(3.0, "rule no_step: median steps without a step", above=1.0)
    no_step_minimum: float = option(
        10.0, "rule no_step: and for so long at least; before that it is a warning", quantity="duration", above=0.0
    )
    spike_deviations: float = option(12.0, "rule spike: deviations above the median", above=0.0)
    plateau_share: float = option(0.25, "rule plateau: part of the planned steps", above=0.0, maximum=1.0)
    slow_share: float = option(0.2, "rule slow: part of the forecast's rate that is missing", above=0.0, maximum=1.0)
    straggler_factor: float = option(1.3, "rule straggler: times the median", above=1.0)
    memory_share: float = option(0.95, "rule memory: part in use", above=0.0, maximum=1.0)
    disk_share: float = option(0.95, "rule disk: part in use", above=0.0, maximum=1.0)
    checkpoint_factor: float = option(3.0, "rule checkpoint_old: times the steps between two", above=1.0)
    temperature_celsius: float = option(88.0, "rule temperature: degrees", above=0.0)

    def refuse_contradictions(self) -> None:
        """Raise ConfigError for rules that are none, and for hours that are none."""
        _check_rules("run.alerts.off", self.off)
        _check_rules("run.alerts.trace", self.trace)
        if self.quiet:
            minutes_of(self.quiet, "run.alerts.quiet")


def minutes_of(text: str, option_name: str) -> tuple[int, int]:
    """Return (first, last) minute of the day of hours such as "22:00-07:00". Raises ConfigError."""
    found = _HOURS.fullmatch(text.strip())
    parts = [int(part) for part in found.groups()] if found else []
    if not parts or max(parts[0], parts[2]) > 24 or max(parts[1], parts[3]) > 59:
        raise ConfigError(f"{option_name} = '{text}'", "hours are from-to of the local clock", "'22:00-07:00'")
    return parts[0] * 60 + parts[1], parts[2] * 60 + parts[3]


def is_within(minute: int, hours: tuple[int, int]) -> bool:
    """Return whether a minute of the day is in hours, which may pass midnight."""
    first, last = hours
    return first <= minute < last if first < last else minute >= first or minute < last


def _check_rules(name: str, rules: tuple[str, ...]) -> None:
    for rule in rules:
        if rule not in RULES:
            raise ConfigError(f"{name} has '{rule}'", "there is no such rule", suggestion(rule, list(RULES)))
