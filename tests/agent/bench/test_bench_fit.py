"""``pollux-agent bench fit``: the bars on errors; times are for the command, not for a test."""

import json
import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pollux_agent.bench.fitting import POINTS, split
from pollux_agent.bench.traces import StepTime, observations
from pollux_agent.cli import app


@pytest.mark.needs("traces")
def test_recorded_jobs_are_predicted_on_placements_that_were_not_fitted(tmp_path: Path) -> None:
    traces = os.environ["POLLUX_TRACES"]
    done = CliRunner().invoke(
        app, ["bench", "fit", "--traces", traces, "--peers", str(tmp_path / "none"), "--json"]
    )
    assert done.exit_code == 0, done.output
    figures = json.loads(done.stdout)
    for name, errors in figures["apps"].items():
        assert errors["mape"] <= 0.10, name
        assert errors["scalability_mape"] <= 0.13, name
    assert figures["in_sample_mape"] <= 0.10
    assert "adaptdl_ratio" not in figures
    assert "make peers" in done.stderr


def test_traces_that_are_not_there_are_named(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["bench", "fit", "--traces", str(tmp_path)])
    assert done.exit_code == 2
    assert str(tmp_path / "apps" / "bert") in done.stderr


def rows() -> list[StepTime]:
    return [
        StepTime(
            placement=placement,
            num_nodes=len(placement),
            num_replicas=sum(map(int, placement)),
            local_batch_size=local,
            step_s=0.1 * local,
            sync_s=0.01,
        )
        for placement in ("1", "2", "3", "4", "11", "12", "21", "22", "44", "111", "112", "211", "222")
        for local in (8, 16, 32, 64, 128, 256, 512)
    ]


@pytest.mark.parametrize("seed", range(5))
def test_half_of_the_placements_are_held_out_and_none_of_them_is_fitted(seed: int) -> None:
    parted = split(rows(), seed)
    held_out = {row.placement for row in parted.held_out}
    assert len(held_out) in (6, 7)
    known = observations(row for row in rows() if row.placement not in held_out)
    assert all(seen in known for seen in parted.fitted)
    assert len(parted.fitted) == min(POINTS, len(known))
    again = split(rows(), seed)
    assert again == parted


def test_equal_configurations_are_one_observation() -> None:
    seen = observations(row for row in rows() if row.placement in ("12", "21") and row.local_batch_size == 8)
    assert len(seen) == 1
    assert (seen[0].num_nodes, seen[0].num_replicas) == (2, 3)
    assert seen[0].accum_step_time_s == pytest.approx(0.79)
