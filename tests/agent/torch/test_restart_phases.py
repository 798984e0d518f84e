"""The seconds of a restart by phase: they add up to the time from the signal to the first new step."""

import time
from pathlib import Path

import pytest

from pollux_agent.settings import WorkerSettings
from pollux_agent.torch.restarts import PHASES, Restart


def settings(root: Path, incarnation: int, **moments: float) -> WorkerSettings:
    return WorkerSettings(
        job_id="a-1",
        job_dir=root,
        incarnation=incarnation,
        node="node-0",
        slots=(0,),
        placement={"node-0": 1},
        **moments,
    )


def test_phases_add_up_from_the_signal_to_the_first_step(tmp_path: Path) -> None:
    signal = time.time() - 20.0
    Restart(settings(tmp_path, 3)).stopped(saving_unix_s=signal + 1.0, saved_unix_s=signal + 3.0)
    restart = Restart(settings(tmp_path, 4, signal_unix_s=signal, launched_unix_s=signal + 7.0))
    restart.loaded()
    restart.first_step()
    assert tuple(restart.phases_s) == PHASES
    assert (restart.phases_s["wait"], restart.phases_s["save"]) == pytest.approx((1.0, 2.0))
    assert restart.phases_s["stop"] == pytest.approx(4.0)
    assert sum(restart.phases_s.values()) == pytest.approx(time.time() - signal, abs=1.0)


@pytest.mark.parametrize("incarnation", [2, 5])
def test_after_a_kill_only_the_phases_of_the_start_are_known(tmp_path: Path, incarnation: int) -> None:
    """What a stop before that left word of is another restart's."""
    Restart(settings(tmp_path, 3)).stopped(saving_unix_s=1.0, saved_unix_s=2.0)
    restart = Restart(settings(tmp_path, incarnation, launched_unix_s=time.time() - 5.0))
    restart.loaded()
    restart.first_step()
    assert tuple(restart.phases_s) == ("start", "load", "first_step")


def test_garbage_left_as_word_is_no_word(tmp_path: Path) -> None:
    chosen = settings(tmp_path, 1)
    chosen.folder.last_stop.write_text('{"incarnation": "x"')
    restart = Restart(chosen)
    restart.loaded()
    restart.first_step()
    assert "save" not in restart.phases_s


def test_alone_nothing_is_measured() -> None:
    restart = Restart(None)
    restart.stopped(saving_unix_s=1.0, saved_unix_s=2.0)
    restart.loaded()
    restart.first_step()
    assert restart.phases_s == {}
