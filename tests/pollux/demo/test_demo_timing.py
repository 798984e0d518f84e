"""Timing over a real local cluster: a script that does not run is told at once; nothing is left behind."""

from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from pollux.demo.jobs import DIGITS, quick_plan
from pollux.demo.timing import time_scripts
from pollux.errors import DemoError

pytestmark = pytest.mark.slow


def test_a_script_that_raises_ends_the_timing_with_its_traceback(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("raise ValueError('no data on this machine')\n")
    plan = replace(quick_plan(), jobs=(replace(DIGITS, script="broken.py"),))
    with pytest.raises(DemoError, match=r"broken\.py does not run") as caught:
        time_scripts(plan, scripts=tmp_path, say=lambda _: None)
    assert "ValueError: no data on this machine" in str(caught.value)
    assert [child.cmdline() for child in psutil.Process().children(recursive=True)] == []
