"""Simulations of the synthetic set for tests."""

from pathlib import Path
from typing import Any

from pollux.simulate.engine import Outcome, Simulation
from pollux.simulate.setup import ClusterSetup, RunSettings, run_settings, uniform
from pollux.simulate.synthetic import synthetic_traces
from pollux.traces import Application, Request, Workload, read_application

APPS = ("resnet18", "deepspeech2", "bert")


def apps(traces: Path | None = None) -> dict[str, Application]:
    folder = traces or synthetic_traces()
    return {name: read_application(folder, name, frozenset({"gpu"})) for name in APPS}


def workload(*requests: tuple[float, str, int, int]) -> Workload:
    """From (submission time, application, GPUs, batch size)."""
    return Workload(
        name="workload-1",
        set="test",
        requests=tuple(
            Request(name=f"{app}-{index}", submitted_s=at, application=app, num_gpus=gpus, batch_size=batch)
            for index, (at, app, gpus, batch) in enumerate(requests)
        ),
    )


def settings(policy: str, **options: Any) -> RunSettings:
    plain: dict[str, Any] = {"avoid_interference": None, "fairness_p": None, "seed": 0}
    return run_settings(policy=policy, **(plain | options))


def simulation(
    jobs: Workload, policy: str, cluster: ClusterSetup | None = None, **options: Any
) -> Simulation:
    return Simulation(jobs, apps(), cluster or uniform(2, 4), settings(policy, **options))


def run(jobs: Workload, policy: str, cluster: ClusterSetup | None = None, **options: Any) -> Outcome:
    return simulation(jobs, policy, cluster, **options).run()
