"""The progress bar over many simulations, which several commands show."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pollux.simulate.reproduce import Case


def run_cases(
    traces: Path, cases: "Sequence[Case]", folder: Path, jobs: int | None, without: Sequence[str] = ()
) -> dict[str, dict[str, Any]]:
    """Simulate the cases behind one bar that counts their jobs; raises as simulate_and_keep does."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from pollux.simulate.kept import simulate_and_keep

    sizes = [len(case.run(traces).workload.requests) for case in cases]
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    ended: dict[int, int] = {}
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(f"jobs of {len(cases)} simulations", total=sum(sizes))

        def news(number: int, jobs_done: int) -> None:
            ended[number] = jobs_done
            bar.update(task, completed=sum(ended.values()))

        done = simulate_and_keep(traces, cases, folder, processes=jobs, news=news, without=without)
        bar.update(task, completed=sum(sizes))
        return done
