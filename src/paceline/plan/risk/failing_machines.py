"""A planned task on machines that fail, as a simulation takes it: the job, what saving takes, what a node costs."""

from __future__ import annotations

import math

from paceline.errors import ConfigError
from paceline.plan.choice import Choice
from paceline.plan.cost.bill import busy_share
from paceline.simulate.defaults import Saving, saving_of
from paceline.simulate.failures import FailureRates, rates_of
from paceline.simulate.outcome import NodeCosts
from paceline.simulate.scenario import Scenario
from paceline.spec.optimizers import optimizer_key


def saving_for(planned: Choice) -> Saving:
    """Return what saving takes for a planned task on its cluster."""
    cluster = planned.cluster
    nodes = cluster.devices // cluster.devices_per_node
    spec = planned.spec
    return saving_of(
        planned.profile.trained_parameters,
        optimizer_key(spec.task.optimizer),
        nodes,
        cluster.devices,
        spec.cluster.reliability,
    )


def costs_of(planned: Choice) -> NodeCosts:
    """Return what a node of the cluster costs and draws, by the same figures as the forecast's money and energy."""
    cluster = planned.cluster
    load = cluster.watts_per_device.value
    idle = cluster.waiting_watts_per_device.value if cluster.waiting_watts_per_device else load
    computing = idle + (load - idle) * busy_share(planned.forecast.time)
    building = cluster.devices_per_node * (cluster.pue.value if cluster.pue else 1.0)
    usd = cluster.price_usd_per_device_hour.value * cluster.devices_per_node
    return NodeCosts(usd, computing * building, idle * building)


def scenario_of(planned: Choice, horizon_seconds: float = math.inf, rates: FailureRates | None = None) -> Scenario:
    """Return the job and its machines, which fail as `rates` say, if they are given, or as published or in the spec.

    Raises ConfigError where nothing is known of that.
    """
    cluster, plan, reliability = planned.cluster, planned.plan, planned.spec.cluster.reliability
    rates = rates or rates_of(cluster.device.name, reliability)
    if rates.source == "unknown":
        raise ConfigError(
            f"how often {cluster.device.name} fails is unknown",
            "there is no published study of it",
            "--set cluster.reliability.mtbf_hours_per_device=50000, or another device's study:"
            " --set cluster.reliability.failures=llama3",
        )
    return Scenario(
        nodes=cluster.devices // cluster.devices_per_node,
        devices_per_node=cluster.devices_per_node,
        work_seconds=planned.forecast.run_seconds.value if math.isinf(horizon_seconds) else horizon_seconds,
        rates=rates,
        replicas=plan.layout.data_degree,
        micro_batches=max(1, planned.batch_samples // plan.micro_batch),
        repair_seconds=reliability.repair,
        preemption_hours_per_node=reliability.preemption_hours_per_node,
        preemption_notice=reliability.preemption_notice,
        preemption_return=reliability.preemption_return,
        slow_hours_per_device=reliability.slow_hours_per_device,
        slow_factor=reliability.slow_factor,
        slow_detection=reliability.slow_detection,
        horizon_seconds=horizon_seconds,
    )
