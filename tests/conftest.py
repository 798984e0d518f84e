"""What all tests share: Airflow, where one needs it, keeps to a folder that goes away with the tests."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

DAGS = Path(__file__).parent.parent / "dags"
_HOME = pytest.StashKey[str]()


def pytest_configure(config: pytest.Config) -> None:
    """Airflow reads its settings when it is first imported, so they are there before any test is."""
    home = tempfile.mkdtemp(prefix="pollux-test-airflow-")
    config.stash[_HOME] = home
    os.environ.update(
        AIRFLOW_HOME=home,
        AIRFLOW__CORE__UNIT_TEST_MODE="True",
        AIRFLOW__CORE__LOAD_EXAMPLES="False",
        AIRFLOW__CORE__DAGS_FOLDER=str(DAGS),
        AIRFLOW__CORE__PLUGINS_FOLDER=f"{home}/plugins",
        AIRFLOW__DATABASE__SQL_ALCHEMY_CONN=f"sqlite:///{home}/airflow.db",
        AIRFLOW__LOGGING__BASE_LOG_FOLDER=f"{home}/logs",
        AIRFLOW__API_AUTH__JWT_SECRET="only-for-tests-" + "x" * 49,
    )


def pytest_unconfigure(config: pytest.Config) -> None:
    shutil.rmtree(config.stash[_HOME], ignore_errors=True)


@pytest.fixture(scope="session")
def airflow_db() -> Iterator[None]:
    """An empty metadata database, made once."""
    from airflow.utils import db

    db.initdb()
    yield
