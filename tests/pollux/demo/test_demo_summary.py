"""The summary's numbers, and the memory bound."""

import io
from dataclasses import replace

import httpx
import pytest
from rich.console import Console

from pollux.airflow_api import AirflowApi
from pollux.demo.answers import export_answers
from pollux.demo.jobs import JobSize, demo_plan
from pollux.demo.summary import DemoSummary, job_summaries, memory_check, summary_table
from pollux.verify import AirflowExport, JobFigures
from pollux_agent.protocol import decode, to_plain

FIGURES = JobFigures(
    job_id="digits-1",
    name="digits",
    state="success",
    submitted_s=0.0,
    jct_s=201.239,
    resizes=2,
    moves=1,
    restart_s=17.0,
    mlflow_run_id="r",
    allocations=((0.0, 0), (12.345, 1), (201.0, 0)),
)


def summary() -> DemoSummary:
    sizes = {"digits": JobSize(epochs=12, target_progress=540.0, alone_s=200.0)}
    jobs = job_summaries(demo_plan(), [FIGURES], sizes=sizes, metrics={"digits": 0.97})
    return DemoSummary(
        ok=True,
        jobs=jobs,
        decisions=9,
        double_booked_slots=0,
        peak_memory_bytes=3_000_000_000,
        total_s=600.0,
        num_cores=2,
        state="state/demo",
        checks=(),
    )


def test_the_summary_has_the_promised_keys() -> None:
    plain = to_plain(summary())
    assert {"jobs", "decisions", "double_booked_slots", "peak_memory_bytes", "ok"} <= plain.keys()
    job = plain["jobs"][0]
    assert job["allocations"] == [
        {"t_s": 0.0, "gpus": 0},
        {"t_s": 12.35, "gpus": 1},
        {"t_s": 201.0, "gpus": 0},
    ]
    want = {
        "name": "digits",
        "state": "success",
        "jct_s": 201.24,
        "resizes": 2,
        "restart_s": 17.0,
        "final_metric": 0.97,
        "mlflow_run_id": "r",
    }
    assert {key: job[key] for key in want} == want


def test_a_row_of_the_table_fits_a_terminal_of_120_columns() -> None:
    job = replace(summary().jobs[0], name="language-model", mlflow_run_id="f" * 32)
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(summary_table(replace(summary(), jobs=(job,))))
    (row,) = (line for line in console.export_text().splitlines() if "language-model" in line)
    assert "success" in row and "val_accuracy 0.97" in row and "f" * 32 in row


@pytest.mark.parametrize(
    ("peak", "ok"), [(0, False), (1, True), (6_000_000_000, True), (6_000_000_001, False)]
)
def test_memory_is_bounded_and_has_to_be_measured(peak: int, ok: bool) -> None:
    assert memory_check(demo_plan(), peak).ok is ok


def test_the_export_holds_every_page_and_every_field(tmp_path) -> None:
    """150 runs of each DAG, of which Airflow gives 100 at a time."""

    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/auth/token":
            return httpx.Response(201, json={"access_token": "t"})
        *_, dag, runs = request.url.path.removesuffix("/~/taskInstances").split("/")
        assert runs == "dagRuns"
        key = "task_instances" if request.url.path.endswith("taskInstances") else "dag_runs"
        offset = int(request.url.params["offset"])
        items = [
            {"dag_id": dag, "dag_run_id": f"run-{i}", "task_id": "t", "state": "success", "note": "kept"}
            for i in range(offset, min(150, offset + int(request.url.params["limit"])))
        ]
        return httpx.Response(200, json={key: items, "total_entries": 150})

    with AirflowApi("http://airflow", user="u", password="p", transport=httpx.MockTransport(answer)) as api:
        text = export_answers(api, tmp_path).read_text()
    export = decode(AirflowExport, text)
    assert {run.dag_run_id for run in export.dag_runs if run.dag_id == "pollux_train"} == {
        f"run-{i}" for i in range(150)
    }
    assert (len(export.dag_runs), len(export.task_instances)) == (300, 300)
    assert text.count("kept") == 600
