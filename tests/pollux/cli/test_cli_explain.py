"""``pollux explain``: plain words, the same numbers as JSON, and clear refusals."""

import json
import math
from pathlib import Path

from snapshot_builder import make_job, make_snapshot, new_job
from typer.testing import CliRunner

from pollux.cli import app
from pollux.policy import decide as solve
from pollux.snapshot import PolicySettings, Snapshot
from pollux_agent.protocol import encode


def saved(folder: Path, snapshot: Snapshot) -> str:
    path = folder / "snapshot.json"
    path.write_text(encode(snapshot), encoding="utf-8")
    return str(path)


def explained(path: str, job: str) -> dict[str, object]:
    result = CliRunner().invoke(app, ["explain", path, job, "--json"])
    assert result.exit_code == 0, result.output
    answer: dict[str, object] = json.loads(result.output)
    return answer


def test_each_rule_that_binds_is_named(tmp_path: Path) -> None:
    jobs = [
        make_job("grown", max_gpus=2, placement={"n0": 2}),
        make_job("young", max_gpus=8, max_gpus_seen=1, placement={"n1": 1}),
        make_job("fixed", preemptible=False, placement={"n1": 1}),
        make_job("foreign", gpu_types=("h100",)),
    ]
    path = saved(tmp_path, make_snapshot(jobs, nodes={"n0": 4, "n1": 4}, policy=PolicySettings(name="sia")))
    binding = {job.job_id: str(explained(path, job.job_id)["binding"]) for job in jobs}
    assert binding["grown"].startswith("max_gpus 2")
    assert binding["young"].startswith("the growth limit: at most twice the 1")
    assert "may not be preempted" in binding["fixed"]
    assert "h100" in binding["foreign"]


def test_it_lists_what_each_configuration_is_worth(tmp_path: Path) -> None:
    job = make_job("only", name="bert", placement={"n0": 1})
    path = saved(tmp_path, make_snapshot([job], nodes={"n0": 4, "n1": 4}, policy=PolicySettings(name="ours")))
    answer = explained(path, "bert")
    shapes = [(each["nodes"], each["gpus"]) for each in answer["alternatives"]]  # type: ignore[attr-defined]
    assert shapes == [(1, 1), (1, 2), (1, 4), (2, 8)]
    shown = CliRunner().invoke(app, ["explain", path, "only"]).output
    assert "what binds" in shown and "a restart takes it 30 s" in shown


def test_speed_ups_are_against_the_fair_share_that_the_policy_means(tmp_path: Path) -> None:
    """Three jobs on 8 GPUs: a fair share of 3 GPUs is a number that pollux can give, and ours cannot."""
    jobs = [make_job(f"job-{index}", placement={f"n{index % 2}": 1}) for index in range(3)]
    for policy in ("pollux", "sia", "ours"):
        settings = PolicySettings(name=policy)
        answer = explained(
            saved(tmp_path, make_snapshot(jobs, nodes={"n0": 4, "n1": 4}, policy=settings)), "job-0"
        )
        for each in answer["alternatives"]:  # type: ignore[attr-defined]
            if each["decided"]:
                assert math.isclose(each["goodput"], answer["goodput"], rel_tol=1e-6)  # type: ignore[arg-type]
                assert math.isclose(each["speedup"], answer["speedup"], rel_tol=1e-6)  # type: ignore[arg-type]


def test_what_the_job_has_and_what_it_gets_are_always_among_the_configurations(tmp_path: Path) -> None:
    """The population search gives 3 GPUs as well, which is none of sia's configurations."""
    for held in (1, 3):
        jobs = [make_job(f"job-{index}", placement={f"n{index}": held}) for index in range(2)]
        snapshot = make_snapshot(
            [*jobs, make_job("job-2")], nodes={"n0": 4, "n1": 4}, policy=PolicySettings(name="pollux")
        )
        path = saved(tmp_path, snapshot)
        decided = solve(snapshot)
        for job in snapshot.jobs:
            rows = explained(path, job.job_id)["alternatives"]
            now = [each["gpus"] for each in rows if each["now"]]  # type: ignore[attr-defined]
            then = [each["gpus"] for each in rows if each["decided"]]  # type: ignore[attr-defined]
            assert now == ([held] if job.placement else [])
            gets = sum(decided.jobs[job.job_id].placement.values())
            assert then == ([gets] if gets else [])


def test_a_job_of_which_nothing_is_known_is_said_to_be_so(tmp_path: Path) -> None:
    path = saved(tmp_path, make_snapshot([new_job("new", max_gpus=8)], policy=PolicySettings(name="ours")))
    shown = " ".join(CliRunner().invoke(app, ["explain", path, "new"]).output.split())
    assert "it has not run yet, so it starts on 1 GPU" in shown
    assert "goodput is not known yet: nothing was measured" in shown
    assert "0 decided" not in shown


def test_baselines_say_no_goodput_and_the_configuration_tells_it(tmp_path: Path) -> None:
    job = make_job("only", kind="rigid", min_gpus=2, max_gpus=2, placement={"n0": 2})
    path = saved(tmp_path, make_snapshot([job], nodes={"n0": 4}, policy=PolicySettings(name="tiresias")))
    answer = explained(path, "only")
    assert answer["goodput"] == answer["goodput_now"] == answer["alternatives"][0]["goodput"]  # type: ignore[index]


def test_an_unknown_job_and_a_file_that_is_no_snapshot_are_refused(tmp_path: Path) -> None:
    path = saved(tmp_path, make_snapshot([make_job("only")]))
    result = CliRunner().invoke(app, ["explain", path, "other"])
    assert result.exit_code == 2 and "it has only" in result.output
    (tmp_path / "no.json").write_text("{}", encoding="utf-8")
    assert CliRunner().invoke(app, ["explain", str(tmp_path / "no.json"), "other"]).exit_code == 2
