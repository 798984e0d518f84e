"""The simulated cycle: time, restarts, interference, and what policies see; nothing is left to chance."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from simulation_builder import apps, run, settings, simulation, workload

from pollux.errors import TraceError
from pollux.policy import POLICIES
from pollux.simulate import engine
from pollux.simulate.results import summary, timing
from pollux.simulate.runner import Run, prepare
from pollux.simulate.setup import ClusterSetup, NodeGroup, read_setup, uniform
from pollux.simulate.split import packed, split_batch
from pollux.simulate.synthetic import synthetic_traces
from pollux.snapshot import Decision, JobDecision, Snapshot


def epoch_seconds(name: str, gpus: tuple[int, ...], batch: int, *, slow: float = 1.0) -> list[float]:
    """Seconds of each epoch at a fixed batch size that splits evenly, from the files' numbers."""
    app = apps()[name]
    local, steps = split_batch(app, "gpu", batch, sum(gpus))
    assert sum(gpus) * local * (steps + 1) == batch
    step_s, sync_s = app.step_times("gpu", gpus, local)
    column = list(app.batch_sizes).index(batch)
    scale = batch / app.batch_sizes[0]
    square, variance = app.grad_sqr[:, column], app.grad_var[:, column]
    gain = (variance + square) / (variance / scale + square)
    seconds = np.diff(app.progress, prepend=0.0) / gain * (step_s + steps * (step_s - sync_s)) * slow
    return list(seconds)


def test_one_job_takes_the_time_of_its_epochs_and_of_one_restart() -> None:
    outcome = run(workload((70.0, "resnet18", 4, 1024)), "fifo")
    (job,) = outcome.jobs
    want = sum(epoch_seconds("resnet18", (4,), 1024))
    assert job.started_s == 120.0
    assert job.completed_s is not None
    assert job.completed_s == pytest.approx(120.0 + 30.0 + want, abs=len(job.app.progress))
    assert job.completed_s == int(job.completed_s)
    assert job.attained_gpu_s == pytest.approx(4 * (job.completed_s - 120.0))
    assert job.restarts == 0


def test_a_job_waits_until_the_decision_after_the_gpus_are_free() -> None:
    jobs = workload((0.0, "resnet18", 8, 1024), (0.0, "resnet18", 8, 1024))
    first, second = run(jobs, "fifo").jobs
    assert first.completed_s is not None and second.started_s is not None
    assert second.started_s == 60.0 * ceil(first.completed_s / 60.0)


def two_jobs_on_both_nodes(snapshot: Snapshot) -> Decision:
    """Every job gets two GPUs on each of two nodes."""
    answer = JobDecision(placement={node.name: 2 for node in snapshot.nodes}, reason="test")
    return Decision(
        decision=snapshot.decision,
        policy="test",
        objective=0.0,
        jobs={job.job_id: answer for job in snapshot.jobs},
    )


@pytest.fixture
def policy(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Snapshot], Decision]], None]:
    """Put a policy in fifo's place for a test."""

    def register(decide: Callable[[Snapshot], Decision]) -> None:
        monkeypatch.setitem(POLICIES, "fifo", decide)  # type: ignore[arg-type]

    return register


@pytest.mark.parametrize("share", [0.0, 0.25, 0.5])
def test_interference_slows_jobs_that_span_nodes_and_meet(
    policy: Callable[[Callable[[Snapshot], Decision]], None], share: float
) -> None:
    policy(two_jobs_on_both_nodes)
    jobs = workload((0.0, "resnet18", 4, 1024), (0.0, "resnet18", 4, 1024))
    outcome = run(jobs, "fifo", interference=share)
    want = sum(epoch_seconds("resnet18", (2, 2), 1024, slow=1 / (1 - share)))
    for job in outcome.jobs:
        assert job.completed_s == pytest.approx(60.0 + 30.0 + want, abs=len(job.app.progress))


def test_one_job_alone_is_not_slowed(policy: Callable[[Callable[[Snapshot], Decision]], None]) -> None:
    policy(two_jobs_on_both_nodes)
    times = [
        run(workload((0.0, "resnet18", 4, 1024)), "fifo", interference=share).jobs[0].completed_s
        for share in (0.0, 0.5)
    ]
    assert times[0] == times[1]


def test_where_interference_is_avoided_its_price_changes_nothing() -> None:
    jobs = workload((0.0, "deepspeech2", 4, 160), (0.0, "deepspeech2", 4, 160), (90.0, "bert", 2, 48))
    free, dear = (run(jobs, "pollux", uniform(3, 2), interference=share) for share in (0.0, 0.5))
    assert [job.completed_s for job in free.jobs] == [job.completed_s for job in dear.jobs]
    assert any(job.agent.max_gpus > 2 for job in dear.jobs), "some job spanned nodes"


def seen_by(name: str, monkeypatch: pytest.MonkeyPatch, **options: Any) -> list[Snapshot]:
    """The snapshots that a policy gets in a small simulation."""
    seen: list[Snapshot] = []
    decide = POLICIES[name]

    def look(snapshot: Snapshot) -> Decision:
        seen.append(snapshot)
        return decide(snapshot)

    monkeypatch.setitem(POLICIES, name, look)  # type: ignore[arg-type]
    jobs = workload((0.0, "deepspeech2", 2, 80), (100.0, "bert", 1, 12), (100.0, "deepspeech2", 2, 80))
    run(jobs, name, **options)
    return seen


def test_only_an_oracle_sees_what_nobody_can_know(monkeypatch: pytest.MonkeyPatch) -> None:
    assert all(job.oracle for snapshot in seen_by("optimus", monkeypatch) for job in snapshot.jobs)
    snapshots = seen_by("optimus", monkeypatch)
    others = [name for name in POLICIES if name != "optimus"]
    for name in others:
        told: list[Snapshot] = []

        def record(snapshot: Snapshot, told: list[Snapshot] = told) -> Decision:
            told.append(snapshot)
            return two_jobs_on_both_nodes(snapshot)

        monkeypatch.setitem(POLICIES, name, record)  # type: ignore[arg-type]
        shown = replace(snapshots[2], policy=replace(snapshots[2].policy, name=name))
        assert any(job.oracle for job in shown.jobs)
        engine.decide(shown)
        assert not any(job.oracle for job in told[0].jobs)


def test_a_snapshot_holds_only_what_the_jobs_own_steps_showed(monkeypatch: pytest.MonkeyPatch) -> None:
    snapshots = seen_by("pollux", monkeypatch, restart_s=80.0)
    first = snapshots[0].jobs[0]
    assert (dict(first.fits), first.noise_scale, first.max_gpus_seen) == ({}, None, 0)
    restarting = snapshots[1].jobs[0]
    assert restarting.placement and restarting.noise_scale is None, "no step was taken in a restart"
    assert restarting.gpu_limit == 1
    later = snapshots[3].jobs[0]
    assert later.fits and later.noise_scale == pytest.approx(60.0, rel=1e-3)


def test_earlier_fits_are_handed_on_to_later_jobs_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = workload((0.0, "deepspeech2", 2, 80), (4000.0, "deepspeech2", 2, 80), (4000.0, "bert", 1, 12))
    seen: list[Snapshot] = []
    decide = POLICIES["pollux"]
    monkeypatch.setitem(POLICIES, "pollux", lambda snapshot: (seen.append(snapshot), decide(snapshot))[1])  # type: ignore[arg-type]
    run(jobs, "pollux", earlier_fits=True)
    start = next(snapshot for snapshot in seen if snapshot.now_unix_s > 4000.0)
    fitted = {job.model: bool(job.fits) for job in start.jobs if not job.placement}
    assert fitted == {"deepspeech2": True, "bert": False}
    known = {job.model: job for job in start.jobs if not job.placement}
    first = max(
        job.max_gpus_seen for snapshot in seen if snapshot.now_unix_s < 4000.0 for job in snapshot.jobs
    )
    assert (known["deepspeech2"].max_gpus_seen, known["bert"].max_gpus_seen) == (first, 0)
    assert known["deepspeech2"].gpus_seen == {"gpu": first}


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_the_same_seed_gives_the_same_results_under_every_policy(name: str) -> None:
    cluster = uniform(3, 4)
    jobs = workload(
        (0.0, "deepspeech2", 4, 160),
        (30.0, "bert", 2, 48),
        (200.0, "deepspeech2", 2, 80),
        (250.0, "bert", 1, 12),
    )
    results = [summary(run(jobs, name, cluster), cluster) for _ in range(2)]
    assert results[0] == results[1]
    assert results[0]["unfinished"] == 0


def test_a_job_that_never_runs_ends_the_simulation_and_is_marked(
    policy: Callable[[Callable[[Snapshot], Decision]], None],
) -> None:
    def only_the_first(snapshot: Snapshot) -> Decision:
        return Decision(
            decision=snapshot.decision,
            policy="test",
            objective=0.0,
            jobs={
                job.job_id: JobDecision(placement={"n0": 4} if job.job_id == "bert-0" else {}, reason="test")
                for job in snapshot.jobs
            },
        )

    policy(only_the_first)
    result = summary(run(workload((0.0, "bert", 4, 48), (0.0, "bert", 4, 48)), "fifo"), uniform(2, 4))
    assert [job["finished"] for job in result["jobs"]] == [True, False]
    assert result["unfinished"] == 1
    assert result["jobs"][1]["completed_s"] is None


def test_a_job_whose_epochs_never_end_ends_the_simulation_and_is_marked() -> None:
    slow = replace(uniform(2, 4), goodput_divisor={"bert": 1e6})
    outcome = run(workload((0.0, "bert", 1, 12), (0.0, "deepspeech2", 1, 20)), "fifo", slow, interval_s=3600)
    result = summary(outcome, slow, interval_s=3600)
    assert [job["finished"] for job in result["jobs"]] == [False, True]
    assert outcome.rounds[-1].time_s < 40 * 86400


def test_restarts_of_days_do_not_end_it() -> None:
    outcome = run(workload((0.0, "bert", 1, 12)), "fifo", interval_s=3600, restart_s=1e6)
    assert outcome.jobs[0].completed_s == pytest.approx(
        3600 + 1e6 + sum(epoch_seconds("bert", (1,), 12)), abs=9
    )


@pytest.mark.parametrize("name", ["ours", "pollux", "fifo"])
def test_a_cluster_may_be_larger_than_a_job_s_batch_can_be_split_over(name: str) -> None:
    """bert's batch takes 96 GPUs at most; alone on 128 it is compared with what it can use."""
    cluster = uniform(16, 8)
    result = summary(run(workload((0.0, "bert", 1, 12)), name, cluster), cluster)
    assert result["unfinished"] == 0
    assert 0 < result["ftf"]["max"] < 100


def test_decisions_that_the_wall_clock_ended_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = workload((0.0, "bert", 1, 12), (0.0, "deepspeech2", 1, 20))
    assert timing(run(jobs, "sia"))["timed_out"] == 0
    decide = POLICIES["sia"]

    def late(snapshot: Snapshot) -> Decision:
        decision = decide(snapshot)
        return replace(decision, state={**decision.state, "timed_out": snapshot.decision <= 2})

    monkeypatch.setitem(POLICIES, "sia", late)  # type: ignore[arg-type]
    assert timing(run(jobs, "sia"))["timed_out"] == 2


@pytest.mark.parametrize(
    ("gpus", "batch", "policy_name", "words"),
    [
        (1, 64, "pollux", ["batch_size 64 is unreachable", "128 to 4096"]),
        (1, 8192, "pollux", ["batch_size 8192 is unreachable"]),
        (8, 128, "tiresias", ["unreachable on num_replicas 8", "least batch measured on one GPU is 32"]),
        (12, 1024, "tiresias", ["num_replicas 12 is more than the 8 GPUs"]),
        (12, 1024, "tiresias", ["workload test/workload-1, job 'resnet18-0' (resnet18)"]),
    ],
)
def test_what_can_never_run_is_refused(gpus: int, batch: int, policy_name: str, words: list[str]) -> None:
    with pytest.raises(TraceError) as refused:
        simulation(workload((0.0, "resnet18", gpus, batch)), policy_name)
    for word in words:
        assert word in str(refused.value)


def test_the_gpus_asked_for_do_not_matter_to_optimus() -> None:
    results = [
        summary(run(workload((0.0, "resnet18", gpus, 128)), "optimus"), uniform(2, 4)) for gpus in (1, 10**6)
    ]
    assert results[0]["avg_jct_s"] == results[1]["avg_jct_s"] > 0


def test_an_oracle_knows_the_steps_of_a_job_that_was_not_measured_on_the_first_type(tmp_path: Path) -> None:
    traces = tmp_path / "traces"
    shutil.copytree(synthetic_traces(), traces)
    for app in (traces / "apps").iterdir():
        for table in app.glob("*.csv"):
            if not table.name.startswith(("placements", "scalability")):
                continue
            for kind in ("a100", "t4") if app.name != "bert" else ("t4",):
                shutil.copy(table, table.with_name(f"{table.stem}-{kind}.csv"))
    cluster = ClusterSetup(groups=tuple(NodeGroup(nodes=1, gpus=4, gpu_type=kind) for kind in ("a100", "t4")))
    jobs = workload((0.0, "bert", 1, 12), (0.0, "deepspeech2", 1, 20))
    simulation = prepare(Run(traces=traces, workload=jobs, cluster=cluster, settings=settings("optimus")))
    assert summary(simulation.run(), cluster)["unfinished"] == 0


def test_a_fixed_batch_is_split_as_evenly_as_it_comes() -> None:
    app = apps()["resnet18"]
    assert split_batch(app, "gpu", 1024, 8) == (128, 0)
    assert split_batch(app, "gpu", 4096, 2) == (1024, 1)
    assert split_batch(app, "gpu", 1024, 1) == (512, 1), "one GPU above M0 accumulates"
    assert split_batch(app, "gpu", 128, 1) == (128, 0)
    assert split_batch(app, "gpu", 4096, 3) == (682, 1), "never above the largest batch"
    assert packed(11, 4) == (4, 4, 3) and packed(8, 8) == (8,)


def test_sias_cluster_is_64_gpus_of_three_types() -> None:
    setup = read_setup("sia")
    assert setup.gpus_of == {"aws": 24, "dgx-ext": 16, "rtx": 24}
    assert len(setup.scaled(2).nodes) == 22
    assert setup.restart_s["imagenet"] == 250


def test_a_cluster_that_comes_with_the_package_is_meant_by_its_name_wherever_one_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sia").write_text('{"groups": [{"nodes": 1, "gpus": 2}]}')
    (tmp_path / "small").mkdir()
    assert sum(read_setup("sia").gpus_of.values()) == 64
    assert read_setup("./sia").gpus_of == {"gpu": 2}
    assert read_setup("small").nodes


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"groups": []}', ["groups"]),
        (
            '{"groups": [{"nodes": 0, "gpus": 4}]}',
            ["ClusterSetup: groups.0.nodes: Input", "(got 0); give a file"],
        ),
        ('{"groups": [{"nodes": 1, "gpus": 4}], "x": 1}', ["x: unknown field"]),
        ('{"schema": 2, "groups": [{"nodes": 1, "gpus": 4}]}', ["schema: version 2"]),
        ('{"groups": [{"nodes": 1, "gpus": 4}], "restart_s": {"a": -1}}', ["restart_s"]),
        ("nothing", ["sia"]),
    ],
)
def test_a_wrong_cluster_file_is_refused(tmp_path, text: str, words: list[str]) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / "cluster.json"
    path.write_text(text)
    with pytest.raises(TraceError) as refused:
        read_setup(str(path))
    for word in ["cluster.json", *words]:
        assert word in str(refused.value)


def test_a_type_of_gpu_that_nobody_measured_is_refused_beside_one_that_was() -> None:
    mixed = ClusterSetup(groups=(NodeGroup(nodes=1, gpus=4), NodeGroup(nodes=1, gpus=4, gpu_type="h100")))
    jobs, options = workload((0.0, "bert", 1, 12)), settings("fifo")
    with pytest.raises(TraceError, match=r"gpu_type 'h100' was measured for no application in .*; use gpu"):
        prepare(Run(traces=synthetic_traces(), workload=jobs, cluster=mixed, settings=options))


def test_options_out_of_range_are_refused() -> None:
    for wrong in ({"interval_s": 0.0}, {"interference": 1.0}, {"restart_s": -1.0}):
        with pytest.raises(TraceError, match=next(iter(wrong))):
            settings("pollux", **wrong)
    with pytest.raises(TraceError, match="no policy; use one of"):
        settings("best")


def test_a_job_profiled_alone_has_a_fit_before_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = replace(uniform(2, 4), profile_alone=True)
    first, *_, last = seen_by("sia", monkeypatch, cluster=cluster)
    (job,) = (each for each in first.jobs if each.name == "deepspeech2-0")
    assert job.gpus_seen == {"gpu": 1} and job.max_gpus_seen == 0 and job.gpu_limit == 1
    app, params = apps()["deepspeech2"], job.fits["gpu"]
    for local in (app.local_bounds("gpu")[0], app.local_bounds("gpu")[1]):
        step_s, _ = app.step_times("gpu", (1,), local)
        assert params.alpha_grad + params.beta_grad * local == pytest.approx(step_s, rel=0.25)
    assert last.jobs[0].max_gpus_seen > 1


def test_a_job_says_that_it_is_restarting_until_its_restart_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    snapshots = seen_by("fifo", monkeypatch, restart_s=100.0)
    flags = [job.restarting for snapshot in snapshots for job in snapshot.jobs if job.name == "deepspeech2-0"]
    assert flags[:4] == [False, True, False, False]
