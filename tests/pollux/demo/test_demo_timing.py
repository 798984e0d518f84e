"""Timing over a real local cluster: a script that does not run is told at once; nothing is left behind."""

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from pollux.demo.jobs import DIGITS, quick_plan
from pollux.demo.timing import time_scripts
from pollux.errors import DemoError
from pollux.stack.processes import is_alive, process_info, wait_until

pytestmark = pytest.mark.slow


def test_a_script_that_raises_ends_the_timing_with_its_traceback(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("raise ValueError('no data on this machine')\n")
    before = set(descendants(os.getpid()))
    plan = replace(quick_plan(), jobs=(replace(DIGITS, script="broken.py"),))
    with pytest.raises(DemoError, match=r"broken\.py does not run") as caught:
        time_scripts(plan, scripts=tmp_path, say=lambda _: None)
    assert "ValueError: no data on this machine" in str(caught.value)
    assert set(descendants(os.getpid())) <= before


def descendants(pid: int) -> list[psutil.Process]:
    return psutil.Process(pid).children(recursive=True)


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupted_demo_leaves_no_process(tmp_path: Path, signum: signal.Signals) -> None:
    """Interrupted while a worker of the timing trains; even a kill that cannot be caught leaves nothing."""
    command = [str(Path(sys.executable).with_name("pollux")), "demo", "--quick", "--state", "state"]
    demo = subprocess.Popen(
        command,
        cwd=tmp_path,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert wait_until(lambda: any(tmp_path.glob("pollux-timing-*/jobs/*/events-1-0.jsonl")), 90)
        found = [info.process for child in descendants(demo.pid) if (info := process_info(child.pid))]
        assert len(found) >= 3, "the local cluster, a launcher and a worker"
        demo.send_signal(signum)
        _, errors = demo.communicate(timeout=60)
        assert wait_until(lambda: not any(map(is_alive, found)), 60)
    finally:
        demo.kill()
        demo.wait()
    if signum is not signal.SIGKILL:
        assert demo.returncode == 130
        assert "interrupted" in errors
        assert not any(tmp_path.glob("pollux-timing-*"))
