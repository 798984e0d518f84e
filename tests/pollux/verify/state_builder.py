"""Builds the state folder of a small run: two jobs, one shrunk for the other, one grown when it ends.

Seconds are counted from ``T0``. The jobs share two nodes of two slots::

    first   0 .. 61    4 GPUs        61 .. 120  2 GPUs on node-0
    second             50 .. 121     2 GPUs on node-1     121 .. 180  4 GPUs
"""

import json
import sqlite3
from datetime import UTC, datetime
from pathlib import Path

from pollux.cluster.base import ClusterJob, JobIdentity, JobStatus
from pollux.snapshot import Decision, Job, JobDecision, Node, Snapshot
from pollux.verify.runs import REQUIRED_METRICS
from pollux_agent.protocol import DriverEvent, Event, JobSpec, Outcome, encode

T0 = 1_700_000_000.0
FIRST, SECOND = "first-0000000001", "second-0000000002"
ALL = {"node-0": 2, "node-1": 2}
METRICS = (*REQUIRED_METRICS, "accuracy")


def equal_split(snapshot: Snapshot) -> Decision:
    """A policy for these tests: one job gets all, two jobs a node each."""
    jobs = sorted(job.job_id for job in snapshot.jobs)
    shares = [ALL] if len(jobs) == 1 else [{"node-0": 2}, {"node-1": 2}]
    given = dict(zip(jobs, shares, strict=True)) if jobs else {}
    return Decision(
        decision=snapshot.decision,
        policy="equal",
        objective=1.0,
        jobs={job: JobDecision(placement=share, reason="an equal share") for job, share in given.items()},
    )


def write_good_state(root: Path) -> Path:
    """A run in which everything is right."""
    _decisions(root)
    _first(root)
    _second(root)
    write_export(root)
    write_runs(root / "mlflow" / "mlflow.db")
    expected = [
        {
            "name": name,
            "dag_run_id": f"run-{name}",
            "metric": "accuracy",
            "target": 0.9,
            "higher_is_better": True,
        }
        for name in ("first", "second")
    ]
    (root / "expectations.json").write_text(json.dumps({"schema": 1, "jobs": expected}))
    return root


def write_events(
    root: Path, job: str, incarnation: int, placement: dict[str, list[int]], rows: list[tuple]
) -> None:
    """``rows`` are (seconds, event, step, progress); every rank writes all but the checkpoints of others, and
    how it ended.
    """
    rank = 0
    outcomes = root / "jobs" / job / "outcomes"
    outcomes.mkdir(parents=True, exist_ok=True)
    ended_s, end, step, progress = rows[-1]
    for node, slots in placement.items():
        for slot in slots:
            path = root / "jobs" / job / f"events-{incarnation}-{rank}.jsonl"
            path.parent.mkdir(parents=True, exist_ok=True)
            events = [
                Event(
                    t_unix_s=T0 + t, event=name, node=node, slots=(slot,), step=s, progress=p, batch_size=64
                )
                for t, name, s, p in rows
                if rank == 0 or name != "checkpoint"
            ]
            path.write_text("".join(encode(event) + "\n" for event in events))
            outcome = Outcome(
                kind="done" if end == "done" else "interrupted",
                job_id=job,
                incarnation=incarnation,
                rank=rank,
                time_unix_s=T0 + ended_s,
                step=step,
                steps_taken=step - next((s for _, name, s, _ in rows if name == "resume"), 0),
                progress=progress,
            )
            (outcomes / f"{incarnation}-{rank}.json").write_text(encode(outcome))
            rank += 1


def read_lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def write_lines(path: Path, rows: list[dict]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def edit(path: Path, change) -> None:
    """Let ``change`` alter a JSON file's content in place."""
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def sql(root: Path, statement: str) -> None:
    with sqlite3.connect(root / "mlflow" / "mlflow.db") as connection:
        connection.execute(statement)


def write_export(root: Path) -> None:
    runs = [_run("pollux_schedule", f"minute-{t}", t, t + 3) for t in (0, 60, 120)]
    runs += [_run("pollux_train", "run-first", -1, 121), _run("pollux_train", "run-second", 50, 181)]
    tasks = [
        {
            "dag_id": "pollux_train",
            "dag_run_id": f"run-{name}",
            "task_id": "train",
            "map_index": -1,
            "state": "success",
            "try_number": 1,
            "start_date": _iso(1),
            "end_date": _iso(121),
            "operator": "PolluxTrainingOperator",
        }
        for name in ("first", "second")
    ]
    content = {
        "schema": 1,
        "exported_unix_s": T0 + 200,
        "schedule_dag_id": "pollux_schedule",
        "dag_runs": runs,
        "task_instances": tasks,
    }
    (root / "airflow-export.json").write_text(json.dumps(content))


def write_runs(path: Path) -> None:
    """A database with the tables of MLflow that hold runs, tags and last metrics."""
    path.parent.mkdir(parents=True)
    with sqlite3.connect(path) as db:
        db.executescript(
            "CREATE TABLE runs (run_uuid TEXT PRIMARY KEY, status TEXT, start_time INTEGER,"
            " lifecycle_stage TEXT, experiment_id INTEGER);"
            "CREATE TABLE tags (key TEXT, value TEXT, run_uuid TEXT);"
            "CREATE TABLE latest_metrics (key TEXT, value REAL, timestamp INTEGER, step INTEGER,"
            " is_nan INTEGER, run_uuid TEXT);"
        )
        for number, job in enumerate((FIRST, SECOND)):
            db.execute("INSERT INTO runs VALUES (?, 'FINISHED', ?, 'active', 1)", (f"r{number}", number))
            db.execute("INSERT INTO tags VALUES ('pollux.job_id', ?, ?)", (job, f"r{number}"))
            for key in METRICS:
                db.execute("INSERT INTO latest_metrics VALUES (?, 0.95, 1, 1, 0, ?)", (key, f"r{number}"))


def _iso(t: float) -> str:
    return datetime.fromtimestamp(T0 + t, UTC).isoformat()


def _run(dag: str, run: str, start: float, end: float) -> dict:
    return {
        "dag_id": dag,
        "dag_run_id": run,
        "state": "success",
        "run_type": "manual",
        "queued_at": _iso(start),
        "start_date": _iso(start),
        "end_date": _iso(end),
        "conf": {"anything": 1},
    }


def _decisions(root: Path) -> None:
    held = [
        (1, 1.0, {FIRST: {}}),
        (2, 61.0, {FIRST: ALL, SECOND: {}}),
        (3, 121.0, {SECOND: {"node-1": 2}}),
    ]
    for number, t, jobs in held:
        snapshot = Snapshot(
            decision=number,
            now_unix_s=T0 + t,
            interval_s=60.0,
            nodes=(Node(name="node-0", gpus=2), Node(name="node-1", gpus=2)),
            jobs=tuple(
                Job(
                    job_id=job,
                    max_gpus=4,
                    placement=placement,
                    initial_batch_size=32,
                    max_batch_size=1024,
                    max_local_batch_size=256,
                )
                for job, placement in jobs.items()
            ),
        )
        folder = root / "decisions" / str(number)
        folder.mkdir(parents=True)
        (folder / "snapshot.json").write_text(encode(snapshot))
        (folder / "decision.json").write_text(encode(equal_split(snapshot)))


def _first(root: Path) -> None:
    node_0, node_1 = {"node-0": [0, 1]}, {"node-1": [0, 1]}
    rows = [(2, "start", 0, 0.0), (4, "step", 1, 1.0), (30, "step", 50, 60.0), (30.1, "checkpoint", 50, 60.0)]
    rows += [(61, "step", 90, 110.0), (62, "checkpoint", 91, 112.0), (62.2, "stop", 91, 112.0)]
    write_events(root, FIRST, 0, node_0 | node_1, rows)
    rows = [(63, "start", 0, 0.0), (64, "resume", 91, 112.0), (65, "step", 92, 113.0)]
    rows += [(119, "step", 150, 200.0), (120, "done", 150, 200.0)]
    write_events(root, FIRST, 1, node_0, rows)
    driver = [
        (0, "submit", 0, 0, {}),
        (1.5, "allocate", 0, 1, ALL),
        (1.6, "start", 0, 1, ALL),
        (61.4, "allocate", 0, 2, {"node-0": 2}),
        (61.5, "signal", 0, 1, ALL),
        (62.5, "exit", 0, 1, ALL),
        (62.6, "start", 1, 2, {"node-0": 2}),
        (120.2, "exit", 1, 2, {}),
        (120.3, "end", 1, 2, {}),
    ]
    _job(root, FIRST, "first", 0.0, "r0", driver, step=150)


def _second(root: Path) -> None:
    node_0, node_1 = {"node-0": [0, 1]}, {"node-1": [0, 1]}
    rows = [
        (64, "start", 0, 0.0),
        (66, "step", 1, 1.0),
        (122, "step", 70, 80.0),
        (122.5, "checkpoint", 71, 81.0),
    ]
    write_events(root, SECOND, 0, node_1, [*rows, (122.7, "stop", 71, 81.0)])
    rows = [(124, "start", 0, 0.0), (125, "resume", 71, 81.0), (126, "step", 72, 82.0)]
    write_events(
        root, SECOND, 1, node_0 | node_1, [*rows, (179, "step", 190, 250.0), (180, "done", 190, 250.0)]
    )
    driver = [
        (50, "submit", 0, 0, {}),
        (61.5, "allocate", 0, 2, {"node-1": 2}),
        (63.5, "start", 0, 2, {"node-1": 2}),
        (121.5, "allocate", 0, 3, ALL),
        (122, "signal", 0, 2, {"node-1": 2}),
        (123, "exit", 0, 2, {}),
        (123.5, "start", 1, 3, ALL),
        (180.5, "exit", 1, 3, {}),
        (180.6, "end", 1, 3, {}),
    ]
    _job(root, SECOND, "second", 50.0, "r1", driver, step=190)


def _job(
    root: Path, job_id: str, name: str, t: float, run_id: str, driver: list[tuple], *, step: int
) -> None:
    folder = root / "jobs" / job_id
    job = ClusterJob(
        job_id=job_id,
        identity=JobIdentity(deployment="demo", dag_id="pollux_train", run_id=f"run-{name}", task_id="train"),
        spec=JobSpec(
            name=name, script="digits.py", initial_batch_size=32, max_local_batch_size=256, max_gpus=4
        ),
        submitted_unix_s=T0 + t,
        mlflow_run_id=run_id,
        status=JobStatus(phase="done"),
    )
    (folder / "job.json").write_text(encode(job))
    events = [
        DriverEvent(
            t_unix_s=T0 + at, event=event, incarnation=incarnation, decision=number, placement=placement
        )
        for at, event, incarnation, number, placement in driver
    ]
    (folder / "driver.jsonl").write_text("".join(encode(event) + "\n" for event in events))
    done = Outcome(kind="done", job_id=job_id, incarnation=1, rank=0, time_unix_s=T0 + 180, step=step)
    (folder / "complete.json").write_text(encode(done))
