"""A hybrid-parallel application: whole replicas of a pipeline, and a step time that can be worked out."""

import shutil
from pathlib import Path

import pytest

from pollux.errors import TraceError
from pollux.simulate.engine import Outcome
from pollux.simulate.follow import Course, follow
from pollux.simulate.results import summary
from pollux.simulate.runner import Run, prepare
from pollux.simulate.setup import ClusterSetup, NodeGroup, run_settings
from pollux.simulate.synthetic import synthetic_traces
from pollux.traces import Request, Workload, read_application
from pollux.traces.pipeline import MICRO_BATCHES

FORWARD_S = {"dgx-ext": 0.2, "rtx": 0.1}
STAGES = {"dgx-ext": 2, "rtx": 8}
CLUSTER = ClusterSetup(
    groups=(
        NodeGroup(nodes=2, gpus=8, gpu_type="dgx-ext", max_nodes_per_job=2),
        NodeGroup(nodes=1, gpus=8, gpu_type="rtx", max_nodes_per_job=1),
    ),
    profile_alone=True,
)


@pytest.fixture
def traces(tmp_path: Path) -> Path:
    """The synthetic set, its bert as the pipeline, and its resnet18 on the same types of GPU."""
    folder = Path(shutil.copytree(synthetic_traces(), tmp_path / "traces"))
    pipeline = Path(shutil.copytree(folder / "apps/bert", folder / "apps/gpt_pmp"))
    for kind, stages in STAGES.items():
        rows = []
        for replicas in range(1, 16 // stages + 1):
            gpus = replicas * stages
            digits = "8" * (gpus // 8) + (str(gpus % 8) if gpus % 8 else "")
            rows += [(digits, len(digits), gpus, local, local * FORWARD_S[kind], 0.3) for local in (1, 2)]
        text = "placement,local_bsz,step_time,sync_time\n"
        text += "".join(f"{digits},{local},{step},{sync}\n" for digits, _, _, local, step, sync in rows)
        (pipeline / f"placements-{kind}.csv").write_text(text)
        text = "num_nodes,num_replicas,local_bsz,step_time,sync_time\n"
        text += "".join(
            f"{nodes},{gpus},{local},{step},{sync}\n" for _, nodes, gpus, local, step, sync in rows
        )
        (pipeline / f"scalability-{kind}.csv").write_text(text)
        for name in ("placements", "scalability"):
            shutil.copy(folder / f"apps/resnet18/{name}.csv", folder / f"apps/resnet18/{name}-{kind}.csv")
    return folder


def simulated(traces: Path, policy: str, *others: Request) -> tuple[Outcome, Course]:
    gpt = Request(name="gpt", submitted_s=0.0, application="gpt_pmp", num_gpus=2, batch_size=48)
    jobs = Workload(name="workload-1", set="test", requests=(gpt, *others))
    settings = run_settings(policy=policy, avoid_interference=None, fairness_p=None, seed=0)
    return follow(Run(traces=traces, workload=jobs, cluster=CLUSTER, settings=settings), "gpt")


def test_a_step_is_three_passes_of_all_turns_and_the_all_reduce(traces: Path) -> None:
    """p stages and 48 micro-batches take p - 1 + 48 turns; a backward pass is two forward ones."""
    app = read_application(traces, "gpt_pmp", frozenset(STAGES))
    assert app.is_pipeline
    for kind, stages in STAGES.items():
        assert app.gpus_per_replica(kind) == stages
        assert app.local_bounds(kind) == (MICRO_BATCHES, MICRO_BATCHES) == (48, 48)
        step_s, sync_s = app.step_times(kind, (stages,), 48)
        assert sync_s == pytest.approx(0.3)
        assert step_s == pytest.approx(3 * (stages - 1 + 48) * FORWARD_S[kind] + 0.3)
    assert not read_application(traces, "resnet18", frozenset(STAGES)).is_pipeline


@pytest.mark.parametrize("policy", ["sia", "ours"])
def test_alone_it_doubles_its_replicas_as_far_as_its_batch_size_goes(traces: Path, policy: str) -> None:
    outcome, course = simulated(traces, policy)
    assert course.gpus[:4] == (2, 4, 8, 16)
    assert set(course.batch_size) <= {48 * replicas for replicas in range(1, 9)}
    assert course.batch_size[3] == 48 * 8
    (entry,) = summary(outcome, CLUSTER)["jobs"]
    assert entry["finished"]
    assert 0 < entry["rho"] < 1.5


@pytest.mark.parametrize("policy", ["sia", "ours"])
def test_it_gives_whole_replicas_back_when_others_come(traces: Path, policy: str) -> None:
    others = [
        Request(name=f"net-{index}", submitted_s=900.0, application="resnet18", num_gpus=2, batch_size=1024)
        for index in range(16)
    ]
    outcome, course = simulated(traces, policy, *others)
    assert max(course.gpus) == 16
    assert all(job.completed_s is not None for job in outcome.jobs)
    busy = [gpus for time_s, gpus in zip(course.time_s, course.gpus, strict=True) if 900 <= time_s < 1200]
    assert min(busy) < 16
    assert all(gpus % 2 == 0 for gpus in course.gpus)


def test_policies_that_know_no_replicas_refuse_it(traces: Path) -> None:
    for policy in ("pollux", "tiresias", "gavel"):
        with pytest.raises(TraceError, match=r"gpt_pmp is hybrid-parallel.*use ours or sia"):
            simulated(traces, policy)


@pytest.mark.needs("traces")
def test_the_recorded_one_scales_linearly(recorded: Path) -> None:
    """Sia section 5.3: computing dominates, so throughput grows with the GPUs."""
    app = read_application(recorded, "gpt_pmp", frozenset(STAGES))
    for kind, shapes in {"dgx-ext": ((2,), (8,), (8, 8)), "rtx": ((8,), (8, 8), (8, 8, 8))}.items():
        rate = [sum(shape) / app.step_times(kind, shape, 48)[0] for shape in shapes]
        ideal = [rate[0] * sum(shape) / sum(shapes[0]) for shape in shapes]
        assert rate == pytest.approx(ideal, rel=0.05)
    assert app.step_times("dgx-ext", (2,), 48)[0] == pytest.approx(3 * 49 * 0.144, rel=1e-3)


def test_a_cluster_without_room_for_one_replica_is_refused(traces: Path) -> None:
    gpt = Request(name="gpt", submitted_s=0.0, application="gpt_pmp", num_gpus=2, batch_size=48)
    jobs = Workload(name="workload-1", set="test", requests=(gpt,))
    settings = run_settings(policy="ours", avoid_interference=None, fairness_p=None, seed=0)
    small = ClusterSetup(groups=(NodeGroup(nodes=1, gpus=4, gpu_type="rtx"),))
    with pytest.raises(TraceError, match=r"job 'gpt' .*one replica takes 8 GPUs, .* has too few"):
        prepare(Run(traces=traces, workload=jobs, cluster=small, settings=settings))
