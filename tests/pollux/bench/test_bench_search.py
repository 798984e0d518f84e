"""``pollux bench search``: what it compares, and its verdicts; speed itself is not tested."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from pollux.bench import search
from pollux.bench.search import Compared, compare, fitness, judge, make_snapshot, question
from pollux.cli import app
from pollux.policy.problem import SPEEDUP_FLOOR, formulate


def row(policy: str, decide_s: float, mine: float, peer_s: float | None = 1.0) -> Compared:
    return Compared(
        jobs=7,
        fairness_p=-1.0,
        seed=0,
        policy=policy,
        decide_s=decide_s,
        fitness=mine,
        peer_s=peer_s,
        peer_fitness=None if peer_s is None else 0.5,
    )


@pytest.mark.parametrize(
    ("rows", "want"),
    [
        ([row("pollux", 0.1, 0.5), row("pollux", 0.3, 0.6), row("pollux", 0.15, 0.7)], True),
        ([row("pollux", 0.25, 0.9)], False),
        ([row("pollux", 0.01, 0.49)], False),
        ([row("ours", 0.015, 0.1)], True),
        ([row("ours", 0.03, 0.9)], False),
        ([row("ours", 0.03, 0.9, None)], None),
    ],
)
def test_the_median_time_is_held_to_the_bar_and_of_the_search_its_worst_fitness_too(
    rows: list[Compared], want: bool | None
) -> None:
    (verdict,) = judge(rows)
    assert verdict.met is want


def test_fitness_is_the_power_mean_of_penalised_speed_ups() -> None:
    """Pollux Eq. 14 to 16 by hand."""
    for p in (-1.0, 1.0):
        problem = formulate(make_snapshot(7, fairness_p=p, seed=3))
        matrix = problem.present.copy()
        matrix[0] = 0
        matrix[0, 15] = 1
        speedup = problem.goodputs(matrix[None])[0] / problem.fair
        speedup[0] *= problem.factor[0]
        want = np.mean((speedup + SPEEDUP_FLOOR) ** p) ** (1 / p)
        assert fitness(problem, matrix) == pytest.approx(want, rel=1e-9)


def test_the_peer_is_asked_about_the_very_same_cluster() -> None:
    snapshot = make_snapshot(30, seed=1)
    problem = formulate(snapshot)
    asked = question(snapshot, problem, seed=1)
    assert json.loads(json.dumps(asked)) == asked
    assert sum(asked["nodes"].values()) == 64
    for job, told in zip(snapshot.jobs, asked["jobs"], strict=True):
        assert told["placement"] == dict(job.placement)
        assert told["max_replicas"] == max(job.gpu_limit, job.num_gpus)
        assert told["params"]["beta_grad"] == job.fits["gpu"].beta_grad


def test_a_stand_in_peer_that_changes_nothing_has_the_fitness_of_today(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "peer.py"
    script.write_text(
        "import json, sys\n"
        "def held(job):\n"
        "    return [name for name, gpus in job['placement'].items() for _ in range(gpus)]\n"
        "def answer(asked):\n"
        "    allocations = {job['job_id']: held(job) for job in asked['jobs']}\n"
        "    return {'seconds': [3.0, 1.0, 2.0], 'allocations': allocations}\n"
        "print(json.dumps([answer(asked) for asked in json.load(sys.stdin)]))\n"
    )
    monkeypatch.setattr(search, "SCRIPT", script)
    rows = list(compare((5,), fairness_p=(-1.0,), seeds=1, peer=Path(sys.executable)))
    problem = formulate(make_snapshot(5, seed=0))
    assert [row.policy for row in rows] == ["pollux", "ours"]
    for row in rows:
        assert row.peer_s == 2.0
        assert row.peer_fitness == pytest.approx(fitness(problem, problem.present))
    assert rows[0].fitness >= fitness(problem, problem.present)


def test_a_peer_that_fails_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "peer.py"
    script.write_text("raise SystemExit('no search here')\n")
    monkeypatch.setattr(search, "SCRIPT", script)
    with pytest.raises(subprocess.CalledProcessError, match="non-zero"):
        list(compare((2,), fairness_p=(-1.0,), seeds=1, peer=Path(sys.executable)))


def test_without_peers_ours_alone_are_timed_and_wrong_numbers_are_refused(tmp_path: Path) -> None:
    words = ["bench", "search", "--seeds", "1", "--peers", str(tmp_path / "none"), "--json"]
    done = CliRunner().invoke(app, [*words, "--jobs", "3", "--p", "-1"])
    assert done.exit_code == 0, done.output
    document = json.loads(done.stdout)
    assert [verdict["met"] for verdict in document["verdicts"]] == [None, None]
    assert all(each["peer_s"] is None and each["fitness"] > 0 for each in document["decisions"])
    for wrong in (["--jobs", "0"], ["--jobs", "few"], ["--jobs", "1001"], ["--p", "0"], ["--p", "nan"]):
        assert CliRunner().invoke(app, [*words, *wrong]).exit_code == 2


def test_the_same_seed_gives_the_same_snapshot() -> None:
    assert make_snapshot(7, seed=2) == make_snapshot(7, seed=2) != make_snapshot(7, seed=3)
    p_one = make_snapshot(7, fairness_p=1.0, seed=2)
    assert replace(p_one, policy=make_snapshot(7, seed=2).policy) == make_snapshot(7, seed=2)
