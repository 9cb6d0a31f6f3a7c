"""A sink that is any service of apprise: e-mail, Telegram, PagerDuty and many more. Needs the extra 'alerts'."""

from __future__ import annotations

from importlib import import_module

from paceline.errors import MissingExtra, PacelineError
from paceline.observe.alerts.message import AlertMessage

PURPOSE = "a sink of kind 'apprise'"


def need_apprise() -> None:
    """Raise MissingExtra where apprise is not installed."""
    try:
        import_module("apprise")
    except ImportError as error:
        raise MissingExtra("apprise", "alerts", PURPOSE) from error


def send_by_apprise(url: str, message: AlertMessage) -> None:
    """Send a message to the service that a URL names. Raises PacelineError where apprise cannot."""
    need_apprise()
    service = import_module("apprise").Apprise()
    if not service.add(url):
        raise PacelineError("no address of a service", "apprise does not know what it names")
    if not service.notify(title=message.head(), body="\n".join(message.as_text().splitlines()[1:])):
        raise PacelineError("a service takes no message", "apprise could not send it")
