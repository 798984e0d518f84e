"""The whole demo, phase by phase; each says what it does, or why it failed and which log to read."""

import json
import math
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console

from pollux.airflow_api import AirflowApi
from pollux.demo.answers import await_runs, end_schedule, export_answers
from pollux.demo.folder import fresh_folder
from pollux.demo.follow import Follower, await_dags
from pollux.demo.jobs import DemoPlan, JobSize, expectations_of, size_jobs
from pollux.demo.kube import KubeChoice, kube_site
from pollux.demo.observe import Observer
from pollux.demo.picture import PICTURE_SUFFIXES, save_picture
from pollux.demo.site import Site, local_site
from pollux.demo.sizing import Timing
from pollux.demo.summary import (
    CheckSummary,
    DemoSummary,
    job_summaries,
    memory_check,
    summary_table,
)
from pollux.demo.timing import time_scripts
from pollux.demo.view import LiveView
from pollux.errors import ConfigError, StoreError
from pollux.policy import decide
from pollux.stack.control import running_stack
from pollux.stack.memory import MemorySampler
from pollux.stack.progress import StartProgress
from pollux.stack.record import StackPlan, StackRecord
from pollux.verify import EXPECTATIONS_FILE, RunRecord, figures_of, read_record, run_checks
from pollux.verify.checks import DATABASE
from pollux.verify.runs import read_runs
from pollux.verify.table import checks_table
from pollux.verify.training import given_twice
from pollux_agent.protocol import encode, to_plain
from pollux_agent.records import write_atomic


@dataclass(frozen=True, slots=True, kw_only=True)
class Outputs:
    """Where the demo leaves what people look at; the rest is in its state folder."""

    summary: Path
    picture: Path

    def check(self) -> None:
        """Raise ConfigError for a file that could not be written when the demo is over."""
        for option, path in (("--summary", self.summary), ("--picture", self.picture)):
            if path.is_dir() or not path.parent.is_dir():
                raise ConfigError(f"{option}: {path} is no file in a folder that exists; name one")
        if self.picture.suffix not in PICTURE_SUFFIXES:
            known = ", ".join(PICTURE_SUFFIXES)
            raise ConfigError(f"--picture: {self.picture.name} is no picture; end it with one of {known}")


def run_demo(
    plan: DemoPlan, *, state: Path, outputs: Outputs, console: Console, kubernetes: KubeChoice | None = None
) -> DemoSummary:
    """Run the demo, on the Kubernetes cluster that is chosen if one is, and check it; the stack is gone when
    this returns or raises.

    Raises ConfigError for a folder that is not the demo's, an output that cannot be written, or a cluster
    that is not there, StackError, DemoError and ClusterError where a phase fails.
    """
    began_s = time.monotonic()
    outputs.check()
    if kubernetes is not None:
        kubernetes.check()
    with fresh_folder(state) as folder:
        return _run(plan, folder, outputs, console, began_s, kubernetes)


def _run(
    plan: DemoPlan,
    state: Path,
    outputs: Outputs,
    console: Console,
    began_s: float,
    kubernetes: KubeChoice | None,
) -> DemoSummary:
    for path in (outputs.summary, outputs.picture):
        path.unlink(missing_ok=True)
    stack_plan = StackPlan(
        state=state,
        interval_s=plan.interval_s,
        report_interval_s=plan.report_interval_s,
        slot_cap=plan.slot_cap,
    )
    console.print("timing the training scripts on one slot")
    timings = time_scripts(plan, scripts=stack_plan.scripts, say=lambda line: console.print(f"  {line}"))
    with _site(plan, kubernetes, stack_plan, console) as site, MemorySampler(state) as memory:
        plan = replace(plan, nodes=site.nodes)
        write_atomic(state / EXPECTATIONS_FILE, encode(expectations_of(plan, site.kind)).encode())
        sizes = size_jobs(plan, timings)
        for name, size in sizes.items():
            console.print(f"  {name}: {size.epochs} epochs, about {size.alone_s:.0f} s alone")
        console.print(f"starting Airflow and MLflow{' and the local cluster' * (site.kind == 'local')}")
        stack_plan = replace(stack_plan, settings=site.settings)
        with ExitStack() as stack:
            with StartProgress() as progress:
                record = stack.enter_context(running_stack(stack_plan, follow=progress))
            sizes = _train(plan, sizes, timings, record, site, console)
            console.print("stopping the stack")
    total_s = time.monotonic() - began_s
    console.print("checking what the run left behind")
    ended = _Ended(plan=plan, sizes=sizes, peak_bytes=memory.peak_bytes, total_s=total_s, stack=record)
    return _conclude(ended, outputs, console)


@contextmanager
def _site(
    plan: DemoPlan, kubernetes: KubeChoice | None, stack: StackPlan, console: Console
) -> Iterator[Site]:
    """Where the jobs will run."""
    if kubernetes is None:
        yield local_site(plan.nodes, stack.state)
        return
    console.print("getting the Kubernetes cluster ready: nodes, and the chart by helm")
    with kube_site(plan, kubernetes, state=stack.state, examples=stack.scripts) as site:
        console.print(f"  {site.nodes.num_slots} GPUs on {len(site.nodes.nodes)} nodes")
        yield site
        console.print("removing from the cluster what was made on it")


def _train(
    plan: DemoPlan,
    sizes: Mapping[str, JobSize],
    timings: Mapping[str, Timing],
    stack: StackRecord,
    site: Site,
    console: Console,
) -> Mapping[str, JobSize]:
    """Submit, follow to the end, and export what Airflow says; the sizes that the jobs were given."""
    state = stack.plan.state
    console.print(f"Airflow is at {stack.airflow_url}, MLflow at {stack.mlflow_url}", soft_wrap=True)
    console.print(f"user and password are in {stack.login}", soft_wrap=True)
    with AirflowApi.from_login(stack.airflow_url, stack.login) as api:
        await_dags(api, stall_s=plan.stall_s, logs=state / "logs")
        observer = Observer(
            site.look(state), state, deployment=site.settings.get("POLLUX_DEPLOYMENT", "airflow")
        )
        follower = Follower(
            plan,
            api,
            observer,
            sizes=sizes,
            timings=timings,
            state=state,
            say=lambda line: console.print(f"  {line}", highlight=False),
        )
        with LiveView(console, capacity=plan.nodes.num_slots) as view:
            follower.run(view)
        console.print("waiting for the last figures, then exporting Airflow's answers")
        await_runs(state / DATABASE, num_runs=len(plan.jobs), timeout_s=plan.interval_s + 15)
        end_schedule(api, stall_s=plan.stall_s, logs=state / "logs")
        export_answers(api, state)
    return follower.sizes


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ended:
    """A run whose stack was stopped."""

    plan: DemoPlan
    sizes: Mapping[str, JobSize]
    peak_bytes: int
    total_s: float
    stack: StackRecord


def _conclude(ended: _Ended, outputs: Outputs, console: Console) -> DemoSummary:
    """Verify, draw, write and print."""
    state = ended.stack.plan.state
    record = read_record(state)
    checks = (*run_checks(record, decide), memory_check(ended.plan, ended.peak_bytes))
    console.print(checks_table(checks))
    figures = figures_of(record)
    capacity = ended.plan.nodes.num_slots
    save_picture(outputs.picture, figures, capacity=capacity, title=_title(ended.plan, capacity))
    summary = DemoSummary(
        ok=all(check.ok for check in checks),
        jobs=job_summaries(
            ended.plan, figures, sizes=ended.sizes, metrics=_final_metrics(ended.plan, record)
        ),
        decisions=len(record.decisions),
        double_booked_slots=len(given_twice(record)),
        peak_memory_bytes=ended.peak_bytes,
        total_s=round(ended.total_s, 1),
        num_cores=len(os.sched_getaffinity(0)),
        state=str(state),
        checks=tuple(
            CheckSummary(name=check.name, ok=check.ok, explanation=check.explanation) for check in checks
        ),
        warnings=_warnings(ended),
    )
    write_atomic(outputs.summary, (json.dumps(to_plain(summary), indent=2) + "\n").encode())
    _print_end(summary, ended, outputs, console)
    return summary


def _final_metrics(plan: DemoPlan, record: RunRecord) -> dict[str, float]:
    try:
        runs = {run.job_id: run for run in read_runs(record.root / DATABASE)}
    except StoreError:
        return {}
    wanted = {job.name: job.metric for job in plan.jobs}
    return {
        job.name: value
        for job in record.jobs
        if job.name in wanted
        and (run := runs.get(job.job.job_id))
        and math.isfinite(value := run.metrics.get(wanted[job.name], math.nan))
    }


def _warnings(ended: _Ended) -> tuple[str, ...]:
    limit_s = ended.plan.time_limit_s
    if ended.total_s <= limit_s:
        return ()
    return (f"the run took {ended.total_s:.0f} s, more than {limit_s:.0f} s; a busy machine slows it down",)


def _title(plan: DemoPlan, capacity: int) -> str:
    every = "every minute" if plan.interval_s == 60 else f"every {plan.interval_s:g} s"
    return f"GPU slots held by each training: Airflow re-allocates {capacity} slots {every} by goodput"


def _print_end(summary: DemoSummary, ended: _Ended, outputs: Outputs, console: Console) -> None:
    stack = ended.stack
    console.print(summary_table(summary))
    console.print(
        f"{ended.total_s / 60:.1f} minutes, {summary.decisions} decisions, "
        f"{summary.peak_memory_bytes / 1e9:.2f} GB of memory at the peak",
        highlight=False,
    )
    for warning in summary.warnings:
        console.print(f"warning: {warning}", style="yellow")
    console.print(f"summary: {outputs.summary}\npicture: {outputs.picture}", highlight=False)
    console.print(
        f"to look at the runs in MLflow: .venv/bin/pollux stack up --state {stack.plan.state} "
        f"--mlflow-port {stack.mlflow_port}, then",
        highlight=False,
        soft_wrap=True,
    )
    for job in summary.jobs:
        if job.mlflow_run_id:
            link = f"{stack.mlflow_url}/#/runs/{job.mlflow_run_id}"
            console.print(f"  {job.name}: {link}", highlight=False, markup=False, soft_wrap=True)
    for check in summary.checks:
        if not check.ok:
            console.print(f"FAILED {check.name}: {check.explanation}", style="bold red", markup=False)
    if not summary.ok:
        console.print(f"the logs are in {stack.plan.state / 'logs'} and in jobs/*/logs beside it")
