"""A real MLflow for tests: one SQLite store a session, an experiment of its own for each test."""

from collections.abc import Callable
from pathlib import Path
from uuid import uuid4

import pytest


@pytest.fixture(scope="session")
def mlflow_uri(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The URI of an empty store whose tables are made."""
    from mlflow import MlflowClient

    uri = f"sqlite:///{tmp_path_factory.mktemp('mlflow') / 'mlflow.db'}"
    MlflowClient(uri).search_experiments()
    return uri


@pytest.fixture
def new_experiment(mlflow_uri: str, tmp_path: Path) -> Callable[[str], str]:
    """Make an experiment that keeps its files in the test's folder; its unique name."""
    from mlflow import MlflowClient

    def make(prefix: str) -> str:
        name = f"{prefix}-{uuid4().hex[:8]}"
        MlflowClient(mlflow_uri).create_experiment(name, artifact_location=(tmp_path / name).as_uri())
        return name

    return make


@pytest.fixture
def run_id(mlflow_uri: str, new_experiment: Callable[[str], str]) -> str:
    """A new run."""
    from mlflow import MlflowClient

    client = MlflowClient(mlflow_uri)
    experiment = client.get_experiment_by_name(new_experiment("agent"))
    return str(client.create_run(experiment.experiment_id).info.run_id)
