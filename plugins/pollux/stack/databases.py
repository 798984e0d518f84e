"""Where Airflow and MLflow keep their tables: SQLite files in the state folder, or servers in a file."""

import json
import stat
from pathlib import Path
from typing import Annotated

from pydantic import Field
from pydantic.dataclasses import dataclass
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError

from pollux.errors import ConfigError
from pollux_agent.errors import DocumentError
from pollux_agent.protocol import DOCUMENT_CONFIG, decode

LOCK_WAIT_S = 30
"""How long Airflow's components wait for each other's writes: SQLite's own 5 s are short on a busy host."""

Url = Annotated[str, Field(min_length=1)]


@dataclass(frozen=True, slots=True, kw_only=True, config=DOCUMENT_CONFIG)
class Databases:
    """SQLAlchemy URLs, with their passwords: they reach services by the environment alone."""

    airflow: Url
    mlflow: Url


def databases(state: Path, file: Path | None, *, lock_wait_s: int = LOCK_WAIT_S) -> Databases:
    """The databases that ``file`` names as JSON, else SQLite files in ``state``.

    ``lock_wait_s`` is how long a writer of Airflow's SQLite file waits for others.

    Raises ConfigError for a file that others may read, and for what is no URL of two databases.
    """
    if file is None:
        return Databases(
            airflow=f"sqlite:///{state / 'airflow' / 'airflow.db'}?timeout={lock_wait_s}",
            mlflow=f"sqlite:///{state / 'mlflow' / 'mlflow.db'}",
        )
    try:
        mode = file.stat().st_mode
        text = file.read_bytes()
    except OSError as error:
        raise ConfigError(f"--databases: {file} cannot be read: {error}") from None
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise ConfigError(f"--databases: {file} holds passwords and others may read it; chmod 600 {file}")
    try:
        json.loads(text)
        found = decode(Databases, text)
        same = make_url(found.airflow) == make_url(found.mlflow)
    except (ValueError, DocumentError, ArgumentError):
        wanted = '{"airflow": "postgresql+psycopg2://user:password@host/airflow", "mlflow": "..."}'
        raise ConfigError(f"--databases: {file} holds no two database URLs; write {wanted}") from None
    if same:
        raise ConfigError(f"--databases: {file} names one database for both; make a second one for MLflow")
    return found
