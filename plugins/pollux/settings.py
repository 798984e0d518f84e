"""The scheduler's settings, read from the environment in one place and by a call, never at import."""

import json
import os
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from pollux.errors import ConfigError
from pollux_agent.errors import DocumentError
from pollux_agent.protocol import DOCUMENT_CONFIG, from_plain

MAX_INTERVAL_S = 86_400.0
"""A day; far larger numbers are no times that Airflow could keep."""


@dataclass(frozen=True, slots=True, kw_only=True, config=DOCUMENT_CONFIG)
class Settings:
    """Each field is read from ``POLLUX_<FIELD>``, but ``mlflow_tracking_uri`` from ``MLFLOW_TRACKING_URI``.

    ``state`` is the local stack's folder; ``deployment`` tells several Airflows on one cluster apart;
    ``cluster`` is the kind of cluster that jobs run on unless the task says otherwise; ``scripts`` is where
    relative script paths are looked up; ``mlflow_url`` is the address that people open (default: the
    tracking URI); ``airflow_url`` and ``airflow_login`` (a JSON object user -> password) give
    access to Airflow's REST API; ``free_wait_s`` is how long an act waits for the GPUs of shrinking jobs;
    ``fairness_p`` is the policy's own default unless set; ``shadow`` decides and records but writes nothing
    to the cluster or to jobs' runs; ``keep_decisions`` is how many saved decisions stay, all of them by
    default; ``quotas`` bounds the GPUs that the jobs of a team hold together, read from JSON;
    ``estimators`` are the modules, with commas, whose goodput estimators a job may name by a dotted name;
    ``metrics_token`` is a file with the bearer token that reads the metrics, without which there are none.
    """

    state: Path
    deployment: Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?$")] = "airflow"
    cluster: Literal["local", "kubernetes"] = "local"
    interval_s: Annotated[float, Field(gt=0, le=MAX_INTERVAL_S)] = 60.0
    policy: str = "ours"
    fairness_p: Annotated[float, Field(ge=-1000, le=1000)] | None = None
    seed: Annotated[int, Field(ge=0, le=2**53)] = 0
    free_wait_s: Annotated[float, Field(ge=0, le=MAX_INTERVAL_S)] = 20.0
    shadow: bool = False
    keep_decisions: Annotated[int, Field(ge=1)] | None = None
    quotas: Mapping[str, Annotated[int, Field(ge=0, le=2**53)]] = Field(default_factory=dict)
    scripts: Path | None = None
    experiment: str = "pollux"
    decisions_experiment: str = "pollux-decisions"
    mlflow_tracking_uri: str = ""
    mlflow_url: str = ""
    airflow_url: str = ""
    airflow_login: Path | None = None
    metrics_token: Path | None = None
    estimators: tuple[str, ...] = ()

    @property
    def interval(self) -> timedelta:
        return timedelta(seconds=self.interval_s)

    @property
    def socket(self) -> Path:
        """The local cluster's Unix socket."""
        return self.state / "local.sock"

    @property
    def jobs(self) -> Path:
        return self.state / "jobs"

    @property
    def decisions(self) -> Path:
        """Where each cycle saves its snapshot, decision and plan; in shadow mode apart from real ones."""
        return self.state / ("shadow-decisions" if self.shadow else "decisions")

    @property
    def decisions_recorded_in(self) -> str:
        """The MLflow experiment of the decisions; in shadow mode apart from real ones."""
        return self.decisions_experiment + ("-shadow" if self.shadow else "")


def settings(environ: Mapping[str, str] | None = None) -> Settings:
    """Read the settings.

    Raises ConfigError naming the variable, its value and what is expected.
    """
    environ = os.environ if environ is None else environ
    plain: dict[str, object] = {}
    for field in Settings.__dataclass_fields__:
        name = "MLFLOW_TRACKING_URI" if field == "mlflow_tracking_uri" else "POLLUX_" + field.upper()
        if environ.get(name):
            plain[field] = environ[name]
    if "quotas" in plain:
        plain["quotas"] = _quotas(str(plain["quotas"]))
    if "estimators" in plain:
        plain["estimators"] = [name.strip() for name in str(plain["estimators"]).split(",") if name.strip()]
    if "state" not in plain:
        raise ConfigError("POLLUX_STATE: not set; name the state folder of the stack")
    try:
        return from_plain(Settings, plain)
    except DocumentError as error:
        raise ConfigError(f"environment: {error} (each field is read from POLLUX_<FIELD>)") from None


def _quotas(text: str) -> object:
    try:
        return json.loads(text)
    except ValueError:
        raise ConfigError(
            f'POLLUX_QUOTAS: {text[:80]!r} is no JSON; name teams and their GPUs, as in {{"red": 4}}'
        ) from None
