"""The demo on a cluster of its own: the same jobs, summary and checks as on one machine."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pollux.policy import decide
from pollux.verify import read_record, run_checks

pytestmark = [pytest.mark.needs("kube"), pytest.mark.e2e, pytest.mark.timeout(900)]


def test_two_jobs_share_the_cluster_and_every_check_holds(tmp_path: Path) -> None:
    if not os.environ.get("POLLUX_KUBE"):
        pytest.skip("needs kube: real nodes come from POLLUX_KUBE's node-up.sh")
    environ = {name: text for name, text in os.environ.items() if name != "KUBECONFIG"}
    command = [
        str(Path(sys.executable).with_name("pollux")),
        "demo",
        "--kubernetes",
        "--quick",
        "--minutes",
        "0.8",
    ]
    command += ["--state", "state", "--summary", "summary.json", "--picture", "picture.png"]
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=840)
    assert done.returncode == 0, f"{done.stdout[-6000:]}\n{done.stderr[-3000:]}"

    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["ok"]
    assert summary["double_booked_slots"] == 0
    assert {job["state"] for job in summary["jobs"]} == {"success"}
    checks = run_checks(read_record(tmp_path / "state"), decide)
    assert [check.explanation for check in checks if not check.ok] == []
    assert not (tmp_path / "state.cluster").exists(), "its cluster is gone"
