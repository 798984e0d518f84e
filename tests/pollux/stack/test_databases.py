"""Which database URLs a stack takes, and what it refuses."""

import json
from pathlib import Path

import pytest

from pollux.errors import ConfigError
from pollux.stack.databases import databases

AIRFLOW = "postgresql+psycopg2://pollux:secret@db/airflow"
MLFLOW = "postgresql+psycopg2://pollux:secret@db/mlflow"


def write(folder: Path, content: object, mode: int = 0o600) -> Path:
    file = folder / "databases.json"
    file.write_text(content if isinstance(content, str) else json.dumps(content))
    file.chmod(mode)
    return file


def test_without_a_file_both_are_sqlite_in_the_state_folder(tmp_path: Path) -> None:
    found = databases(tmp_path, None)
    assert found.airflow.startswith(f"sqlite:///{tmp_path}/airflow/")
    assert found.mlflow == f"sqlite:///{tmp_path}/mlflow/mlflow.db"


def test_a_file_names_both(tmp_path: Path) -> None:
    found = databases(tmp_path, write(tmp_path, {"airflow": AIRFLOW, "mlflow": MLFLOW}))
    assert (found.airflow, found.mlflow) == (AIRFLOW, MLFLOW)


@pytest.mark.parametrize(
    ("content", "mode", "said"),
    [
        pytest.param({"airflow": AIRFLOW, "mlflow": MLFLOW}, 0o640, "chmod 600", id="others may read it"),
        pytest.param({"airflow": AIRFLOW}, 0o600, "no two database URLs", id="one is missing"),
        pytest.param("{", 0o600, "no two database URLs", id="no JSON"),
        pytest.param({"airflow": "db/airflow", "mlflow": MLFLOW}, 0o600, "no two", id="no URL"),
        pytest.param({"airflow": AIRFLOW, "mlflow": AIRFLOW}, 0o600, "one database for both", id="the same"),
        pytest.param({"airflow": AIRFLOW, "mlflow": MLFLOW, "x": "y"}, 0o600, "no two", id="one too many"),
    ],
)
def test_a_bad_file_is_refused_without_its_passwords(
    content: object, mode: int, said: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=said) as refused:
        databases(tmp_path, write(tmp_path, content, mode))
    assert "secret" not in str(refused.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.json"):
        databases(tmp_path, tmp_path / "nowhere.json")
