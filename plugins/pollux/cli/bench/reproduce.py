"""``pollux bench reproduce``: the published results against ours, a run that can be interrupted."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pollux.cli.bench import bench

if TYPE_CHECKING:
    from pollux.simulate.reproduce import Case, Verdict


@bench.command()
def reproduce(
    traces: Annotated[Path, typer.Option(help="Folder with apps/, workloads/ and reference-results.json.")],
    state: Annotated[Path, typer.Option(help="Folder for what was simulated.")] = Path("reproduce"),
    resume: Annotated[bool, typer.Option("--resume", help="Keep what an earlier run has simulated.")] = False,
    only: Annotated[
        list[str] | None, typer.Option(help="Only groups whose name begins so, such as 'pollux load 1.0'.")
    ] = None,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Processes at a time. [default: one a processor]")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the table as JSON.")] = False,
) -> None:
    """Simulate every set-up of which results were published, and compare.

    Each finished simulation is kept in the state folder, so that --resume goes on where a run stopped. Ends
    with 1 if a bar is missed.
    """
    from pollux.errors import ConfigError, PolluxError
    from pollux.simulate.reproduce import cases, judge

    try:
        every = [case for case in cases(traces) if not only or case.group.startswith(tuple(only))]
        if not every:
            raise ConfigError(f"--only {only}: no group begins so; leave it out to see all of them")
        done = _open(state, resume)
        _simulate(traces, [case for case in every if case.name not in done], state, done, jobs)
    except (PolluxError, OSError) as error:
        typer.echo(f"pollux bench reproduce: {error}", err=True)
        raise typer.Exit(2 if isinstance(error, ValueError | OSError) else 1) from None
    groups = dict.fromkeys(case.group for case in every)
    averages = {name: float(result["avg_jct_s"]) for name, result in done.items()}
    table = [judge(group, [case for case in every if case.group == group], averages) for group in groups]
    if as_json:
        typer.echo(json.dumps([_plain(verdict) for verdict in table], indent=1))
    else:
        _print(table)
    if any(verdict.met is False for verdict in table):
        raise typer.Exit(1)


def _open(state: Path, resume: bool) -> dict[str, dict[str, Any]]:
    """What was simulated before, by case; nothing without ``resume``. Raises ConfigError, OSError."""
    from pollux.errors import ConfigError

    state.mkdir(parents=True, exist_ok=True)
    files = sorted(state.glob("*--seed*.json"))
    if files and not resume:
        raise ConfigError(
            f"--state {state}: has {len(files)} simulations; keep them with --resume, or name another folder"
        )
    done = {}
    for path in files:
        try:
            done[path.stem] = json.loads(path.read_text(encoding="utf-8"))["result"]
        except (ValueError, KeyError):
            path.unlink()
    return done


def _simulate(
    traces: Path, left: "list[Case]", state: Path, done: dict[str, dict[str, Any]], jobs: int | None
) -> None:
    """Run the cases that are left, and keep each one's figures as soon as it ends."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from pollux.simulate.runner import simulate

    if not left:
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    runs = [case.run(traces) for case in left]
    total = sum(len(run.workload.requests) for run in runs)
    ended = dict.fromkeys(range(len(runs)), 0)
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("jobs simulated", total=total)

        def news(number: int, jobs_done: int) -> None:
            ended[number] = jobs_done
            bar.update(task, completed=sum(ended.values()), description=f"{left[number].group}, jobs")

        for answer in simulate(runs, processes=jobs, news=news):
            case = left[answer.number]
            figures = {key: value for key, value in answer.result.items() if key not in ("jobs", "timeline")}
            text = json.dumps({"result": figures, "timing": answer.timing}, sort_keys=True, indent=1)
            part = state / f"{case.name}.json.part"
            part.write_text(text + "\n", encoding="utf-8")
            part.rename(state / f"{case.name}.json")
            done[case.name] = figures


def _plain(verdict: "Verdict") -> dict[str, Any]:
    names = ("group", "done", "cases", "ratio", "worst", "bar", "met")
    return {name: getattr(verdict, name) for name in names}


def _print(table: "list[Verdict]") -> None:
    from rich.console import Console
    from rich.table import Table

    view = Table(title="mean completion time, ours over the published", title_justify="left")
    for name in ("what", "simulated", "ratio", "farthest", "bar", "met"):
        view.add_column(name, justify="left" if name == "what" else "right")
    for verdict in table:
        view.add_row(
            verdict.group,
            f"{verdict.done}/{verdict.cases}",
            "-" if verdict.ratio is None else f"{verdict.ratio:.4f}",
            "-" if verdict.worst is None else f"{verdict.worst - 1:.2%}",
            f"{verdict.bar:g}" + (" each" if verdict.each else ""),
            {True: "yes", False: "no", None: "-"}[verdict.met],
        )
    Console().print(view)
