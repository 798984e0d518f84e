"""``pollux report``: what the policies do with recorded workloads, as a page with figures."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pollux.cli import app

if TYPE_CHECKING:
    from pollux.report.parts import Part


@app.command()
def report(
    out: Annotated[Path, typer.Option(help="Folder for the page, its figures and the simulations.")],
    traces: Annotated[
        Path | None, typer.Option(help="Folder with apps/ and workloads/.", show_default="the synthetic set")
    ] = None,
    workload: Annotated[
        list[str] | None,
        typer.Option(help="Workloads of each set to take the mean of.", show_default="workload-1"),
    ] = None,
    only: Annotated[list[str] | None, typer.Option(help="Only these sections, by their keys.")] = None,
    quick: Annotated[
        bool,
        typer.Option(
            "--quick",
            help="A first look in minutes: few jobs of each workload, fewer points, no large cluster.",
        ),
    ] = False,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Processes at a time.", show_default="one a processor")
    ] = None,
) -> None:
    """Simulate what the figures need, draw them, and write OUT/index.html.

    Simulations are kept in OUT/simulations, so that a run that was interrupted goes on where it stopped.
    """
    from pollux.errors import ConfigError, PolluxError
    from pollux.report.catalog import ORDER
    from pollux.report.page import write_report
    from pollux.simulate.files import check_folder
    from pollux.simulate.synthetic import synthetic_traces

    folder, names = traces or synthetic_traces(), workload or ["workload-1"]
    note = f"What the policies do with {', '.join(names)} of each set" + (
        ", a quick look at the first jobs only: its figures show the shape, not the size, of results."
        if quick
        else "."
    )
    try:
        check_folder("--out", out)
        parts = list(_parts(folder, names, only or [], out / "simulations", quick=quick, jobs=jobs))
        if not parts:
            raise ConfigError(f"--only {only}: no section has such a key, or its workloads are not there")
        parts.sort(key=lambda part: ORDER.index(part.key))
        page = write_report(out, parts, title="Pollux: policies compared", note=note)
    except (PolluxError, OSError) as error:
        typer.echo(f"pollux report: {error}", err=True)
        raise typer.Exit(2 if isinstance(error, ValueError | OSError) else 1) from None
    typer.echo(f"{page}: {len(parts)} sections")


def _parts(
    traces: Path, names: list[str], only: list[str], kept_in: Path, *, quick: bool, jobs: int | None
) -> "Iterator[Part]":
    """The parts of the page, in order, once all that they need is simulated; raises as run_cases does."""
    from rich.console import Console
    from rich.progress import track

    from pollux.cli.crowd import run_cases
    from pollux.errors import ConfigError
    from pollux.report.catalog import sections
    from pollux.report.documents import Documents
    from pollux.report.figures import part_of
    from pollux.report.studies import studies
    from pollux.simulate.kept import claim, read_kept

    there = {section.key: section for section in sections(traces, names, quick=quick)}
    others = {study.key: study for study in studies(traces, names, quick=quick)}
    unknown = [key for key in only if key not in there and key not in others]
    if unknown or not there:
        raise ConfigError(
            f"--traces {traces}, --workload {', '.join(names)}, --only {only}: nothing to show; "
            f"there are workloads for these sections: {', '.join([*there, *others]) if there else 'none'}"
        )
    claim(kept_in, traces, f"--out {kept_in.parent}")
    shown = [section for key, section in there.items() if not only or key in only]
    kept = read_kept(kept_in)
    cases = {case.name: case for section in shown for case in section.cases}
    left = [case for name, case in cases.items() if name not in kept]
    results = {**kept, **run_cases(traces, left, kept_in, jobs)}
    yield from (part_of(section, results) for section in shown)
    wanted = [study for key, study in others.items() if not only or key in only]
    console = Console(stderr=True)
    documents = Documents(folder=kept_in, warn=lambda words: typer.echo(f"pollux report: {words}", err=True))
    for study in track(wanted, description="studies", console=console, transient=True):
        yield study.part(documents)
