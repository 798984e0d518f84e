"""What the page shows, what it says when a source is away, and that names cannot inject HTML."""

import json
from pathlib import Path

import pytest

from pollux.cluster_page import ClusterPage, JobRow, NodeRow, gather, page_json, render
from pollux.settings import Settings

EVIL = "<script>alert(1)</script>\"'&"


def row(**fields: object) -> JobRow:
    values: dict[str, object] = {
        "job_id": "digits-0123456789",
        "name": "digits",
        "phase": "running",
        "message": "",
        "placement": {"node-0": 2},
        "min_gpus": 1,
        "max_gpus": 4,
        "goodput": 1234.5,
        "reason": "grows: the fair share is 2",
        "restarts": 1,
        "age_s": 3725.0,
        "mlflow_run_url": "http://127.0.0.1:5000/#/runs/abc",
    }
    return JobRow(**(values | fields))  # type: ignore[arg-type]


def page(*jobs: JobRow) -> ClusterPage:
    return ClusterPage(
        time_unix_s=0.0,
        decision=7,
        policy="pollux",
        objective=1.5,
        nodes=(NodeRow(name="node-0", gpu_type="cpu", gpus=2, held=1),),
        jobs=jobs,
    )


def test_it_shows_nodes_jobs_and_the_last_decision() -> None:
    html = render(page(row()))
    for text in (
        "decision 7",
        "1 of 2",
        "digits",
        "node-0: 2",
        "1,23",
        "fair share is 2",
        "1:02:05",
        "/#/runs/abc",
    ):
        assert text in html


@pytest.mark.parametrize("field", ["name", "job_id", "phase", "message", "reason", "mlflow_run_url"])
def test_what_jobs_say_is_escaped(field: str) -> None:
    html = render(page(row(**{field: EVIL})))
    assert "<script>alert" not in html
    assert "&lt;script&gt;" in html


def test_node_names_and_problems_are_escaped() -> None:
    html = render(
        ClusterPage(
            time_unix_s=0.0,
            nodes=(NodeRow(name=EVIL, gpu_type=EVIL, gpus=1, held=0),),
            jobs=(row(placement={EVIL: 1}),),
            problems=(EVIL,),
        )
    )
    assert "<script>alert" not in html


def test_what_is_not_known_yet_is_said() -> None:
    html = render(page(row(goodput=None, mlflow_run_url=None)))
    assert "not known yet" in html
    assert "not yet" in html
    assert "No job is active" in render(page())


def test_a_cluster_that_is_away_is_said_and_no_error(tmp_path: Path) -> None:
    gathered = gather(Settings(state=tmp_path))
    assert "does not answer" in gathered.problems[0]
    assert "does not answer" in render(gathered)
    assert json.loads(page_json(gathered))["jobs"] == []


def test_a_decision_that_cannot_be_read_is_said(tmp_path: Path) -> None:
    folder = tmp_path / "decisions" / "1"
    folder.mkdir(parents=True)
    (folder / "decision.json").write_text("{")
    assert any("cannot be read" in text for text in gather(Settings(state=tmp_path)).problems)
