from collections.abc import Callable
from pathlib import Path

import pytest
from cycle_builder import World
from mlflow_store import mlflow_uri, new_experiment, run_id

from pollux.record import Records
from pollux.settings import Settings
from pollux.store import ModelStore

__all__ = ["make_world", "mlflow_uri", "new_experiment", "run_id", "world"]


@pytest.fixture
def make_world(mlflow_uri: str, new_experiment: Callable[[str], str], tmp_path: Path) -> Callable[..., World]:
    def make(*, lag: int = 0, policy: str = "ours", tracking_uri: str = mlflow_uri) -> World:
        settings = Settings(
            state=tmp_path / "state",
            policy=policy,
            free_wait_s=2.0,
            mlflow_tracking_uri=tracking_uri,
            experiment=new_experiment("jobs"),
            decisions_experiment=new_experiment("decisions"),
        )
        store = ModelStore(
            settings.mlflow_tracking_uri,
            experiment=settings.experiment,
            decisions_experiment=settings.decisions_experiment,
            deployment=settings.deployment,
        )
        return World(tracking_uri, store, settings, Records(settings.decisions), lag)

    return make


@pytest.fixture
def world(make_world: Callable[..., World]) -> World:
    return make_world()
