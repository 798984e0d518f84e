"""A loop that is left without a word: the end of the process says that the training is not complete."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("left_script.py")
SAID = "before its training is complete"

WAYS = {
    "break": (0, "the script ends at step 8, before its training is complete; there is no checkpoint."),
    "break behind a checkpoint": (
        0,
        "ends at step 16, before its training is complete; the checkpoint of step 8 ",
    ),
    "break twice": (0, "ends at step 8, "),
    "break on two ranks": (0, "ends at step 8, "),
    "break and fork": (0, "ends at step 8, "),
    "raise": (1, "ends at step 4, "),
    "exit": (0, "ends at step 4, "),
    "finish": (0, None),
    "stop": (143, None),
    "complete": (0, None),
    "made alone": (0, None),
    "break, then complete": (0, None),
}


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str]]:
    """Exit status and output of each way, by way."""
    folder = tmp_path_factory.mktemp("left")
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(folder), *WAYS],
        env=os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    statuses = [int(line) for line in done.stdout.split()]
    assert len(statuses) == len(WAYS), done.stderr
    return {
        way: (status, (folder / f"{way}.out").read_text()) for way, status in zip(WAYS, statuses, strict=True)
    }


@pytest.mark.parametrize("way", WAYS)
def test_a_training_that_is_left_says_so_once_and_one_that_is_not_says_nothing(
    way: str, ends: dict[str, tuple[int, str]]
) -> None:
    (status, said), (want_status, want) = ends[way], WAYS[way]
    assert status == want_status, said
    assert said.count(SAID) == (want is not None), said
    assert want is None or (want in said and "job.finish()" in said and "job.stop()" in said)
