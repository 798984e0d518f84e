"""The simulation of one workload: time, jobs, and the scheduling cycle over them."""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from pollux.errors import TraceError
from pollux.plan import plan
from pollux.policy import ORACLES, decide
from pollux.simulate.agent import Knowledge, SimulatedAgent
from pollux.simulate.job import MAX_GPUS, TUNED, SimulatedJob, limits_of
from pollux.simulate.setup import BLIND, FIXED_SIZE, ClusterSetup, RunSettings
from pollux.simulate.split import packed, split_batch
from pollux.snapshot import Job, Oracle, Snapshot
from pollux.traces import Application, Request, Workload
from pollux_agent.protocol import JobKind

WHOLE_REPLICAS = frozenset({"sia", "ours"})
"""Policies that give a hybrid-parallel job whole replicas."""

_PATIENCE_S = 2 * 86400.0
"""Ends a simulation in which no job held a GPU for that long: some can never run."""

_HOPELESS_S = 30 * 86400.0
"""Ends a simulation in which no job arrived, ended, or came to the end of an epoch for that long."""

Progress = Callable[[int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """The cluster after one decision.

    ``efficiency`` is the statistical efficiency of the jobs that have trained, weighted by their GPUs.
    """

    time_s: float
    gpus: int
    running: int
    waiting: int
    efficiency: float


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What a simulation gave.

    ``decide_s`` are the wall-clock seconds of each decision with jobs; ``timed_out`` counts the decisions
    that a solver's wall-clock limit ended.
    """

    workload: Workload
    jobs: tuple[SimulatedJob, ...]
    rounds: list[Round] = field(default_factory=list)
    decide_s: list[float] = field(default_factory=list)
    timed_out: int = 0
    wall_s: float = 0.0
    cpu_s: float = 0.0


class Simulation:
    """One workload on one cluster under one policy."""

    def __init__(
        self,
        workload: Workload,
        apps: Mapping[str, Application],
        cluster: ClusterSetup,
        settings: RunSettings,
    ) -> None:
        self._cluster = cluster
        self._settings = settings
        self._nodes = cluster.nodes
        self._type_of = {node.name: node.gpu_type for node in self._nodes}
        self._kind = FIXED_SIZE.get(settings.policy.name, "adaptive")
        self._known: dict[str, Knowledge] = {}
        self._curves: dict[tuple[str, int], tuple[float, ...]] = {}
        requests = sorted(workload.requests, key=lambda request: request.submitted_s)
        self._arrivals = [(request, apps[request.application]) for request in requests]
        for request, app in self._arrivals:
            if app.is_pipeline and settings.policy.name not in WHOLE_REPLICAS:
                raise TraceError(
                    f"{workload.where(request)}: {app.name} is hybrid-parallel, and policy "
                    f"{settings.policy.name} does not give whole replicas; "
                    f"use {' or '.join(sorted(WHOLE_REPLICAS))}"
                )
            check_request(workload, request, app, cluster, self._kind)
        self._waiting = list(reversed(self._arrivals))
        self._jobs: dict[str, SimulatedJob] = {}
        self._active: dict[str, SimulatedJob] = {}
        self._workload = workload
        self._state: Mapping[str, object] = {}

    def run(self, progress: Progress = lambda done: None) -> Outcome:
        """Simulate until every job is done, or nothing happens any more; ``progress`` gets the jobs done.

        Raises ConfigError for an unknown policy and DecisionError where the policy breaks a rule.
        """
        outcome = Outcome(workload=self._workload, jobs=())
        begin_s, cpu_s = time.perf_counter(), time.process_time()
        last_event_s, last_progress_s, epochs, number = 0.0, 0.0, 0, 0
        now_s = 0.0
        while self._active or self._waiting:
            self._advance(now_s)
            number += 1
            now_s = number * self._settings.interval_s
            arrived, ended = self._arrive(now_s), self._leave()
            if not self._active:
                last_event_s = last_progress_s = now_s
                continue
            outcome.rounds.append(self._cycle(number, now_s, outcome))
            done = sum(job.epoch for job in self._jobs.values())
            if arrived or ended or done > epochs:
                last_progress_s, epochs = now_s, done
            if arrived or ended or any(job.placement for job in self._active.values()):
                last_event_s = now_s
            if ended:
                progress(sum(job.completed_s is not None for job in self._jobs.values()))
            stuck = now_s - last_event_s > _PATIENCE_S or now_s - last_progress_s > _HOPELESS_S
            if stuck and not self._waiting:
                break
        outcome.jobs = tuple(self._jobs.values())
        outcome.wall_s = time.perf_counter() - begin_s
        outcome.cpu_s = time.process_time() - cpu_s
        return outcome

    def _advance(self, start_s: float) -> None:
        for job, interferes in self._interference():
            share = self._settings.interference if interferes else 0.0
            job.advance(start_s, self._settings.interval_s, share)

    def _interference(self) -> Iterator[tuple[SimulatedJob, bool]]:
        """Each active job, and whether a node of it also hosts another job that spans nodes, as it does."""
        spanning: dict[str, int] = {}
        for job in self._active.values():
            if len(job.shape) > 1:
                for name in job.placement:
                    spanning[name] = spanning.get(name, 0) + 1
        for job in self._active.values():
            yield job, len(job.shape) > 1 and any(spanning[name] > 1 for name in job.placement)

    def _arrive(self, now_s: float) -> bool:
        arrived = False
        while self._waiting and self._waiting[-1][0].submitted_s <= now_s:
            request, app = self._waiting.pop()
            job = self._new_job(request, app)
            self._jobs[request.name] = self._active[request.name] = job
            arrived = True
        return arrived

    def _leave(self) -> bool:
        ended = [name for name, job in self._active.items() if job.completed_s is not None]
        for name in ended:
            job = self._active.pop(name)
            job.placement, job.shape = {}, ()
            if self._settings.earlier_fits and job.kind == "adaptive":
                self._known[job.app.name] = job.agent.knowledge
        return bool(ended)

    def _new_job(self, request: Request, app: Application) -> SimulatedJob:
        kind: JobKind = "rigid" if app.single_gpu else "hybrid_parallel" if app.is_pipeline else self._kind
        agent = SimulatedAgent(limits_of(app), self._known.get(app.name, Knowledge()))
        if self._cluster.profile_alone and kind in TUNED:
            for gpu_type in app.times:
                agent.profile_alone(gpu_type, app.times_alone(gpu_type))
        adaptive_batch = app.max_batch_size if app.single_gpu else app.initial_batch_size
        return SimulatedJob(
            request=request,
            app=app,
            kind=kind,
            profiled=kind in TUNED or self._settings.policy.name in FIXED_SIZE.keys() - BLIND,
            agent=agent,
            restart_s=self._cluster.restart_s.get(app.name, self._settings.restart_s),
            batch_size=adaptive_batch if self._kind == "adaptive" else request.batch_size,
            divisor=self._cluster.goodput_divisor.get(app.name, 1.0),
        )

    def _cycle(self, number: int, now_s: float, outcome: Outcome) -> Round:
        """One cycle of production: snapshot, decide, plan, act."""
        snapshot = Snapshot(
            decision=number,
            now_unix_s=now_s,
            interval_s=self._settings.interval_s,
            policy=self._settings.policy,
            nodes=self._nodes,
            jobs=tuple(self._observe(job, now_s) for job in self._active.values()),
            state=self._state,
        )
        begin_s = time.perf_counter()
        decision = decide(snapshot, studied=True)
        outcome.decide_s.append(time.perf_counter() - begin_s)
        outcome.timed_out += bool(decision.state.get("timed_out"))
        self._state = decision.state
        for action in plan(snapshot, decision):
            gpu_type = self._type_of[next(iter(action.after))] if action.after else ""
            self._active[action.job_id].place(dict(action.after), gpu_type, now_s)
        running = [job for job in self._active.values() if job.placement]
        gpus = sum(job.gpus for job in running)
        training = [job for job in running if job.efficiency > 0]
        useful = sum(job.gpus * job.efficiency for job in training)
        return Round(
            time_s=now_s,
            gpus=gpus,
            running=len(running),
            waiting=len(self._active) - len(running),
            efficiency=useful / sum(job.gpus for job in training) if training else 0.0,
        )

    def _observe(self, job: SimulatedJob, now_s: float) -> Job:
        """The job as the scheduler sees it: its spec, and what its agent reports."""
        app, agent = job.app, job.agent
        adaptive = job.kind in TUNED
        low, high = self._local_bounds(app)
        least, most = self._gpu_bounds(job, low)
        return Job(
            job_id=job.request.name,
            name=job.request.name,
            kind=job.kind,
            min_gpus=least,
            max_gpus=most,
            gpu_types=tuple(app.times) if len(app.times) < len(self._cluster.gpus_of) else (),
            initial_batch_size=app.initial_batch_size if adaptive else job.batch_size,
            max_batch_size=app.max_batch_size,
            max_local_batch_size=high,
            max_local_batch_size_of={kind: app.local_bounds(kind)[1] for kind in app.times},
            restarting=job.restart_left_s > 0,
            trained_s=job.trained_s if job.placement else None,
            min_local_batch_size=low if adaptive else 1,
            placement=job.placement,
            age_s=now_s - job.request.submitted_s,
            attained_gpu_s=job.attained_gpu_s,
            restarts=job.restarts,
            restart_s=job.restart_s if job.starts else None,
            max_gpus_seen=agent.max_gpus if adaptive else most,
            fits=agent.fits,
            noise_scale=agent.noise_scale if adaptive else None,
            progress=job.progress,
            target_progress=float(app.progress[-1]),
            gpus_seen=agent.gpus_seen,
            gpus_per_replica_of={kind: app.gpus_per_replica(kind) for kind in app.times if app.is_pipeline},
            model=app.name,
            oracle=self._oracle(job, most) if self._settings.policy.name in ORACLES else None,
        )

    def _local_bounds(self, app: Application) -> tuple[int, int]:
        bounds = [app.local_bounds(gpu_type) for gpu_type in app.times]
        return min(low for low, _ in bounds), max(high for _, high in bounds)

    def _gpu_bounds(self, job: SimulatedJob, min_local: int) -> tuple[int, int]:
        """(least, most) GPUs of the job."""
        if job.kind == "rigid":
            gpus = 1 if job.app.single_gpu else job.request.num_gpus
            return gpus, gpus
        measured = max(self._cluster.most_gpus(gpu_type) for gpu_type in job.app.times)
        if job.kind == "hybrid_parallel":
            units = [job.app.gpus_per_replica(gpu_type) for gpu_type in job.app.times]
            most = min(max(units) * (job.app.max_batch_size // min_local), measured, MAX_GPUS)
            return min(units), max(most, min(units))
        batch = job.batch_size if job.kind == "strong_scaling" else job.app.max_batch_size
        return 1, max(1, min(batch // min_local, measured, MAX_GPUS))

    def _oracle(self, job: SimulatedJob, most: int) -> Oracle:
        key = (job.app.name, job.batch_size)
        curve = self._curves.get(key)
        if curve is None or len(curve) < most:
            widths = self._cluster.width_of
            gpu_type, width = next((kind, widths[kind]) for kind in widths if kind in job.app.times)
            curve = self._curves[key] = tuple(
                step_seconds(job.app, gpu_type, packed(gpus, width), job.batch_size)
                for gpus in range(1, most + 1)
            )
        return Oracle(
            step_time_s=curve[:most], remaining_steps=job.app.iterations_left(job.epoch, job.batch_size)
        )


def step_seconds(app: Application, gpu_type: str, shape: tuple[int, ...], batch_size: int) -> float:
    """True seconds of a whole step, accumulation included, at a fixed batch size."""
    local, steps = split_batch(app, gpu_type, batch_size, sum(shape))
    step_s, sync_s = app.step_times(gpu_type, shape, local)
    return step_s + steps * (step_s - sync_s)


def check_request(
    workload: Workload, request: Request, app: Application, cluster: ClusterSetup, kind: JobKind
) -> None:
    """Refuse what can never run; raises TraceError naming the field and the fix."""
    low, high = app.initial_batch_size, app.max_batch_size
    where = workload.where(request)
    if not low <= request.batch_size <= high:
        raise TraceError(
            f"{where}: batch_size {request.batch_size} is unreachable; validation runs cover {low} to {high}"
        )
    least = min(app.local_bounds(gpu_type)[0] for gpu_type in app.times)
    gpus = request.num_gpus if kind == "rigid" and not app.single_gpu else 1
    if kind != "adaptive" and request.batch_size < gpus * least:
        raise TraceError(
            f"{where}: batch_size {request.batch_size} is unreachable on num_replicas {gpus}: "
            f"the least batch measured on one GPU is {least}; lower num_replicas or raise batch_size"
        )
    most = max(cluster.gpus_of[gpu_type] for gpu_type in app.times)
    if kind == "rigid" and gpus > most:
        raise TraceError(
            f"{where}: num_replicas {gpus} is more than the {most} GPUs of one type that "
            "the cluster has; lower it or enlarge the cluster"
        )
    replica = min(app.gpus_per_replica(gpu_type) for gpu_type in app.times)
    if all(app.gpus_per_replica(gpu_type) > cluster.most_gpus(gpu_type) for gpu_type in app.times):
        raise TraceError(
            f"{where}: one replica takes {replica} GPUs, and the cluster has too few of "
            f"{' or '.join(app.times)}; enlarge the cluster"
        )
