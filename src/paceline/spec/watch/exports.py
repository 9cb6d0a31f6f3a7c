"""ExportsSpec: the `[run.exports]` table of a spec. Which other tools get what the journal has."""

from __future__ import annotations

import re
from dataclasses import dataclass

from paceline.config.declared import Declared
from paceline.config.fields import option
from paceline.errors import ConfigError

FILE = "file"
MOST_PORT = 65535
ADDRESS = re.compile(r"[\w.\[\]:-]*:\d{1,5}")


@dataclass(frozen=True)
class ExportsSpec(Declared, table="run.exports"):
    """Tools that follow the run. A process beside the run reads the journal for them: none can stop or slow a step.

    What a tool has missed, because it was slow or away, is delivered later, by the next start or `paceline deliver`.
    """

    mlflow: str = option(
        "",
        "MLflow's tracking URI, such as sqlite:///mlflow.db (extra 'mlflow'; secrets are the environment's)",
    )
    trackio: bool = option(False, "log to trackio's store on this machine (needs the extra 'trackio')")
    wandb: bool = option(False, "write an offline run of Weights & Biases, for `wandb sync` (needs the extra 'wandb')")
    openmetrics: str = option(
        "",
        "metrics for Prometheus: 'file' keeps RUN/exports/metrics.prom, HOST:PORT serves them too "
        "(over several nodes 0.0.0.0:PORT, which each of them can serve)",
    )
    project: str = option("", "the project or experiment that runs are kept under (empty: the task's name)")

    @property
    def names(self) -> tuple[str, ...]:
        """The sinks that are asked for."""
        return tuple(name for name in ("mlflow", "trackio", "wandb", "openmetrics") if getattr(self, name))

    def refuse_contradictions(self) -> None:
        """Raise ConfigError for an address that is none."""
        is_address = ADDRESS.fullmatch(self.openmetrics) and int(self.openmetrics.rpartition(":")[2]) <= MOST_PORT
        if self.openmetrics not in ("", FILE) and not is_address:
            raise ConfigError(
                f"run.exports.openmetrics = '{self.openmetrics}' is no address",
                "it is 'file', or a host and a port", 'openmetrics = "127.0.0.1:9464"',
            )  # fmt: skip
