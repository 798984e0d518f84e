"""``pollux explain``: why one job got what it got, from a saved snapshot."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pollux.cli import app
from pollux.cli.saved import from_saved

if TYPE_CHECKING:
    from pollux.policy.whatif import Explanation
    from pollux.snapshot import Decision, Snapshot


@app.command()
def explain(
    snapshot_file: Annotated[Path, typer.Argument(metavar="SNAPSHOT.json", help="A saved snapshot.")],
    job: Annotated[str, typer.Argument(help="The job's id, or its name.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one object.")] = False,
) -> None:
    """Say in plain words why a job gets what it gets: goodput, price of a restart, rule that binds.

    Decides as `pollux solve` does, and lists what every configuration that the job may have would be worth.
    """
    from dataclasses import asdict

    from pollux.policy import decide
    from pollux.policy.whatif import explain_job

    def answer(snapshot: "Snapshot") -> "tuple[Decision, Explanation]":
        decision = decide(snapshot)
        return decision, explain_job(snapshot, decision, job)

    decision, explanation = from_saved(snapshot_file, answer)
    if as_json:
        typer.echo(json.dumps(asdict(explanation), indent=2))
    else:
        _print(decision, explanation)


def _print(decision: "Decision", explanation: "Explanation") -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    lines = [
        f"decision {decision.decision} by {decision.policy}, job {explanation.job_id}",
        explanation.reason,
        f"what binds: {explanation.binding}",
        _goodput(explanation),
        _restart(decision, explanation),
    ]
    for line in lines:
        console.print(line, markup=False, highlight=False)
    unit = "" if explanation.fitted else " (goodput: GPUs of perfect scaling)"
    table = Table(title=f"what each configuration is worth to it{unit}", title_justify="left")
    for name in ("nodes", "GPUs", "type", "goodput", "speed-up", ""):
        table.add_column(name, justify="right")
    for each in explanation.alternatives:
        marks = [name for name, holds in (("now", each.now), ("decided", each.decided)) if holds]
        table.add_row(
            str(each.nodes),
            str(each.gpus),
            each.gpu_type,
            f"{each.goodput:.4g}",
            f"{each.speedup:.2f}",
            ", ".join(marks),
        )
    console.print(table)


def _restart(decision: "Decision", explanation: "Explanation") -> str:
    takes = f"a restart takes it {explanation.restart_s:.0f} s"
    if explanation.restart_factor is None:
        return f"{takes}, which policy {decision.policy} does not price"
    return (
        f"{takes}, for which {decision.policy} counts a change of its GPUs at "
        f"{explanation.restart_factor:.2f} of its worth"
    )


def _goodput(explanation: "Explanation") -> str:
    if not explanation.fitted:
        return "goodput is not known yet: nothing was measured, so it counts as scaling perfectly"
    now, then = (
        "not known" if value is None else f"{value:.4g} samples/s"
        for value in (explanation.goodput_now, explanation.goodput)
    )
    against = (
        "" if explanation.speedup is None else f"; speed-up against the fair share {explanation.speedup:.2f}"
    )
    return f"goodput: {now} now, {then} decided{against}"
