"""``pollux solve``: a saved snapshot in, decision and plan out, and clear words for a bad file."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from snapshot_builder import make_job, make_snapshot, new_job
from typer.testing import CliRunner

from pollux.cli.solve import app
from pollux.policy import decide
from pollux.snapshot import Decision, Snapshot
from pollux_agent.protocol import encode, from_plain, to_plain


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "snapshot.json"
    path.write_text(encode(snapshot()), encoding="utf-8")
    return path


def snapshot() -> Snapshot:
    return make_snapshot([make_job("job-a", name="digits", placement={"node-0": 1}), new_job("job-b")])


def test_json_holds_the_decision_and_the_plan(saved: Path) -> None:
    result = CliRunner().invoke(app, ["solve", str(saved), "--json"])
    assert result.exit_code == 0
    answer = json.loads(result.stdout)
    assert from_plain(Decision, answer["decision"]) == decide(snapshot())
    assert {action["job_id"] for action in answer["plan"]} == {"job-a", "job-b"}


def test_the_table_shows_who_gets_what_and_why(saved: Path) -> None:
    result = CliRunner().invoke(app, ["solve", str(saved)], env={"COLUMNS": "200"})
    assert result.exit_code == 0
    for text in ("digits", "job-b", "started on 1 GPU", "grown 1 -> ", "plan, in this order"):
        assert text in result.stdout


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"interval_s": -1}, "interval_s"),
        ({"nodes": [{"name": "n", "gpus": "two"}]}, "nodes.0.gpus"),
        ({"nodes": [{"name": "n", "gpus": 10**9}]}, "nodes.0.gpus"),
        ({"nodes": [{"name": "n", "gpus": 1}, {"name": "n", "gpus": 2}]}, "nodes: 'n' is there twice"),
        ({"schema": 2}, "schema: version 2 is not one that this program reads"),
        ({"policy": {"fairness_p": 1e9}}, "policy.fairness_p"),
        (
            {"jobs": [to_plain(make_job("a", max_gpus=2)) | {"min_gpus": 4}]},
            "jobs: 'a' has max_gpus 2, below min_gpus 4; raise max_gpus or lower min_gpus",
        ),
        ({"jobs": [to_plain(make_job("a"))] * 2}, "jobs: 'a' is there twice"),
        ({"jobs": [to_plain(make_job("a")) | {"noise_scale": float("nan")}]}, "jobs.0.noise_scale"),
        ({"jobs": [to_plain(make_job("a")) | {"placement": {"node-0": 0}}]}, "jobs.0.placement.node-0"),
        ({"jbos": []}, "jbos: unknown field"),
        ({"policy": {"name": "best"}}, "use one of pollux, sia, ours, fifo-fixed"),
    ],
)
def test_a_bad_file_is_refused_with_the_field(saved: Path, change: dict[str, object], field: str) -> None:
    saved.write_text(json.dumps(to_plain(snapshot()) | change), encoding="utf-8")
    result = CliRunner().invoke(app, ["solve", str(saved)])
    assert result.exit_code == 2
    assert str(saved) in result.stderr
    assert field in result.stderr


def test_a_file_that_is_not_there_or_no_json_is_refused(tmp_path: Path) -> None:
    missing = CliRunner().invoke(app, ["solve", str(tmp_path / "none.json")])
    assert (missing.exit_code, "none.json" in missing.stderr) == (2, True)
    (tmp_path / "half.json").write_text('{"decision": 1,')
    half = CliRunner().invoke(app, ["solve", str(tmp_path / "half.json")])
    assert (half.exit_code, "Invalid JSON" in half.stderr) == (2, True)


@pytest.mark.parametrize("command", [("solve",), ("explain", "job-a")])
def test_a_snapshot_that_no_memory_holds_is_refused_in_words(saved: Path, command: tuple[str, ...]) -> None:
    nodes = [{"name": f"n{number}", "gpus": 1024} for number in range(2000)]
    saved.write_text(json.dumps(to_plain(snapshot()) | {"nodes": nodes}), encoding="utf-8")
    limited = (
        "import resource; resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30)); "
        "from pollux.cli import app; app()"
    )
    run = subprocess.run(
        [sys.executable, "-c", limited, command[0], str(saved), *command[1:]],
        env={"OPENBLAS_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert run.returncode == 1
    assert "2048000 GPUs of 2000 nodes need more memory" in run.stderr
    assert "Traceback" not in run.stderr
