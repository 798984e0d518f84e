"""Large programs: solved in parts they are as good as the relaxation allows, and the bound holds."""

import json
from dataclasses import replace

import numpy as np
import pytest
from typer.testing import CliRunner

from pollux.bench import scale
from pollux.bench.scale import PROGRAMS, make_snapshot
from pollux.cli import app
from pollux.plan import plan
from pollux.policy import assign, decide
from pollux.policy.assign import choose, relax
from pollux.snapshot import PolicySettings


@pytest.mark.parametrize("name", list(PROGRAMS))
def test_a_program_solved_in_parts_is_within_a_thousandth_of_its_relaxation(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    instance = PROGRAMS[name](make_snapshot(256, seed=1))
    monkeypatch.setattr(assign, "_WHOLE_PROGRAM", 0)
    choice = choose(instance.options, instance.gain, must=instance.must)
    bound = relax(instance.options, instance.gain, must=instance.must).objective
    assert choice.bound >= bound * (1 - 1e-6)
    assert choice.bound <= bound * 1.001
    assert bound * 0.998 <= choice.gain <= bound * (1 + 1e-6)
    taken = choice.option[choice.option >= 0]
    used = np.zeros(len(instance.options.limit))
    entry = np.isin(instance.options.entry_option, taken)
    np.add.at(used, instance.options.entry_row[entry], instance.options.entry_amount[entry])
    assert np.all(used <= instance.options.limit)
    assert len(set(instance.options.job[taken].tolist())) == len(taken)


def test_the_snapshots_are_seeded_busy_and_can_be_decided() -> None:
    snapshot = make_snapshot(128, seed=4)
    assert snapshot == make_snapshot(128, seed=4)
    assert snapshot != make_snapshot(128, seed=5)
    assert sum(node.gpus for node in snapshot.nodes) == 128
    assert len(snapshot.jobs) == round(0.6 * 128)
    assert sum(job.num_gpus for job in snapshot.jobs) > 64
    ours = replace(snapshot, policy=PolicySettings(name="ours"))
    assert plan(ours, decide(ours))


def test_the_command_prints_one_row_for_each_size_and_policy() -> None:
    result = CliRunner().invoke(app, ["bench", "scale", "--gpus", "64,128", "--json"])
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout)
    assert [(row["gpus"], row["policy"]) for row in rows] == [
        (size, name) for size in (64, 128) for name in ("sia", "ours")
    ]
    assert all(row["objective_ratio"] > 0.99 and row["decide_s"] > 0 and row["lp_s"] > 0 for row in rows)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--gpus", "64,100"], "--gpus has 100; use multiples of 64 from 64 to 65536"),
        (["--gpus", "64000000000"], "--gpus has 64000000000; use multiples of 64 from 64 to 65536"),
        (["--gpus", "-64"], "--gpus has -64; use"),
        (["--gpus", "many"], "whole numbers"),
        (["--policies", "best"], "use sia or ours"),
    ],
)
def test_bad_input_is_refused_with_the_fix(arguments: list[str], words: str) -> None:
    result = CliRunner().invoke(app, ["bench", "scale", *arguments])
    assert result.exit_code == 2
    assert words in result.output
    assert "jobs" not in result.output, "nothing was measured before"


def test_a_relaxation_that_had_to_be_ended_bounds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    instance = PROGRAMS["ours"](make_snapshot(64, seed=1))
    bound = relax(instance.options, instance.gain, must=instance.must)
    monkeypatch.setattr(scale, "relax", lambda *_, **__: replace(bound, cut_short=True))
    (row,) = scale.measure((64,), policies=("ours",), seed=1)
    assert row.objective_ratio is None and row.decide_s > 0
