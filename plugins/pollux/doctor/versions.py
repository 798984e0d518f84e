"""Versions and clocks of what works together."""

import time
from collections.abc import Iterator
from importlib.metadata import version

import httpx

from pollux.doctor.finding import Finding, failed, ok, warning
from pollux.settings import Settings
from pollux_agent.driver.kube.api import KubeApi

OLDEST_SERVER = (1, 20)
MAX_SKEW_S = 5.0
_TIMEOUT_S = 10.0


def check_packages() -> Iterator[Finding]:
    """Scheduler and agent of one version here; the images of trainings have an agent of their own."""
    ours, agent = version("airflow-provider-pollux"), version("pollux-agent")
    if ours == agent:
        yield ok(
            "versions",
            f"airflow-provider-pollux and pollux-agent {ours}, Airflow {version('apache-airflow')}",
        )
    else:
        yield failed(
            "versions",
            f"airflow-provider-pollux is {ours}, pollux-agent {agent}",
            f"pip install airflow-provider-pollux=={ours} pollux-agent=={ours}",
        )


def check_mlflow_version(config: Settings) -> Iterator[Finding]:
    """MLflow's server and the client here are of one major version."""
    if not config.mlflow_tracking_uri.startswith(("http://", "https://")):
        return
    try:
        with httpx.Client(timeout=_TIMEOUT_S, trust_env=False) as client:
            answer = client.get(f"{config.mlflow_tracking_uri.rstrip('/')}/version")
        answer.raise_for_status()
    except httpx.HTTPError:
        return  # the check of MLflow itself says so
    server, here = answer.text.strip(), version("mlflow")
    if server.split(".")[0] != here.split(".")[0]:
        yield warning(
            "versions", f"MLflow's server is {server}, the client {here}", f"pip install mlflow=={server}"
        )
    else:
        yield ok("versions", f"MLflow's server is {server}, the client {here}")
    yield from _clock("MLflow", answer.headers.get("Date"))


def check_server(api: KubeApi) -> Iterator[Finding]:
    """The API server's version and clock. Raises KubeError."""
    answer = api.get("/version")
    digits = ("".join(filter(str.isdecimal, str(answer.get(part, "")))) or "0" for part in ("major", "minor"))
    major, minor = map(int, digits)
    if (major, minor) < OLDEST_SERVER:
        yield failed(
            "versions",
            f"Kubernetes is {answer.get('gitVersion')}, 1.20 is the oldest that works",
            "upgrade it",
        )
    else:
        yield ok("versions", f"Kubernetes {answer.get('gitVersion')}")
    yield from _skew("Kubernetes' API server", api.server_unix_s)


def _clock(who: str, date: str | None) -> Iterator[Finding]:
    if date is not None:
        from email.utils import parsedate_to_datetime

        yield from _skew(who, parsedate_to_datetime(date).timestamp())


def _skew(who: str, told_unix_s: float) -> Iterator[Finding]:
    """HTTP tells time in whole seconds, and the answer took a moment."""
    off_s = abs(time.time() - told_unix_s)
    if off_s > MAX_SKEW_S:
        yield warning(
            "clocks", f"{who} is {off_s:.0f} s off this machine's clock", "run NTP (chrony) on both"
        )
    else:
        yield ok("clocks", f"{who} agrees with this machine")
