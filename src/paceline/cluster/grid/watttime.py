"""WattTime's forecast of marginal carbon, for those who have an account there: asked once at a start.

Its HTTP interface is version 3 (docs.watttime.org): a login with a name and a password gives a token, and /v3/forecast
the values of a region that the spec names. Values are pounds of CO2 per MWh.
"""

from __future__ import annotations

import base64
import datetime
import http.client
import json
import os
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from typing import Any

from paceline.cluster.grid.figures import WATTTIME, HourlyFigures
from paceline.errors import ConfigError
from paceline.no_redirects import ask_directly, status_text

ADDRESS = "https://api.watttime.org"
USER, PASSWORD = "WATTTIME_USER", "WATTTIME_PASSWORD"
GRAMS = 453.59237 / 1000  # per kWh, of a pound per MWh
HORIZON_HOURS, TIMEOUT_SECONDS = 72, 15.0


def watttime_figures(text: str, environ: Mapping[str, str] | None = None, address: str = ADDRESS) -> HourlyFigures:
    """Return the forecast of "watttime:REGION". Raises ConfigError where there is no account, or no answer."""
    environ = os.environ if environ is None else environ
    region = text.removeprefix(WATTTIME)
    user, password = environ.get(USER, ""), environ.get(PASSWORD, "")
    if not (region and user and password):
        raise ConfigError(f"run.when.carbon = '{text}'", f"it needs a region, {USER} and {PASSWORD}",
                          f"export {USER}=... {PASSWORD}=..., or a file of hourly values")  # fmt: skip
    login = base64.b64encode(f"{user}:{password}".encode()).decode()
    token = _asked(f"{address}/login", f"Basic {login}").get("token", "")
    query = urllib.parse.urlencode({"region": region, "signal_type": "co2_moer", "horizon_hours": HORIZON_HOURS})
    found = _asked(f"{address}/v3/forecast?{query}", f"Bearer {token}").get("data")
    hours: dict[float, list[float]] = {}
    try:
        for row in found or ():
            moment = datetime.datetime.fromisoformat(str(row["point_time"]).replace("Z", "+00:00")).timestamp()
            hours.setdefault(moment - moment % 3600, []).append(float(row["value"]) * GRAMS)
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"WattTime's forecast of {region} cannot be read", type(error).__name__, _INSTEAD) from error
    if not hours:
        raise ConfigError(f"WattTime has no forecast of {region}", "its answer has no hours", _INSTEAD)
    means = {moment: sum(values) / len(values) for moment, values in hours.items()}
    return HourlyFigures(means, {}, f"WattTime's forecast of {region}, marginal")


_INSTEAD = "a file of hourly values in its place"


def _asked(url: str, authorization: str) -> Mapping[str, Any]:
    request = urllib.request.Request(url, headers={"Authorization": authorization})
    try:
        found = json.loads(ask_directly(request, TIMEOUT_SECONDS))
    except urllib.error.HTTPError as error:
        because = f"it answers {status_text(error)}"
    except (http.client.HTTPException, OSError, ValueError) as error:
        because = type(getattr(error, "reason", error)).__name__
    else:
        if isinstance(found, dict):
            return found
        because = "its answer is no table"
    raise ConfigError("WattTime does not answer", because, _INSTEAD)
