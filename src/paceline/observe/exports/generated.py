"""Alert rules and a Grafana dashboard for the metrics of runs, made of the table of metrics. JSON is YAML too."""

from __future__ import annotations

from paceline.observe.exports.openmetrics import FAMILIES

RUN = '{run=~"$run"}'
# Name, expression, for how long, severity, what it says.
RULES = (
    ("PacelineStalled", "time() - paceline_last_record_timestamp_seconds > 600 and paceline_running == 1", "1m",
     "critical", "{{ $labels.run }} has written no record for ten minutes"),
    ("PacelineFailed", "paceline_exit_code != 0 and paceline_exit_code != 75 and paceline_running == 0", "0m",
     "critical", "{{ $labels.run }} has ended with exit code {{ $value }}"),
    ("PacelineLossNotFinite", "paceline_loss != paceline_loss", "0m", "critical",
     "the loss of {{ $labels.run }} is no number"),
    ("PacelineSlow",
     'paceline_step_seconds{phase="total"} > on(run) group_left() (1.25 * paceline_forecast_step_seconds)',
     "15m", "warning", "steps of {{ $labels.run }} take a quarter longer than forecast"),
    ("PacelineFault", "increase(paceline_faults_total[10m]) > 0", "0m", "warning", "{{ $labels.run }} has had a fault"),
    ("PacelineCheckpointOld",
     "time() - paceline_checkpoint_timestamp_seconds > 21600 and on(run) paceline_running == 1",
     "5m", "warning", "the newest checkpoint of {{ $labels.run }} is older than six hours"),
)  # fmt: skip
# Title, expression, legend, unit as Grafana names it.
PANELS = (
    ("Loss", f"paceline_loss{RUN}", "{{run}} {{of}}", "none"),
    ("Step, by phase", f"paceline_step_seconds{RUN}", "{{run}} {{phase}}", "s"),
    ("Step by forecast", f"paceline_forecast_step_seconds{RUN}", "{{run}}", "s"),
    ("Items per second", f"paceline_items_per_second{RUN}", "{{run}}", "short"),
    ("What bounds a step", f"paceline_bound_ratio{RUN}", "{{run}} {{cause}}", "percentunit"),
    ("Peak memory of rank 0", f"paceline_peak_memory_bytes{RUN}", "{{run}}", "bytes"),
    ("Steps done", f"paceline_step{RUN}", "{{run}}", "none"),
    ("Faults, recoveries", f"paceline_faults_total{RUN}", "{{run}} faults", "none"),
    ("Age of the newest checkpoint", f"time() - paceline_checkpoint_timestamp_seconds{RUN}", "{{run}}", "s"),
)
WIDTH, HEIGHT = 12, 8  # of a panel, in Grafana's grid of 24 columns


def alert_rules() -> dict[str, object]:
    """Return a file of rules for Prometheus."""
    rules = [
        {"alert": name, "expr": expression, "for": lasts, "labels": {"severity": severity},
         "annotations": {"summary": says}}
        for name, expression, lasts, severity, says in RULES
    ]  # fmt: skip
    return {"groups": [{"name": "paceline", "rules": rules}]}


def dashboard() -> dict[str, object]:
    """Return a dashboard for Grafana, with the data source and the run as variables."""
    panels = [
        {
            "id": at + 1, "type": "timeseries", "title": title,
            "gridPos": {"x": at % 2 * WIDTH, "y": at // 2 * HEIGHT, "w": WIDTH, "h": HEIGHT},
            "datasource": {"type": "prometheus", "uid": "${source}"},
            "targets": [{"refId": "A", "expr": expression, "legendFormat": legend}],
            "fieldConfig": {"defaults": {"unit": unit}, "overrides": []},
        }
        for at, (title, expression, legend, unit) in enumerate(PANELS)
    ]  # fmt: skip
    variables = [
        {"name": "source", "type": "datasource", "query": "prometheus"},
        {"name": "run", "type": "query", "multi": True, "includeAll": True, "refresh": 2,
         "datasource": {"type": "prometheus", "uid": "${source}"}, "query": "label_values(paceline_step, run)"},
    ]  # fmt: skip
    return {
        "title": "Paceline runs", "uid": "paceline-runs", "schemaVersion": 39, "refresh": "10s", "panels": panels,
        "time": {"from": "now-6h", "to": "now"}, "templating": {"list": variables},
    }  # fmt: skip


def metric_names() -> set[str]:
    """Return the names of all samples: those of counters end in `_total`."""
    return {f"{name}_total" if kind == "counter" else name for name, (kind, _) in FAMILIES.items()}
