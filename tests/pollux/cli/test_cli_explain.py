"""``pollux explain``: plain words, the same numbers as JSON, and clear refusals."""

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from snapshot_builder import SCALES_BADLY, make_job, make_snapshot, new_job, snapshots
from typer.testing import CliRunner

from pollux.cli import app
from pollux.policy import POLICIES
from pollux.policy import decide as solve
from pollux.policy.whatif import explain_job
from pollux.snapshot import GoodputCurve, Job, PolicySettings, Snapshot
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


BINDS: dict[str, tuple[str, list[Job], dict[str, int]]] = {
    "where the free GPUs are: no configuration that would make it faster fits into the 1 that are left": (
        "ours",
        [
            make_job("asked", placement={"n0": 1}, max_gpus=2),
            *(make_job(f"two-{node}", max_gpus=2, placement={node: 2}) for node in ("n0", "n1")),
        ],
        {},
    ),
    "the jobs that keep what they hold": (
        "ours",
        [
            make_job("asked", placement={"n0": 1}),
            *(make_job(f"fixed-{node}", preemptible=False, placement={node: 3}) for node in ("n0", "n1")),
        ],
        {},
    ),
    "its own scaling: no number of GPUs": (
        "ours",
        [make_job("asked", placement={"n0": 4}, max_gpus=8, fits={"gpu": SCALES_BADLY})],
        {},
    ),
    "the configurations of ours, powers of two on a node and whole nodes: none up to its limit of 3": (
        "ours",
        [make_job("asked", placement={"n0": 2}, max_gpus=3)],
        {},
    ),
    "the quota of team 'red': 2 GPUs for all of its jobs": (
        "sia",
        [make_job("asked", team="red", placement={"n0": 1}), make_job("mate", team="red", max_gpus=1)],
        {"red": 2},
    ),
    "what a restart would cost it: 4 GPUs on 1 of the nodes would fit and make it": (
        "sia",
        [make_job("asked", placement={"n0": 1}, max_gpus=4, age_s=100.0, restarts=3)],
        {},
    ),
    "the rule of tiresias: 4 GPUs on 1 of the nodes would fit": (
        "tiresias",
        [make_job("asked", placement={"n0": 1}, max_gpus=4)],
        {},
    ),
    "its batch size: it cannot be split over 4 to 8 GPUs with 100 to 256 samples on each": (
        "ours",
        [make_job("asked", min_gpus=4, min_local_batch_size=100, max_batch_size=300)],
        {},
    ),
    "its bounds: no configuration of gpu has between min_gpus 9": (
        "ours",
        [make_job("asked", min_gpus=9, max_gpus=9)],
        {},
    ),
    "its estimator 'own': it says that no configuration is of any use": (
        "ours",
        [make_job("asked", estimator="own", estimates={"gpu": GoodputCurve(one_node=(0.0,))})],
        {},
    ),
}


@pytest.mark.parametrize("binding", list(BINDS))
def test_one_rule_binds_and_it_is_the_one_that_does(binding: str, tmp_path: Path) -> None:
    policy, jobs, quotas = BINDS[binding]
    nodes = {"n0": 3, "n1": 3} if "free GPUs are" in binding else {"n0": 4, "n1": 4}
    snapshot = make_snapshot(jobs, nodes=nodes, quotas=quotas, policy=PolicySettings(name=policy))
    answer = explained(saved(tmp_path, snapshot), "asked")
    assert str(answer["binding"]).startswith(binding), (answer["binding"], answer["reason"])


@given(snapshot=snapshots(max_jobs=4), name=st.sampled_from(list(POLICIES)))
@settings(deadline=None, max_examples=60)
def test_what_binds_is_never_one_thing_or_another(snapshot: Snapshot, name: str) -> None:
    snapshot = replace(snapshot, policy=replace(snapshot.policy, name=name))
    decision = solve(snapshot)
    for job in snapshot.jobs:
        assert " or " not in explain_job(snapshot, decision, job.job_id).binding


@pytest.mark.parametrize("policy", ["pollux", "sia", "ours"])
def test_one_price_of_a_restart_is_told_and_it_is_the_policys_own(policy: str, tmp_path: Path) -> None:
    """Under ours what an allocation lasts decides, under the two papers' policies the job's history."""
    moving = make_job("moving", placement={"n0": 1}, max_gpus=2, age_s=900.0, restarts=6, restart_s=40.0)
    snapshot = make_snapshot([moving], nodes={"n0": 4}, policy=PolicySettings(name=policy))
    path = saved(tmp_path, snapshot)
    shown = " ".join(CliRunner().invoke(app, ["explain", path, "moving"]).output.split())
    prices = re.findall(r"counts (?:a change of its GPUs )?at (\d\.\d\d) of its worth", shown)
    assert len(prices) == 2 and len(set(prices)) == 1, shown
    history = (900.0 - 6 * 40.0) / (900.0 + 40.0)  # Pollux Eq. 16
    assert (prices[0] == f"{history:.2f}") is (policy != "ours")


def test_a_policy_that_prices_no_restarts_is_said_to(tmp_path: Path) -> None:
    job = make_job("only", kind="rigid", min_gpus=2, max_gpus=2, placement={"n0": 2})
    path = saved(tmp_path, make_snapshot([job], nodes={"n0": 4}, policy=PolicySettings(name="fifo")))
    assert explained(path, "only")["restart_factor"] is None
    shown = " ".join(CliRunner().invoke(app, ["explain", path, "only"]).output.split())
    assert "a restart takes it 30 s, which policy fifo does not price" in shown


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


@pytest.mark.parametrize("policy", list(POLICIES))
@pytest.mark.parametrize(
    ("change", "binding"),
    [
        ({"preemptible": False}, "that it may not be preempted"),
        ({"restarting": True}, "its restart"),
        ({"reserved_from_unix_s": 1.0}, "its reservation"),
        ({"reserved_from_unix_s": 1.0, "restarting": True, "min_gpus": 2}, "its restart"),
    ],
)
def test_what_keeps_a_job_where_it_is_is_told_by_policies_that_heed_it_alone(
    policy: str, change: dict[str, object], binding: str, tmp_path: Path
) -> None:
    asked = make_job("asked", placement={"n0": 1}, max_gpus=4, **change)
    snapshot = make_snapshot([asked], nodes={"n0": 4}, policy=PolicySettings(name=policy))
    answer = explained(saved(tmp_path, snapshot), "asked")
    heeded = binding == "that it may not be preempted" or policy in ("sia", "ours")
    told = str(answer["binding"])
    assert ("keeps exactly what it holds" in told) is heeded, told
    assert told.startswith(binding) is heeded, told
    if heeded and answer["restart_factor"] is not None:
        words = {"its reservation": "its reservation lasts", "its restart": "it is restarting"}
        assert words.get(binding, "it may not be preempted") in str(answer["reason"])


def test_a_job_is_found_by_its_id_before_another_s_name_and_never_by_half_a_guess(tmp_path: Path) -> None:
    jobs = [make_job("a", name="b"), make_job("b", name="twin"), make_job("c", name="twin")]
    path = saved(tmp_path, make_snapshot(jobs))
    assert explained(path, "b")["job_id"] == "b"
    result = CliRunner().invoke(app, ["explain", path, "twin"])
    assert result.exit_code == 2
    assert "2 jobs are named 'twin'; give the id of one: b, c" in result.output


def test_of_many_jobs_only_some_are_listed(tmp_path: Path) -> None:
    path = saved(tmp_path, make_snapshot([make_job(f"job-{number}") for number in range(500)]))
    result = CliRunner().invoke(app, ["explain", path, "other"])
    assert result.exit_code == 2 and "job-19, ..." in result.output and "job-20" not in result.output


@pytest.mark.parametrize("policy", list(POLICIES))
def test_one_gpu_is_no_plural(policy: str, tmp_path: Path) -> None:
    jobs = [make_job("kept", max_gpus=1, placement={"n0": 1}), make_job("waits", max_gpus=1)]
    path = saved(tmp_path, make_snapshot(jobs, nodes={"n0": 1}, policy=PolicySettings(name=policy)))
    for job in jobs:
        answer = explained(path, job.job_id)
        assert not re.search(r"\b1 GPUs", f"{answer['reason']} {answer['binding']}")


def test_an_unknown_job_and_a_file_that_is_no_snapshot_are_refused(tmp_path: Path) -> None:
    path = saved(tmp_path, make_snapshot([make_job("only")]))
    result = CliRunner().invoke(app, ["explain", path, "other"])
    assert result.exit_code == 2 and "it has only" in result.output
    (tmp_path / "no.json").write_text("{}", encoding="utf-8")
    assert CliRunner().invoke(app, ["explain", str(tmp_path / "no.json"), "other"]).exit_code == 2
