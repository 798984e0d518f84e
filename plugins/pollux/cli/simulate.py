"""``pollux simulate``: the scheduling cycle over recorded jobs and simulated time."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pollux.cli import app

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pollux.simulate.runner import Answer, Run
    from pollux.simulate.setup import ClusterSetup, RunSettings

DEFAULT_POLICY = "default"


@app.command()
def simulate(
    workload: Annotated[
        list[str],
        typer.Option(help="Workload file, or SET/workload-N inside the trace folder. Give it once for each."),
    ],
    traces: Annotated[
        Path | None, typer.Option(help="Folder with apps/ and workloads/.", show_default="the synthetic set")
    ] = None,
    policy: Annotated[str, typer.Option(help="Policy; 'default' is the product's default.")] = DEFAULT_POLICY,
    nodes: Annotated[int | None, typer.Option(min=1, help="Equal nodes.", show_default="16")] = None,
    gpus_per_node: Annotated[
        int | None, typer.Option(min=1, help="GPUs on each of them.", show_default="4")
    ] = None,
    cluster: Annotated[
        str | None, typer.Option(metavar="FILE", help="Cluster file instead, 'sia' or 'small'.")
    ] = None,
    interval: Annotated[float, typer.Option(help="Seconds between decisions.")] = 60.0,
    interference: Annotated[
        float, typer.Option(help="Share of goodput lost where two jobs that span nodes meet.")
    ] = 0.0,
    avoid_interference: Annotated[
        bool | None,
        typer.Option(
            help="At most one job that spans nodes on a node.", show_default="on for policies that adapt jobs"
        ),
    ] = None,
    restart_s: Annotated[float, typer.Option(help="Seconds that a restart costs.")] = 30.0,
    p: Annotated[
        float | None, typer.Option(help="Fairness knob of pollux and sia.", show_default="the policy's own")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of random policies.")] = 0,
    earlier_fits: Annotated[
        bool, typer.Option("--earlier-fits", help="Jobs start from fits of finished jobs of their model.")
    ] = False,
    first: Annotated[
        int | None,
        typer.Option(min=1, help="Only so many jobs of each workload, by submission.", show_default="all"),
    ] = None,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Processes at a time.", show_default="one a processor")
    ] = None,
    out: Annotated[Path, typer.Option(help="Results; timings.json goes beside it.")] = Path("results.json"),
    plot: Annotated[Path | None, typer.Option(help="Folder for pictures of each workload.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the means as JSON.")] = False,
) -> None:
    """Replay workloads under a policy: the production cycle over simulated jobs and time.

    The same seed gives the same bytes in the results; wall-clock seconds go to timings.json.
    """
    from pollux.errors import ConfigError, PolluxError
    from pollux.simulate.files import check_file, check_folder, write_document
    from pollux.simulate.results import mean
    from pollux.simulate.runner import Run, load
    from pollux.simulate.setup import (
        read_setup,
        run_settings,
        uniform,
        unknown_applications,
        without_effect,
    )
    from pollux.simulate.synthetic import synthetic_traces
    from pollux.snapshot import DEFAULT_RESTART_S, PolicySettings

    try:
        check_file("--out", out)
        timings = out.with_name("timings.json")
        if out == timings:
            raise ConfigError(f"--out {out}: that is where seconds go; name another file")
        if plot is not None:
            check_folder("--plot", plot)
        folder = traces or synthetic_traces()
        setup = uniform(nodes or 16, gpus_per_node or 4) if cluster is None else read_setup(cluster)
        settings = run_settings(
            policy=PolicySettings().name if policy == DEFAULT_POLICY else policy,
            avoid_interference=avoid_interference,
            fairness_p=p,
            seed=seed,
            interval_s=interval,
            interference=interference,
            restart_s=restart_s,
            earlier_fits=earlier_fits,
        )
        workloads = load(folder, workload)
        asked = {
            "--p": p is not None,
            "--seed": seed != 0,
            "--earlier-fits": earlier_fits,
            "--no-avoid-interference": avoid_interference is False,
            "--interference": interference > 0,
            "--restart-s": restart_s != DEFAULT_RESTART_S,
        }
        applications = {request.application for each in workloads for request in each.requests}
        flags = [flag for flag, given in asked.items() if given]
        notes = [*without_effect(settings, setup, applications, flags)]
        if cluster is not None and (nodes or gpus_per_node):
            notes.append(f"--nodes and --gpus-per-node change nothing beside --cluster {cluster}")
        notes += unknown_applications(folder, cluster, setup)
        for note in notes:
            typer.echo(f"pollux simulate: {note}", err=True)
        runs = [
            Run(
                traces=folder,
                workload=each.first(first) if first else each,
                cluster=setup,
                settings=settings,
            )
            for each in workloads
        ]
        answers = _run(runs, jobs)
    except (ConfigError, PolluxError) as error:
        typer.echo(f"pollux simulate: {error}", err=True)
        raise typer.Exit(2 if isinstance(error, ValueError) else 1) from None
    results: dict[str, Any] = {
        "schema": 1,
        "settings": _settings(settings, setup),
        "workloads": [answer.result for answer in answers],
        "mean": mean([answer.result for answer in answers]),
    }
    late = sum(answer.timing["timed_out"] for answer in answers)
    if late:
        typer.echo(
            f"pollux simulate: {late} decisions were ended by the wall-clock limit, so another machine may "
            "decide otherwise",
            err=True,
        )
    if as_json:
        typer.echo(json.dumps(results["mean"], sort_keys=True))
    else:
        _print(answers, settings.policy.name)
    try:
        write_document(out, results)
        write_document(timings, {"workloads": [answer.timing for answer in answers]})
        if plot is not None:
            from pollux.simulate.pictures import save_pictures

            save_pictures(plot, results["workloads"], gpus=sum(setup.gpus_of.values()))
    except OSError as error:
        typer.echo(f"pollux simulate: cannot be written: {error}; free the disk or its rights", err=True)
        raise typer.Exit(1) from None


def _run(runs: "Sequence[Run]", processes: int | None) -> "list[Answer]":
    """All runs, in their order, behind a progress bar."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from pollux.simulate.runner import simulate as start

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    answers = []
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        tasks = [
            bar.add_task(f"{run.workload.set}/{run.workload.name}", total=len(run.workload.requests))
            for run in runs
        ]
        for answer in start(
            runs, processes=processes, news=lambda run, done: bar.update(tasks[run], completed=done)
        ):
            bar.update(tasks[answer.number], completed=len(runs[answer.number].workload.requests))
            answers.append(answer)
    return sorted(answers, key=lambda answer: answer.number)


def _settings(settings: "RunSettings", setup: "ClusterSetup") -> dict[str, Any]:
    from pollux_agent.protocol import to_plain

    return {"run": to_plain(settings), "cluster": to_plain(setup)}


def _print(answers: "Sequence[Answer]", policy: str) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    title = f"{policy}: completion times"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, collapse_padding=True, show_edge=False)
    for name in ("workload", "mean", "p99", "makespan", "restarts", "GPU h", "rho > 1", "took"):
        table.add_column(name, justify="left" if name == "workload" else "right", overflow="fold")
    for answer in answers:
        result = answer.result
        unfair = result["ftf"]["unfair_fraction"]
        left = f" ({result['unfinished']} jobs unfinished)" if result["unfinished"] else ""
        table.add_row(
            f"{result['set']}/{result['name']}{left}",
            *(_seconds(result[key]) for key in ("avg_jct_s", "p99_jct_s", "makespan_s")),
            f"{result['restarts_per_job']:.2f}",
            f"{result['gpu_hours_per_job']:.2f}",
            "-" if unfair is None else f"{unfair:.1%}",
            f"{answer.timing['wall_s']:.0f} s",
        )
    Console().print(table)


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f} s"
