"""The main job through the real stack, in small: two trainings, one shrunk, one grown, all of it verified."""

import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

POLLUX = str(Path(sys.executable).with_name("pollux"))


def run(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [POLLUX, *arguments], cwd=folder, capture_output=True, text=True, check=False, timeout=840
    )


def processes_of(folder: Path) -> list[str]:
    """Command lines of processes that name the folder in their arguments or environment."""
    found = []
    for process in psutil.process_iter():
        try:
            told = [*process.cmdline(), *process.environ().values()]
            if process.pid != os.getpid() and any(str(folder / "state") in text for text in told):
                found.append(" ".join(process.cmdline()))
        except psutil.Error:
            continue
    return found


def test_two_jobs_share_the_cluster_and_the_run_can_be_verified(tmp_path: Path) -> None:
    demo = run("demo", "--quick", "--state", "state", folder=tmp_path)
    assert demo.returncode == 0, demo.stdout + demo.stderr
    assert processes_of(tmp_path) == []

    summary = json.loads((tmp_path / "demo-summary.json").read_text())
    assert summary["ok"] is True
    assert [(job["name"], job["state"]) for job in summary["jobs"]] == [
        ("digits", "success"),
        ("digits-again", "success"),
    ]
    assert summary["double_booked_slots"] == 0
    assert summary["decisions"] > 3
    assert 0 < summary["peak_memory_bytes"] < 6e9
    for job in summary["jobs"]:
        assert job["final_metric"] >= job["target"]
        assert (job["allocations"][0]["gpus"], job["allocations"][-1]["gpus"]) == (0, 0)
    assert sum(job["resizes"] for job in summary["jobs"]) >= 2
    assert (tmp_path / "demo-allocation.png").stat().st_size > 10_000

    verified = run("verify", "state", "--json", folder=tmp_path)
    assert verified.returncode == 0, verified.stdout + verified.stderr
    assert {check["name"] for check in json.loads(verified.stdout)["checks"]} >= {
        *("files", "jobs", "slots", "steps", "replay", "placements", "resizes"),
        *("tasks", "schedule", "runs", "metrics", "target", "completion"),
    }
