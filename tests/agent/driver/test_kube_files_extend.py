"""A driver pod that is given a done job with more to do lets it go on; with nothing more it stays done."""

from dataclasses import replace
from pathlib import Path

import pytest

from pollux_agent.driver import DriverState
from pollux_agent.driver.kube.files import DriverFiles
from pollux_agent.protocol import JobFolder, JobSpec

SPEC = JobSpec(name="job", script="x.py", initial_batch_size=8, max_local_batch_size=8, max_gpus=4, epochs=3)


@pytest.mark.parametrize(("epochs", "complete"), [(5, False), (3, True), (2, True)])
def test_more_epochs_take_the_completion_marker_away(tmp_path: Path, epochs: int, complete: bool) -> None:
    folder = JobFolder(tmp_path)
    files = DriverFiles(folder)
    files.begin(SPEC, None, fresh=False, now_unix_s=1.0)
    folder.complete.write_text("{}")
    done = DriverState(phase="waiting", incarnation=1)
    state = files.begin(replace(SPEC, epochs=epochs), done, fresh=False, now_unix_s=2.0)
    assert state.phase == "waiting"
    assert folder.complete.exists() is complete
