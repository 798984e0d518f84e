"""``pollux-agent bench efficiency`` on the recorded trainings."""

import json
import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pollux_agent.cli import app


@pytest.mark.needs("traces")
def test_the_efficiency_of_recorded_trainings_is_predicted_from_one_batch_size(tmp_path: Path) -> None:
    """Fig. 2 of Pollux shows the two agree; here the median over the epochs is within 10 %."""
    picture = tmp_path / "efficiency.png"
    command = [
        "bench",
        "efficiency",
        "--traces",
        os.environ["POLLUX_TRACES"],
        "--plot",
        str(picture),
        "--json",
    ]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    rows = json.loads(done.stdout)["rows"]
    assert {row["application"] for row in rows} >= {"cifar10", "imagenet", "bert"}
    for row in rows:
        assert row["median_error"] <= 0.10, row
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_what_is_wrong_is_named(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["bench", "efficiency", "--traces", str(tmp_path)])
    assert done.exit_code == 2
    assert str(tmp_path / "apps" / "bert") in done.stderr
