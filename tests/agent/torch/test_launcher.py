"""The launcher's workers: forked ready to train, ended together, each with its own last words."""

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from pollux_agent.protocol import JobFolder, JobSpec, Outcome, decode, encode
from pollux_agent.settings import WorkerSettings, environment

TIMEOUT_S = 150


ARGUMENTS = ("$$ $(HOME)", "${local_rank} $local_rank")
"""Nobody may make anything else of them."""


class Launch:
    """A job's folder and the launcher of one node with two slots."""

    def __init__(self, root: Path) -> None:
        self.folder = JobFolder(root / "job")
        self.folder.root.mkdir()

    def run(self, text: str) -> tuple[int, str]:
        """Status and output of a launcher whose workers run a script with this text."""
        launcher = self.start(text)
        output, _ = launcher.communicate(timeout=TIMEOUT_S)
        return launcher.returncode, output

    def start(self, text: str, *, grace_s: float = 30.0) -> subprocess.Popen[str]:
        """That launcher as it begins; ``grace_s`` are between its SIGTERM and its workers' SIGKILL."""
        script = self.folder.root / "script.py"
        script.write_text(text)
        spec = JobSpec(
            name="job",
            script=str(script),
            arguments=ARGUMENTS,
            initial_batch_size=8,
            max_local_batch_size=8,
            max_gpus=2,
        )
        self.folder.spec.write_text(encode(spec))
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        settings = WorkerSettings(
            job_id="job-1",
            job_dir=self.folder.root,
            incarnation=0,
            node="node-0",
            slots=(0, 1),
            placement={"node-0": 2},
            rendezvous=f"127.0.0.1:{port}",
            parent_pid=os.getpid(),
            grace_s=grace_s,
        )
        return subprocess.Popen(
            [sys.executable, "-m", "pollux_agent.cli", "launch"],
            env=os.environ | environment(settings),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def outcomes(self) -> dict[int, Outcome]:
        found: dict[int, Any] = {}
        for rank in range(2):
            path = self.folder.outcome(0, rank)
            if path.exists():
                found[rank] = decode(Outcome, path.read_bytes())
        return found


@pytest.fixture
def launch(tmp_path: Path) -> Launch:
    return Launch(tmp_path)


def test_a_rank_that_is_killed_takes_one_along_within_30_s_that_waits_for_ever(launch: Launch) -> None:
    text = """
import os, pathlib, signal, time
rank = int(os.environ["RANK"])
pathlib.Path(__file__).with_name(f"pid-{rank}").write_text(str(os.getpid()))
if rank == 1:
    while not pathlib.Path(__file__).with_name("pid-0").exists():
        time.sleep(0.05)
    pathlib.Path(__file__).with_name("killed").write_text(str(time.time()))
    os.kill(os.getpid(), signal.SIGKILL)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
while True:
    time.sleep(1)
"""
    status, _ = launch.run(text)
    assert status == 1
    assert time.time() - float((launch.folder.root / "killed").read_text()) < 30
    for rank in range(2):
        assert not psutil.pid_exists(int((launch.folder.root / f"pid-{rank}").read_text()))


SAVES_FOR_5_S = """
import os, pathlib, signal, time
rank, here = int(os.environ["RANK"]), pathlib.Path(__file__).parent
def save(*_):
    time.sleep(5)
    (here / f"saved-{rank}").touch()
    os._exit(0)
signal.signal(signal.SIGTERM, save)
(here / f"ready-{rank}").touch()
while True:
    time.sleep(1)
"""


@pytest.mark.parametrize(("grace_s", "want"), [(40.0, 2), (1.0, 0)], ids=["enough grace", "too little"])
def test_workers_have_the_pods_grace_period_to_save_and_no_more(
    launch: Launch, grace_s: float, want: int
) -> None:
    """torch's own time-out, 30 s whatever the pod has, would cut a longer save off."""
    launcher = launch.start(SAVES_FOR_5_S, grace_s=grace_s)
    deadline = time.monotonic() + TIMEOUT_S
    while len(list(launch.folder.root.glob("ready-*"))) < 2:
        assert launcher.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    launcher.terminate()
    launcher.communicate(timeout=TIMEOUT_S)
    assert len(list(launch.folder.root.glob("saved-*"))) == want


def test_a_failing_script_keeps_its_own_traceback(launch: Launch) -> None:
    text = "def broken():\n    raise ValueError('no such data set')\n\nbroken()\n"
    status, output = launch.run(text)
    assert status == 1
    outcomes = launch.outcomes()
    assert outcomes
    for outcome in outcomes.values():
        assert outcome.kind == "failed"
        assert outcome.error == "ValueError: no such data set"
        assert "in broken" in outcome.traceback and "runpy" not in outcome.traceback
    assert "ValueError: no such data set" in output
    assert "multiprocessing" not in output


def test_a_worker_is_as_a_script_finds_itself_that_python_runs(launch: Launch) -> None:
    """Its own folder first on the path, the usual way to start processes, random numbers of its own."""
    text = """
import json, multiprocessing, os, pathlib, random, sys
import numpy
found = {
    "name": __name__,
    "argv": sys.argv,
    "path": sys.path[0],
    "start": multiprocessing.get_start_method(),
    "random": [random.random(), float(numpy.random.rand())],
}
folder = pathlib.Path(__file__).parent
(folder / f"found-{os.environ['RANK']}").write_text(json.dumps(found))
"""
    launch.run(text)
    first, second = (json.loads((launch.folder.root / f"found-{rank}").read_text()) for rank in range(2))
    script = launch.folder.root / "script.py"
    assert first["name"] == "__main__"
    assert first["argv"] == [str(script), *ARGUMENTS]
    assert first["path"] == str(script.parent)
    assert first["start"] == "fork"
    assert all(one != two for one, two in zip(first["random"], second["random"], strict=True))


def test_a_worker_that_leaves_without_a_word_ends_the_launcher(launch: Launch) -> None:
    status, _ = launch.run("import os\n\nos._exit(0)\n")
    assert status == 0
    assert launch.outcomes() == {}
