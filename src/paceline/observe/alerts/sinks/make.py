"""NamedSink: a sink of the spec, ready to send. What is secret is read from the environment, and told to nobody."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import ConfigError, PacelineError
from paceline.observe.alerts.message import AlertMessage
from paceline.observe.alerts.sinks.command import run_command
from paceline.observe.alerts.sinks.file import append_line
from paceline.observe.alerts.sinks.services import send_by_apprise
from paceline.observe.alerts.sinks.webhook import post
from paceline.spec.journal.redact import MARK, Redactor
from paceline.spec.watch.alerts import SEVERITIES, AlertSinkSpec, AlertsSpec, variable_in

Environ = Mapping[str, str]
SHORTEST_SECRET = 4  # what is shorter is not taken out of texts: it would be everywhere


@dataclass(frozen=True)
class NamedSink:
    """A sink with what it is called in messages: "webhook 2". `send` raises PacelineError, without any secret in it."""

    name: str
    spec: AlertSinkSpec
    deliver: Callable[[AlertMessage], None]
    secrets: tuple[str, ...] = ()

    def wanted(self, message: AlertMessage) -> AlertMessage | None:
        """Return the part of a message that this sink is to have; None for nothing."""
        least, rules = SEVERITIES.index(self.spec.least), self.spec.rules
        alerts = tuple(each for each in message.alerts
                       if SEVERITIES.index(each.severity) >= least and (not rules or each.rule in rules))  # fmt: skip
        return AlertMessage(message.run, message.run_dir, alerts) if alerts else None

    def send(self, message: AlertMessage) -> None:
        """Send a message, or raise PacelineError."""
        try:
            self.deliver(message)
        except PacelineError as error:
            because = self.hide(error.because)
        except Exception as error:  # of somebody else's program: whatever it is, the thread of this sink goes on
            because = self.hide(f"{type(error).__name__}: {error}")
        else:
            return
        # Raised here, with no error behind it whose words may hold a secret.
        raise PacelineError(f"{self.name} takes no message", because, "paceline alerts test tries it again")

    def hide(self, text: str) -> str:
        """Return a text without what is secret in this sink."""
        for secret in self.secrets:
            text = text.replace(secret, MARK)
        return Redactor().text(text)


def make_sinks(spec: AlertsSpec, environ: Environ | None = None) -> list[NamedSink]:
    """Return the sinks of a spec. Raises ConfigError where a variable that a sink names is not set."""
    environ = os.environ if environ is None else environ
    return [_made(f"{each.kind} {number}", each, environ) for number, each in enumerate(spec.sinks, 1)]


def sinks_here(spec: AlertsSpec, say: Callable[[str], None], environ: Environ | None = None) -> list[NamedSink]:
    """Return the sinks of a spec that this machine's environment can reach; `say` is told of each other one.

    It is for a watch that takes another one's place: a variable that is not set here must not end it.
    """
    found, environ = [], os.environ if environ is None else environ
    for number, each in enumerate(spec.sinks, 1):
        try:
            found.append(_made(f"{each.kind} {number}", each, environ))
        except ConfigError as error:
            say(f"alert    {error.what} on {socket.gethostname()}, and is told nothing: {error.because}")
    return found


def _made(name: str, spec: AlertSinkSpec, environ: Environ) -> NamedSink:
    to, token = _value(spec.to, name, environ), _value(spec.token, name, environ)
    ways: dict[str, Callable[[AlertMessage], None]] = {
        "command": lambda message: run_command(to, message, spec.timeout),
        "file": lambda message: append_line(Path(to), message),
        "apprise": lambda message: send_by_apprise(to, message),
    }
    deliver = ways.get(spec.kind, lambda message: post(spec.kind, to, token, message, spec.timeout))
    secrets = [value for text, value in ((spec.to, to), (spec.token, token))
               if variable_in(text) and len(value) >= SHORTEST_SECRET]  # fmt: skip
    return NamedSink(name, spec, deliver, tuple(secrets))


def _value(text: str, name: str, environ: Environ) -> str:
    variable = variable_in(text)
    if variable and not environ.get(variable):
        raise ConfigError(
            f"the sink {name} needs the variable {variable}", "it is not set in the environment",
            f"export {variable}=..., where the run is started",
        )  # fmt: skip
    return environ[variable] if variable else text
