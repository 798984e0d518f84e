"""How operator and trigger reach the cluster that the settings name."""

from pathlib import Path

from pollux.cluster.base import JobControl
from pollux.errors import Refused
from pollux.settings import Settings


def connect(config: Settings, cluster: str | None = None) -> JobControl:
    """The cluster that ``cluster`` names, by default the settings' one.

    Raises Refused for a kind of cluster that is not supported.
    """
    kind = cluster or config.cluster
    if kind != "local":
        raise Refused(f"cluster is {kind!r}, which is not supported yet; set it to 'local'")
    from pollux.cluster.local import LocalCluster

    return LocalCluster(config.socket)


def cursor_file(config: Settings, job_id: str) -> Path:
    """Where the relay remembers how much of a job's output is in Airflow's logs."""
    return config.jobs / job_id / "relayed.cursor"
