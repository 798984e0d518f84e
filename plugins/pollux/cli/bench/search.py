"""``pollux bench search``: one decision against AdaptDL's search for the same fitness."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pollux.cli.bench import bench

if TYPE_CHECKING:
    from pollux.bench.search import Compared, Verdict


@bench.command()
def search(
    jobs: Annotated[str, typer.Option(help="Numbers of jobs, with commas.")] = "7,30",
    p: Annotated[str, typer.Option(help="Fairness knobs, with commas; 1 is the sum of speed-ups.")] = "-1,1",
    seeds: Annotated[int, typer.Option(min=1, max=100, help="Snapshots of each number of jobs.")] = 3,
    peers: Annotated[
        Path, typer.Option(help="Environment that `make peers` makes; without it ours alone are timed.")
    ] = Path(".peers"),
    as_json: Annotated[bool, typer.Option("--json", help="Print one object.")] = False,
) -> None:
    """Time one decision on 64 GPUs, in CPU seconds of one core, and compare it with AdaptDL's search.

    Both look for the highest FITNESS_p of Pollux Eq. 14, with the price of restarts, on the same snapshots:
    ours from nothing remembered, AdaptDL's for three rounds that start where the last one ended. ours, the
    policy of another objective, is there for its time. Ends with 1 if a bar is missed.
    """
    import subprocess
    from dataclasses import asdict

    from rich.console import Console

    from pollux.bench.search import MOST_JOBS, compare, judge
    from pollux_agent.bench.peers import peer_python

    try:
        counts = tuple(int(count) for count in jobs.split(","))
        knobs = tuple(float(knob) for knob in p.split(","))
        right = all(1 <= count <= MOST_JOBS for count in counts)
        right &= all(knob != 0 and abs(knob) <= 100 for knob in knobs)
    except ValueError:
        right = False
    if not right:
        typer.echo(
            f"--jobs is {jobs!r}, --p is {p!r}; give whole numbers from 1 to {MOST_JOBS} such as 7,30, and "
            "knobs from -100 to 100 but 0, such as -1,1",
            err=True,
        )
        raise typer.Exit(2)
    python = peer_python(peers)
    if python is None:
        typer.echo(f"{peers} is not there, so AdaptDL's search is left out; `make peers` makes it", err=True)
    console, rows = Console(stderr=True), []
    try:
        with console.status("deciding"):
            for row in compare(counts, fairness_p=knobs, seeds=seeds, peer=python):
                rows.append(row)
                console.print(_line(row), highlight=False)
    except subprocess.CalledProcessError as error:
        typer.echo(f"--peers {peers}: the search failed there: {error.stderr.strip()[-2000:]}", err=True)
        raise typer.Exit(1) from None
    verdicts = judge(rows)
    if as_json:
        plain = [asdict(verdict) | {"met": verdict.met} for verdict in verdicts]
        typer.echo(json.dumps({"decisions": [asdict(row) for row in rows], "verdicts": plain}, indent=2))
    else:
        _print(verdicts)
    if any(verdict.met is False for verdict in verdicts):
        raise typer.Exit(1)


def _line(row: "Compared") -> str:
    mine = f"{row.policy} {row.decide_s:.3f} s, fitness {row.fitness:.4f}"
    peer = "" if row.peer_s is None else f"; AdaptDL {row.peer_s:.2f} s, {row.peer_fitness:.4f}"
    return f"{row.jobs} jobs, p = {row.fairness_p:g}: {mine}{peer}"


def _print(verdicts: "list[Verdict]") -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title="one decision on 64 GPUs, over AdaptDL's search", title_justify="left")
    for name in ("jobs", "p", "policy", "CPU s", "time ratio", "bar", "fitness ratio", "met"):
        table.add_column(name, justify="left" if name == "policy" else "right")
    for each in verdicts:
        table.add_row(
            str(each.jobs),
            f"{each.fairness_p:g}",
            each.policy,
            f"{each.decide_s:.3f}",
            "-" if each.time_ratio is None else f"{each.time_ratio:.4f}",
            f"{each.bar:g}",
            "-" if each.fitness_ratio is None else f"{each.fitness_ratio:.3f}",
            {True: "yes", False: "no", None: "-"}[each.met],
        )
    Console().print(table)
