"""``pollux report``: what the policies do with recorded workloads, as a page with figures."""

from pathlib import Path
from typing import Annotated

import typer

from pollux.cli import app


@app.command()
def report(
    out: Annotated[Path, typer.Option(help="Folder for the page, its figures and the simulations.")],
    traces: Annotated[
        Path | None, typer.Option(help="Folder with apps/ and workloads/. [default: the synthetic set]")
    ] = None,
    workload: Annotated[
        list[str] | None,
        typer.Option(help="Workloads of each set to take the mean of. [default: workload-1]"),
    ] = None,
    only: Annotated[list[str] | None, typer.Option(help="Only these sections, by their keys.")] = None,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Processes at a time. [default: one a processor]")
    ] = None,
) -> None:
    """Simulate what the figures need, draw them, and write OUT/index.html.

    Simulations are kept in OUT/simulations, so that a run that was interrupted goes on where it stopped.
    """
    from pollux.cli.crowd import run_cases
    from pollux.errors import ConfigError, PolluxError
    from pollux.report.page import write_report
    from pollux.report.sections import sections
    from pollux.simulate.kept import read_kept
    from pollux.simulate.synthetic import synthetic_traces

    folder = traces or synthetic_traces()
    names = workload or ["workload-1"]
    try:
        every = sections(folder, names)
        shown = [section for section in every if not only or section.key in only]
        if not shown:
            known = ", ".join(section.key for section in every) or "none"
            raise ConfigError(
                f"--traces {folder}, --workload {', '.join(names)}, --only {only}: nothing to show; "
                f"there are workloads for these sections: {known}"
            )
        kept = read_kept(out / "simulations")
        cases = {case.name: case for section in shown for case in section.cases}
        left = [case for name, case in cases.items() if name not in kept]
        results = {**kept, **run_cases(folder, left, out / "simulations", jobs)}
        page = write_report(out, shown, results, title=f"Pollux on {', '.join(names)}")
    except (PolluxError, OSError) as error:
        typer.echo(f"pollux report: {error}", err=True)
        raise typer.Exit(2 if isinstance(error, ValueError | OSError) else 1) from None
    typer.echo(f"{page}: {len(shown)} sections from {len(cases)} simulations")
