"""Several workloads side by side, each in a process of its own, with news of how far they are."""

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.queues import Queue
from pathlib import Path
from queue import Empty
from threading import Event, Thread
from typing import Any

from threadpoolctl import threadpool_limits

from pollux.errors import PolluxError, TraceError
from pollux.simulate.engine import Simulation
from pollux.simulate.results import summary, timing
from pollux.simulate.setup import ClusterSetup, RunSettings
from pollux.traces import Workload, gpu_types, read_application, read_workload

News = Callable[[int, int], None]
"""Called with the number of a run and how many of its jobs are done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One simulation to do; all of it travels to the process that does it."""

    traces: Path
    workload: Workload
    cluster: ClusterSetup
    settings: RunSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A run's entries in results.json and timings.json."""

    number: int
    result: dict[str, Any]
    timing: dict[str, Any]


def load(traces: Path, files: Sequence[str]) -> list[Workload]:
    """The workloads: paths, or ``set/workload-1`` inside the trace folder; raises TraceError."""
    if not traces.is_dir():
        raise TraceError(f"traces {traces}: there is no such folder; name one with apps/ and workloads/")
    workloads = []
    for name in files:
        inside = traces / "workloads" / (name if name.endswith(".csv") else f"{name}.csv")
        workloads.append(read_workload(inside if inside.is_file() else Path(name)))
    seen = [(workload.set, workload.name) for workload in workloads]
    twice = next((key for key in seen if seen.count(key) > 1), None)
    if twice:
        raise TraceError(f"workload {'/'.join(twice)} is given twice; name each one once")
    return workloads


_application = lru_cache(maxsize=64)(read_application)
"""Runs of one process share what they read, and what was interpolated from it."""


def prepare(run: Run) -> Simulation:
    """Read the applications and check the workload against them and the cluster; raises TraceError."""
    types = frozenset(run.cluster.gpus_of)
    measured = gpu_types(run.traces)
    if types - measured and measured:
        raise TraceError(
            f"cluster: gpu_type {min(types - measured)!r} was measured for no application in "
            f"{run.traces / 'apps'}; use {' or '.join(sorted(measured))}"
        )
    names = dict.fromkeys(request.application for request in run.workload.requests)
    apps = {name: _application(run.traces, name, types) for name in names}
    return Simulation(run.workload, apps, run.cluster, run.settings)


def simulate(runs: Sequence[Run], *, processes: int | None = None, news: News) -> Iterator[Answer]:
    """Do the runs, as many at a time as there are processors; answers come as they end.

    All inputs are checked before the first one starts. No process outlives this one, nor a run that was
    broken off. Raises TraceError, PolluxError where memory does not suffice, and what a policy raises.
    """
    for run in runs:
        prepare(run)
    workers = min(processes or os.cpu_count() or 1, len(runs))
    if workers == 1:
        for number, run in enumerate(runs):
            yield _do(number, run, lambda done, number=number: news(number, done))  # type: ignore[misc]
        return
    context = get_context("spawn")
    lifeline, held = context.Pipe(duplex=False)
    queue: Queue[tuple[int, int]] = context.Queue()
    with held, ProcessPoolExecutor(workers, context, _live_with, (lifeline, queue)) as pool:
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:  # a new process inherits it: of an interruption at the terminal it learns by its lifeline
            futures = [pool.submit(_in_worker, number, run) for number, run in enumerate(runs)]
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        try:
            with _Relay(queue, news):
                for future in as_completed(futures):
                    yield future.result()
        except BrokenProcessPool:
            raise PolluxError(
                f"one of {workers} processes was killed, as by a system that runs out of memory; "
                "give --jobs a smaller number"
            ) from None
        except BaseException:  # an interruption too: the pool would wait for what its processes are at
            held.close()
            raise


_told: "Queue[tuple[int, int]]"
"""In a worker: where it tells how far its run is."""


def _live_with(lifeline: Connection, queue: "Queue[tuple[int, int]]") -> None:
    """Make this worker end with its parent, or as soon as that lets go of the lifeline."""
    global _told  # what is inherited at the start of a process reaches a task in no other way
    _told = queue

    def wait() -> None:
        with suppress(EOFError, OSError):
            lifeline.recv_bytes()
        os._exit(1)

    Thread(target=wait, daemon=True).start()


def _in_worker(number: int, run: Run) -> Answer:
    return _do(number, run, lambda done: _told.put((number, done)))


def _do(number: int, run: Run, progress: Callable[[int], None]) -> Answer:
    try:
        with threadpool_limits(limits=1):  # the arrays are small: threads only wait for each other
            outcome = prepare(run).run(progress)
        return Answer(
            number=number,
            result=summary(outcome, run.cluster, interval_s=run.settings.interval_s),
            timing=timing(outcome),
        )
    except MemoryError:
        raise PolluxError(
            f"workload {run.workload.set}/{run.workload.name}: {len(run.workload.requests)} jobs on "
            f"{len(run.cluster.nodes)} nodes under {run.settings.policy.name} need more memory than there "
            "is; simulate a smaller cluster, or give --jobs a smaller number"
        ) from None


class _Relay:
    """Passes on the news of the processes while it is open."""

    def __init__(self, queue: "Queue[tuple[int, int]]", news: News) -> None:
        self._queue, self._news, self._over = queue, news, Event()
        self._thread = Thread(target=self._run, daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._over.is_set():
            try:
                self._news(*self._queue.get(timeout=0.2))
            except Empty:
                continue
            except (EOFError, OSError):
                return
