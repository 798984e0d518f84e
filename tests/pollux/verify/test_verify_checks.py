"""A good run passes every check; each thing that may be wrong fails the check about it, and no other."""

import json
import os
import shutil
from pathlib import Path

import pytest
import state_builder as build
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from state_builder import FIRST, SECOND, T0

from pollux.errors import ConfigError
from pollux.verify import figures_of, read_record, run_checks


@pytest.fixture
def state(tmp_path: Path) -> Path:
    return build.write_good_state(tmp_path / "state")


def failed(state: Path) -> dict[str, str]:
    checks = run_checks(read_record(state), build.equal_split)
    return {check.name: check.explanation for check in checks if not check.ok}


def test_a_good_run_passes_every_check(state: Path) -> None:
    assert failed(state) == {}


def test_figures_of_a_good_run(state: Path) -> None:
    first, second = figures_of(read_record(state))
    assert (first.name, first.state, first.resizes, first.moves) == ("first", "success", 1, 0)
    assert first.jct_s == pytest.approx(122)
    assert first.restart_s == pytest.approx(65 - 61.5), (
        "signal to first new step; the first start is no restart"
    )
    assert [gpus for _, gpus in first.allocations] == [0, 4, 2, 0]
    assert [t_s for t_s, _ in first.allocations] == pytest.approx([1, 3, 64, 121])
    assert second.submitted_s == pytest.approx(51)
    assert second.restart_s == pytest.approx(126 - 122)
    assert second.mlflow_run_id == "r1"


def double_booked(root: Path) -> None:
    path = root / "jobs" / SECOND / "events-0-0.jsonl"
    rows = build.read_lines(path)
    rows[0]["t_unix_s"] = T0 + 62.0
    build.write_lines(path, rows)


def step_falls(root: Path) -> None:
    path = root / "jobs" / FIRST / "events-1-1.jsonl"
    rows = build.read_lines(path)
    rows[-2]["step"] = 91
    build.write_lines(path, rows)


def resumed_two_checkpoints_back(root: Path) -> None:
    for rank in (0, 1):
        path = root / "jobs" / FIRST / f"events-1-{rank}.jsonl"
        rows = build.read_lines(path)
        rows[1] |= {"step": 50, "progress": 60.0}
        build.write_lines(path, rows)


def resumed_from_nowhere(root: Path) -> None:
    for rank in (0, 1):
        path = root / "jobs" / FIRST / f"events-1-{rank}.jsonl"
        rows = build.read_lines(path)
        rows[1] |= {"step": 90, "progress": 110.0}
        build.write_lines(path, rows)


def never_resumed(root: Path) -> None:
    path = root / "jobs" / FIRST / "events-1-0.jsonl"
    build.write_lines(path, [row for row in build.read_lines(path) if row["event"] != "resume"])


def altered_reason(root: Path) -> None:
    path = root / "decisions" / "2" / "decision.json"
    build.edit(path, lambda content: content["jobs"][FIRST].update(reason="because"))


def altered_objective(root: Path) -> None:
    build.edit(root / "decisions" / "3" / "decision.json", lambda content: content.update(objective=2.0))


def placed_elsewhere_than_decided(root: Path) -> None:
    path = root / "jobs" / SECOND / "driver.jsonl"
    rows = build.read_lines(path)
    rows[2]["decision"] = 1
    build.write_lines(path, rows)


def placed_elsewhere_than_driven(root: Path) -> None:
    path = root / "jobs" / SECOND / "driver.jsonl"
    rows = build.read_lines(path)
    rows[2]["placement"] = {"node-0": 2}
    build.write_lines(path, rows)


def resize_without_decision(root: Path) -> None:
    """Decision 3 is gone, and the driver's start names decision 2, which gave another placement."""
    path = root / "jobs" / SECOND / "driver.jsonl"
    rows = build.read_lines(path)
    build.write_lines(
        path, [row for row in rows if not (row["event"] == "start" and row["incarnation"] == 1)]
    )


def task_failed(root: Path) -> None:
    path = root / "airflow-export.json"
    build.edit(path, lambda content: content["task_instances"][0].update(state="failed"))


def task_unknown(root: Path) -> None:
    build.edit(root / "airflow-export.json", lambda content: content["task_instances"].pop())


def no_export(root: Path) -> None:
    (root / "airflow-export.json").unlink()


def decided_outside_the_schedule(root: Path) -> None:
    build.edit(root / "airflow-export.json", lambda content: content["dag_runs"].pop(1))


def run_missing(root: Path) -> None:
    build.sql(root, "DELETE FROM tags WHERE run_uuid = 'r1'")


def run_deleted(root: Path) -> None:
    build.sql(root, "UPDATE runs SET lifecycle_stage = 'deleted' WHERE run_uuid = 'r1'")


def run_twice(root: Path) -> None:
    build.sql(root, "UPDATE tags SET value = (SELECT value FROM tags WHERE run_uuid = 'r0')")


def run_still_running(root: Path) -> None:
    build.sql(root, "UPDATE runs SET status = 'RUNNING' WHERE run_uuid = 'r0'")


def run_of_another_job(root: Path) -> None:
    build.edit(root / "jobs" / FIRST / "job.json", lambda content: content.update(mlflow_run_id="r7"))


def no_database(root: Path) -> None:
    (root / "mlflow" / "mlflow.db").unlink()


def broken_database(root: Path) -> None:
    (root / "mlflow" / "mlflow.db").write_bytes(b"no database" * 1000)


def metric_missing(root: Path) -> None:
    build.sql(root, "DELETE FROM latest_metrics WHERE key = 'pgns' AND run_uuid = 'r0'")


def metric_not_a_number(root: Path) -> None:
    build.sql(root, "UPDATE latest_metrics SET is_nan = 1 WHERE key = 'goodput'")


def metric_infinite(root: Path) -> None:
    build.sql(root, "UPDATE latest_metrics SET value = 1.797e308 WHERE key = 'goodput'")


def target_missed(root: Path) -> None:
    build.sql(root, "UPDATE latest_metrics SET value = 0.89 WHERE key = 'accuracy'")


def target_never_measured(root: Path) -> None:
    build.sql(root, "DELETE FROM latest_metrics WHERE key = 'accuracy' AND run_uuid = 'r1'")


def no_completion_marker(root: Path) -> None:
    (root / "jobs" / FIRST / "complete.json").unlink()


def marker_of_another_job(root: Path) -> None:
    shutil.copy(root / "jobs" / SECOND / "complete.json", root / "jobs" / FIRST / "complete.json")


def garbage_among_events(root: Path) -> None:
    path = root / "jobs" / FIRST / "events-0-1.jsonl"
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0], "\x1b[2Jgarbage", *lines[1:]]) + "\n")


def unknown_event(root: Path) -> None:
    path = root / "jobs" / FIRST / "driver.jsonl"
    path.write_text(path.read_text() + '{"event": "holiday"}\n')


def job_never_ran(root: Path) -> None:
    extra = {
        "name": "third",
        "dag_run_id": "run-third",
        "metric": "m",
        "target": 1.0,
        "higher_is_better": True,
    }
    build.edit(root / "expectations.json", lambda content: content["jobs"].append(extra))


def events_lost(root: Path) -> None:
    for path in (root / "jobs" / FIRST).glob("events-*.jsonl"):
        path.unlink()


def an_incarnation_lost(root: Path) -> None:
    """Without it nothing in the events tells that the second job ever had other GPUs than in the end."""
    for path in (root / "jobs" / SECOND).glob("events-0-*.jsonl"):
        path.unlink()
    for path in (root / "jobs" / SECOND).glob("events-1-*.jsonl"):
        build.write_lines(path, [row for row in build.read_lines(path) if row["event"] != "resume"])


def the_last_incarnation_lost(root: Path) -> None:
    for path in (root / "jobs" / SECOND).glob("events-1-*.jsonl"):
        path.unlink()


def the_end_of_the_events_lost(root: Path) -> None:
    for path in (root / "jobs" / FIRST).glob("events-1-*.jsonl"):
        build.write_lines(path, build.read_lines(path)[:-1])


def one_rank_lost(root: Path) -> None:
    (root / "jobs" / FIRST / "events-0-2.jsonl").unlink()


@pytest.mark.parametrize(
    ("break_it", "want"),
    [
        (events_lost, {"jobs", "resizes"}),
        (an_incarnation_lost, {"jobs", "resizes"}),
        (the_last_incarnation_lost, {"jobs", "resizes"}),
        (the_end_of_the_events_lost, {"jobs"}),
        (one_rank_lost, {"jobs", "placements", "resizes"}),
        (double_booked, {"slots"}),
        (step_falls, {"steps"}),
        (resumed_two_checkpoints_back, {"steps"}),
        (resumed_from_nowhere, {"steps"}),
        (never_resumed, {"steps"}),
        (altered_reason, {"replay"}),
        (altered_objective, {"replay"}),
        (placed_elsewhere_than_decided, {"placements"}),
        (placed_elsewhere_than_driven, {"placements"}),
        (resize_without_decision, {"placements", "resizes"}),
        (task_failed, {"tasks"}),
        (task_unknown, {"tasks"}),
        (no_export, {"tasks"}),
        (decided_outside_the_schedule, {"schedule"}),
        (run_missing, {"runs"}),
        (run_deleted, {"runs"}),
        (run_twice, {"runs"}),
        (run_still_running, {"runs"}),
        (run_of_another_job, {"runs"}),
        (no_database, {"runs"}),
        (broken_database, {"runs"}),
        (metric_missing, {"metrics"}),
        (metric_not_a_number, {"metrics"}),
        (metric_infinite, {"metrics"}),
        (target_missed, {"target"}),
        (target_never_measured, {"target"}),
        (no_completion_marker, {"completion"}),
        (marker_of_another_job, {"completion"}),
        (garbage_among_events, {"files"}),
        (unknown_event, {"files"}),
        (job_never_ran, {"jobs"}),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_what_is_wrong_fails_its_own_check(state: Path, break_it, want: set[str]) -> None:
    break_it(state)
    found = failed(state)
    assert set(found) == want
    assert all(text.isprintable() for text in found.values())


def test_a_run_without_a_shrink_and_a_grow_fails(tmp_path: Path) -> None:
    state = build.write_good_state(tmp_path)
    shutil.rmtree(state / "jobs" / SECOND)
    (state / "expectations.json").unlink()
    assert failed(state)["resizes"] == "the policy never grew a job"


def test_a_job_that_trains_alone_has_nobody_to_shrink_for(state: Path) -> None:
    shutil.rmtree(state / "jobs" / FIRST)
    (state / "expectations.json").unlink()
    assert "resizes" not in failed(state)


def test_the_last_line_of_a_killed_worker_may_be_torn(state: Path) -> None:
    path = state / "jobs" / FIRST / "events-0-3.jsonl"
    path.write_bytes(path.read_bytes()[:-30])
    record = read_record(state)
    assert failed(state) == {}
    assert record.remarks == (f"jobs/{FIRST}/events-0-3.jsonl: the last line was cut off",)


def test_a_gang_stopped_before_its_first_step_may_lack_ranks(state: Path) -> None:
    """Incarnation 1 of the first job is killed while one of its two ranks still loads its libraries."""
    folder = state / "jobs" / FIRST
    for rank in (0, 1):
        rows = build.read_lines(folder / f"events-1-{rank}.jsonl")
        for row in rows:
            row["t_unix_s"] = max(row["t_unix_s"], T0 + 64.5)
        build.write_lines(folder / f"events-2-{rank}.jsonl", rows)
    build.write_lines(folder / "events-1-0.jsonl", build.read_lines(folder / "events-1-0.jsonl")[:1])
    (folder / "events-1-1.jsonl").unlink()
    for rank in (0, 1):
        (folder / "outcomes" / f"1-{rank}.json").rename(folder / "outcomes" / f"2-{rank}.json")
    for path in (folder / "complete.json", *folder.glob("outcomes/2-*.json")):
        build.edit(path, lambda content: content.update(incarnation=2))
    rows = build.read_lines(folder / "driver.jsonl")
    again = rows[6] | {"incarnation": 2, "t_unix_s": T0 + 64.4}
    build.write_lines(folder / "driver.jsonl", [*rows[:7], again, *rows[7:]])
    assert failed(state) == {}
    assert figures_of(read_record(state))[0].resizes == 1


def test_preemption_is_no_resize_and_waiting_is_no_restart(state: Path) -> None:
    folder = state / "jobs" / FIRST
    rows = build.read_lines(folder / "driver.jsonl")
    emptied = rows[3] | {"placement": {}, "t_unix_s": T0 + 61.3}
    given_again = rows[3] | {"t_unix_s": T0 + 62.55}
    build.write_lines(folder / "driver.jsonl", [*rows[:3], emptied, *rows[4:6], given_again, *rows[6:]])
    first = figures_of(read_record(state))[0]
    assert first.resizes == 0
    assert [gpus for _, gpus in first.allocations] == [0, 4, 0, 2, 0]
    assert first.restart_s == pytest.approx(65 - 61.5 - (62.55 - 62.2))


@pytest.mark.parametrize("name", ["", "missing", "a-file"])
def test_what_is_no_state_folder_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "a-file").touch()
    with pytest.raises(ConfigError, match="state folder"):
        read_record(tmp_path / name)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_garbage_anywhere_is_a_verdict_and_never_a_traceback(tmp_path_factory, data) -> None:
    state = build.write_good_state(tmp_path_factory.mktemp("fuzz"))
    files = sorted(path for path in state.rglob("*") if path.is_file())
    path = data.draw(st.sampled_from(files))
    content = path.read_bytes()
    kind = data.draw(st.sampled_from(["cut", "flip", "replace", "json"]))
    at = data.draw(st.integers(0, len(content) - 1))
    if kind == "cut":
        content = content[:at]
    elif kind == "flip":
        content = content[:at] + bytes([content[at] ^ data.draw(st.integers(1, 255))]) + content[at + 1 :]
    elif kind == "replace":
        content = data.draw(st.binary(max_size=50))
    else:
        odd = st.recursive(
            st.none() | st.booleans() | st.integers() | st.text(max_size=3), st.lists, max_leaves=4
        )
        content = json.dumps(data.draw(odd)).encode()
    path.write_bytes(content)
    checks = run_checks(read_record(state), build.equal_split)
    assert all(check.explanation for check in checks)


def test_a_pipe_where_a_file_should_be_is_a_verdict_and_not_waited_for(state: Path) -> None:
    marker = next(state.glob("jobs/*/complete.json"))
    marker.unlink()
    os.mkfifo(marker)
    assert "no regular file" in failed(state)["files"]


def on_kubernetes(root: Path) -> None:
    """There a job counts its GPUs from 0, whatever else runs on the node."""
    build.edit(root / "expectations.json", lambda content: content.update(cluster="kubernetes"))


def test_on_kubernetes_jobs_may_use_the_same_numbers_on_a_node_that_has_room_for_both(state: Path) -> None:
    on_kubernetes(state)
    assert failed(state) == {}
    beside = state / "jobs" / SECOND / "events-0-0.jsonl"
    rows = build.read_lines(beside)
    for row in rows:
        row["node"] = "node-0"
    build.write_lines(beside, rows)
    assert "3 slots of node-0 are held at once" in failed(state)["slots"]
    assert "it has 2" in failed(state)["slots"]


def test_on_kubernetes_a_job_never_has_one_number_twice(state: Path) -> None:
    on_kubernetes(state)
    path = state / "jobs" / FIRST / "events-1-0.jsonl"
    rows = build.read_lines(path)
    rows[0]["t_unix_s"] = T0 + 62.1
    build.write_lines(path, rows)
    assert "slot 0 of node-0" in failed(state)["slots"]
