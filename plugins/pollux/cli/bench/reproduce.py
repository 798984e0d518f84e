"""``pollux bench reproduce``: the published results against ours, a run that can be interrupted."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pollux.cli.bench import bench

if TYPE_CHECKING:
    from pollux.simulate.reproduce import Verdict

LEFT_OUT = ("jobs", "timeline")
"""What the comparison has no use for."""


@bench.command()
def reproduce(
    traces: Annotated[Path, typer.Option(help="Folder with apps/, workloads/ and reference-results.json.")],
    state: Annotated[Path, typer.Option(help="Folder for what was simulated.")] = Path("reproduce"),
    resume: Annotated[bool, typer.Option("--resume", help="Keep what an earlier run has simulated.")] = False,
    only: Annotated[
        list[str] | None, typer.Option(help="Only groups whose name begins so, such as 'pollux load 1.0'.")
    ] = None,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Processes at a time.", show_default="one a processor")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the table as JSON.")] = False,
) -> None:
    """Simulate every set-up of which results were published, and compare.

    Each finished simulation is kept in the state folder, so that --resume goes on where a run stopped. Ends
    with 1 if a bar is missed.
    """
    from pollux.cli.crowd import run_cases
    from pollux.errors import ConfigError, PolluxError
    from pollux.simulate.files import check_folder
    from pollux.simulate.reproduce import cases, judge

    try:
        known = cases(traces)
        every = [case for case in known if not only or case.group.startswith(tuple(only))]
        if not every:
            names = ", ".join(dict.fromkeys(case.group for case in known))
            raise ConfigError(
                f"--only {' '.join(only or ())}: no group begins so; there are {names or 'none'}"
            )
        check_folder("--state", state)
        done = _open(state, traces, resume)
        left = [case for case in every if case.name not in done]
        done |= run_cases(traces, left, state, jobs, without=LEFT_OUT)
    except (PolluxError, OSError) as error:
        typer.echo(f"pollux bench reproduce: {error}", err=True)
        raise typer.Exit(2 if isinstance(error, ValueError | OSError) else 1) from None
    groups = dict.fromkeys(case.group for case in every)
    table = [judge(group, [case for case in every if case.group == group], done) for group in groups]
    if as_json:
        typer.echo(json.dumps([_plain(verdict) for verdict in table], indent=1))
    else:
        _print(table)
    if any(verdict.met is False for verdict in table):
        raise typer.Exit(1)


def _open(state: Path, traces: Path, resume: bool) -> dict[str, dict[str, Any]]:
    """What was simulated before, by case; nothing without ``resume``. Raises ConfigError, OSError."""
    from pollux.errors import ConfigError
    from pollux.simulate.kept import claim, read_kept

    kept = read_kept(state, without=LEFT_OUT)
    if kept and not resume:
        raise ConfigError(
            f"--state {state}: has {len(kept)} simulations; keep them with --resume, or name another folder"
        )
    claim(state, traces, f"--state {state}")
    return kept


def _plain(verdict: "Verdict") -> dict[str, Any]:
    names = ("group", "done", "cases", "unfinished", "ratio", "worst", "bar", "met")
    return {name: getattr(verdict, name) for name in names}


def _print(table: "list[Verdict]") -> None:
    from rich.console import Console
    from rich.table import Table

    view = Table(title="mean completion time, ours over the published", title_justify="left")
    for name in ("what", "simulated", "ratio", "farthest", "bar", "met"):
        view.add_column(name, justify="left" if name == "what" else "right")
    for verdict in table:
        view.add_row(
            verdict.group + (f" ({verdict.unfinished} jobs unfinished)" if verdict.unfinished else ""),
            f"{verdict.done}/{verdict.cases}",
            "-" if verdict.ratio is None else f"{verdict.ratio:.4f}",
            "-" if verdict.worst is None else f"{verdict.worst - 1:.2%}",
            f"{verdict.bar:g}" + (" each" if verdict.each else ""),
            {True: "yes", False: "no", None: "-"}[verdict.met],
        )
    Console().print(view)
