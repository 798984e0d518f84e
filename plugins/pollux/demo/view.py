"""The live view: a table in a terminal, plain lines elsewhere."""

import time
from types import TracebackType
from typing import Self

from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from pollux.demo.follow import Watching
from pollux.demo.observe import JobView
from pollux.policy.reasons import in_gpus

COLOURS = ("blue", "yellow", "green", "magenta")
LINE_EVERY_S = 10.0


class LiveView:
    """Call it with each new state; a context manager, so that the terminal is left as it was found."""

    def __init__(self, console: Console, *, capacity: int) -> None:
        self._console, self._capacity = console, capacity
        self._live = Live(console=console, auto_refresh=False) if console.is_terminal else None
        self._lines = PlainLines()

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def __call__(self, watching: Watching) -> None:
        if self._live is not None:
            self._live.update(render(watching, capacity=self._capacity), refresh=True)
            return
        for line in self._lines.feed(watching, time.monotonic()):
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)


def render(watching: Watching, *, capacity: int) -> Group:
    """The whole view: slots, jobs, and why the last decision gave each what it has."""
    now = watching.now
    table = Table(expand=True)
    for column in ("job", "Airflow", "phase", "GPUs", "batch", "goodput", "progress"):
        table.add_column(column, justify="right" if column in ("batch", "goodput") else "left")
    for number, job in enumerate(now.jobs):
        table.add_row(*_row(job, watching, COLOURS[number % len(COLOURS)]))
    used = Text(f"{_clock(watching.elapsed_s)}  slots ")
    for number, job in enumerate(now.jobs):
        used.append("■" * job.gpus, style=COLOURS[number % len(COLOURS)])
    used.append("□" * max(0, capacity - sum(job.gpus for job in now.jobs)))
    lines = [Text(f"decision {now.decision}")] if now.decision else [Text("no decision yet")]
    lines += [Text(f"  {name}: {reason}", overflow="fold") for name, reason in now.reasons]
    return Group(used, table, *lines)


class PlainLines:
    """One line some seconds apart, and one more whenever a job's GPUs or phase change."""

    def __init__(self) -> None:
        self._last_s = float("-inf")
        self._last: tuple[object, ...] = ()
        self._decision = 0

    def feed(self, watching: Watching, now_s: float) -> list[str]:
        """The lines to print now."""
        now = watching.now
        changed = tuple((job.phase, tuple(job.placement.items())) for job in now.jobs)
        if changed == self._last and now_s - self._last_s < LINE_EVERY_S:
            return []
        self._last, self._last_s = changed, now_s
        parts = [_words(job, watching) for job in now.jobs]
        lines = [f"{_clock(watching.elapsed_s)}  " + " | ".join(parts)]
        if now.decision != self._decision:
            self._decision = now.decision
            lines += [f"       decision {now.decision}: {name}: {reason}" for name, reason in now.reasons]
        return lines


def _row(job: JobView, watching: Watching, colour: str) -> tuple[Text | ProgressBar | str, ...]:
    target = watching.targets.get(job.name, 0.0)
    where = ", ".join(f"{node}: {gpus}" for node, gpus in job.placement.items())
    return (
        Text(job.name, style=colour),
        watching.runs.get(job.name, "not submitted"),
        escape(job.phase or ""),
        f"{job.gpus or ''} {f'({where})' if where else ''}".strip(),
        str(job.batch_size or ""),
        f"{job.goodput:,.0f}/s" if job.goodput and job.phase == "running" else "",
        ProgressBar(total=target or 1.0, completed=job.progress, width=24),
    )


def _words(job: JobView, watching: Watching) -> str:
    if job.phase is None:
        run = watching.runs.get(job.name)
        return f"{job.name}: run {run} in Airflow" if run else f"{job.name}: not submitted"
    parts = [f"{job.name}: {job.phase}", in_gpus(job.gpus)]
    if job.goodput and job.phase == "running":
        parts.append(f"{job.goodput:,.0f} useful samples/s at batch {job.batch_size}")
    if target := watching.targets.get(job.name):
        parts.append(f"{min(1.0, job.progress / target):.0%}")
    return ", ".join(parts)


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60:2d}:{int(seconds) % 60:02d}"
