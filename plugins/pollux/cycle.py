"""One scheduling cycle: observe, snapshot, decide, plan, act, record."""

import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from datetime import timedelta

import pydantic.dataclasses
from pydantic import Field

from pollux.act import Act, ActionOutcome
from pollux.cluster.base import MAX_LEASE, Cluster, ClusterView
from pollux.cluster.numbers import next_number
from pollux.errors import ClusterUnavailable, Conflict, StoreError, StoreUnavailable
from pollux.estimators import with_estimates
from pollux.figures import decision_figures, realised_figures, realised_goodput
from pollux.jobruns import close_ended_runs, job_records, seen_records
from pollux.observe import build_snapshot
from pollux.plan import plan
from pollux.policy import check_policy, decide
from pollux.record import Records, plan_json, reason_in_short, to_json
from pollux.settings import Settings
from pollux.snapshot import Decision, Snapshot
from pollux.store import JobRecord, ModelStore
from pollux_agent.protocol import DOCUMENT_CONFIG, encode, to_plain


@pydantic.dataclasses.dataclass(frozen=True, slots=True, kw_only=True, config=DOCUMENT_CONFIG)
class CycleResult:
    """What one cycle did. ``skipped`` says why it decided nothing; then there is no ``decision`` number.

    ``left_out`` says why a job took no part; ``unrecorded`` why MLflow holds nothing of the decision;
    ``realised`` is (predicted, reported) goodput of jobs that ran as decided before; ``unknown_jobs`` have an
    open run but are not on the cluster; ``wall_clock_s`` are the seconds of each step.
    """

    decision: int | None = None
    skipped: str = ""
    shadow: bool = False
    objective: float | None = None
    actions: tuple[ActionOutcome, ...] = ()
    left_out: Mapping[str, str] = Field(default_factory=dict)
    realised: Mapping[str, tuple[float, float]] = Field(default_factory=dict)
    unrecorded: str = ""
    closed_runs: tuple[str, ...] = ()
    unknown_jobs: tuple[str, ...] = ()
    wall_clock_s: Mapping[str, float] = Field(default_factory=dict)


def run_once(
    cluster: Cluster,
    store: ModelStore,
    settings: Settings,
    *,
    now: float,
    holder: str,
    records: Records,
    due: float | None = None,
) -> CycleResult:
    """Run one cycle under the cluster's lease.

    ``now`` is the time of the snapshot and ``due`` the time that the cycle was meant for, both in Unix
    seconds; ``holder`` names this scheduler, as no other that runs at the same time. A cycle that is late by
    more than a period, has another beside it, or cannot reach cluster or MLflow is skipped. In shadow mode it
    only reads cluster and reports: it takes neither lease nor number, and may run beside others.

    Raises ConfigError for a policy that does not exist, before anything is asked or changed.
    """
    check_policy(settings.policy, "POLLUX_POLICY")
    if due is not None and now - due > settings.interval_s:
        return CycleResult(skipped=f"late by {now - due:.0f} s, more than one period; the next one is due")
    lease = lease_ttl(settings)
    until_s = time.monotonic() + lease.total_seconds()
    try:
        with nullcontext() if settings.shadow else cluster.lease(holder, lease):
            return _cycle(cluster, store, settings, now=now, records=records, until_s=until_s)
    except Conflict as error:
        return CycleResult(skipped=f"another scheduler is at work: {reason_in_short(error)}")
    except ClusterUnavailable as error:
        return CycleResult(skipped=f"the cluster does not answer: {reason_in_short(error)}")
    except StoreUnavailable as error:
        return CycleResult(skipped=f"without MLflow nothing is decided: {reason_in_short(error)}")


def lease_ttl(settings: Settings) -> timedelta:
    """How long a killed cycle keeps others out: under a period where the wait for GPUs allows it."""
    wanted = timedelta(seconds=max(0.9 * settings.interval_s, settings.free_wait_s + 10.0))
    return min(wanted, MAX_LEASE)


def _cycle(
    cluster: Cluster,
    store: ModelStore,
    settings: Settings,
    *,
    now: float,
    records: Records,
    until_s: float,
) -> CycleResult:
    watch = _Watch()
    with watch.step("observe"):  # 1
        number, view, reports = observe_both(
            cluster, store, above=records.last_number(), shadow=settings.shadow
        )
        if settings.shadow:
            number = _shadow_number(view, records)
            known, left_out = seen_records(view, reports, settings)
        else:
            known, left_out = job_records(cluster, store, view, reports, settings)
        previous = records.newest_decision(below=number)
    with watch.step("snapshot"):  # 2
        state = previous.state if previous else {}
        snapshot = build_snapshot(
            view, known, decision=number, now_unix_s=now, settings=settings, state=state
        )
        snapshot = with_estimates(snapshot, settings.estimators)
        records.save(number, "snapshot.json", encode(snapshot))
    with watch.step("decide"):  # 3
        decision = decide(snapshot)
        records.save(number, "decision.json", encode(decision))
    with watch.step("plan"):  # 4
        actions = plan(snapshot, decision)
        records.save(number, "plan.json", plan_json(number, actions))
    with watch.step("act"):  # 5
        act = Act(cluster, actions, decision=number, still_ours=lambda: time.monotonic() < until_s)
        outcomes = act.shadow() if settings.shadow else act.run(settings.free_wait_s)
    with watch.step("record"):  # 6
        result = CycleResult(
            decision=number,
            shadow=settings.shadow,
            objective=decision.objective,
            actions=outcomes,
            left_out=left_out,
            realised=realised_goodput(previous, view, known) if previous else {},
        )
        result = _record(cluster, store, snapshot, decision, previous, result, watch.seconds, settings)
    records.save(number, "result.json", to_json(to_plain(replace(result, wall_clock_s=watch.seconds))))
    if settings.keep_decisions is not None:
        records.prune(settings.keep_decisions)
    return replace(result, wall_clock_s=watch.seconds)


def observe_both(
    cluster: Cluster, store: ModelStore, *, above: int = 0, shadow: bool = False
) -> tuple[int, ClusterView, Mapping[str, JobRecord]]:
    """The decision's number, above ``above`` (0 for a shadow, which takes none), the cluster, and meanwhile
    the store's reports; where both fail the cluster's error is raised.
    """
    with ThreadPoolExecutor(1, "pollux-store") as beside:
        reports = beside.submit(store.reports)
        number = 0 if shadow else cluster.next_decision(above)
        view = cluster.observe()
    return number, view, reports.result()


def _shadow_number(view: ClusterView, records: Records) -> int:
    """Above every number on a job and every decision recorded here."""
    return next_number(None, [records.last_number(), *(job.allocation.decision for job in view.jobs)])


def _record(
    cluster: Cluster,
    store: ModelStore,
    snapshot: Snapshot,
    decision: Decision,
    previous: Decision | None,
    result: CycleResult,
    wall_clock_s: Mapping[str, float],
    settings: Settings,
) -> CycleResult:
    """Tell MLflow; if it went away meanwhile what was done stands, and the result says so."""
    earlier = {previous.decision: realised_figures(result.realised)} if previous else {}
    try:
        store.record_decision(
            decision=snapshot.decision,
            now_unix_s=snapshot.now_unix_s,
            figures=decision_figures(snapshot, decision, result.actions, left_out=len(result.left_out)),
            earlier=earlier,
            wall_clock_s=wall_clock_s,
            documents={"snapshot.json": encode(snapshot), "decision.json": encode(decision)},
        )
        if result.shadow:
            return result
        closed, unknown = close_ended_runs(cluster, store, settings.jobs)
        return replace(result, closed_runs=closed, unknown_jobs=unknown)
    except (StoreError, ClusterUnavailable) as error:
        return replace(result, unrecorded=reason_in_short(error))


@dataclass(slots=True)
class _Watch:
    """Seconds per step, by its name."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        start_s = time.perf_counter()
        yield
        self.seconds[name] = time.perf_counter() - start_s
