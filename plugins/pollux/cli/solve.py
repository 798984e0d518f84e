"""``pollux solve``: the decision and the plan for a saved snapshot; pure, without any service."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pollux.cli import app
from pollux.cli.saved import from_saved

if TYPE_CHECKING:
    from rich.table import Table

    from pollux.plan import Action
    from pollux.snapshot import Decision, Snapshot


@app.command()
def solve(
    snapshot_file: Annotated[Path, typer.Argument(metavar="SNAPSHOT.json", help="A saved snapshot.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print decision and plan as one object.")] = False,
) -> None:
    """Decide for a saved snapshot: what every job gets and why, and what would be done. Changes nothing.

    The same snapshot always gives the same decision. Every cycle saves its snapshot as
    decisions/NUMBER/snapshot.json in the stack's state folder.
    """
    from pollux.plan import plan
    from pollux.policy import decide
    from pollux_agent.protocol import to_plain

    def answer(snapshot: "Snapshot") -> "tuple[Snapshot, Decision, tuple[Action, ...]]":
        decision = decide(snapshot)
        return snapshot, decision, plan(snapshot, decision)

    snapshot, decision, actions = from_saved(snapshot_file, answer)
    if as_json:
        plain = {"decision": to_plain(decision), "plan": [to_plain(action) for action in actions]}
        typer.echo(json.dumps(plain, sort_keys=True, indent=2))
    else:
        _print(snapshot, decision, actions)


def _print(snapshot: "Snapshot", decision: "Decision", actions: "tuple[Action, ...]") -> None:
    from rich.console import Console

    console = Console()
    total = sum(node.gpus for node in snapshot.nodes)
    given = sum(sum(job.placement.values()) for job in decision.jobs.values())
    console.print(
        f"decision {decision.decision} by {decision.policy}: {given} of {total} GPUs "
        f"to {len(snapshot.jobs)} jobs, objective {decision.objective:.4f}"
    )
    console.print(_decision_table(snapshot, decision))
    for job in snapshot.jobs:
        console.print(
            f"{job.name or job.job_id}: {decision.jobs[job.job_id].reason}", markup=False, highlight=False
        )
    if actions:
        console.print(_plan_table(actions))
    else:
        console.print("plan: nothing to do")


def _decision_table(snapshot: "Snapshot", decision: "Decision") -> "Table":
    from rich.markup import escape
    from rich.table import Table

    table = Table(title="decision", title_justify="left")
    for name in ("job", "now", "gets", "predicted goodput", "speed-up"):
        table.add_column(name, overflow="fold")
    for job in snapshot.jobs:
        answer = decision.jobs[job.job_id]
        goodput = "" if answer.goodput is None else f"{answer.goodput_now or 0:.4g} -> {answer.goodput:.4g}"
        table.add_row(
            escape(job.name or job.job_id),
            escape(_placement(job.placement)),
            escape(_placement(answer.placement)),
            goodput,
            "" if answer.speedup is None else f"{answer.speedup:.2f}",
        )
    return table


def _plan_table(actions: "tuple[Action, ...]") -> "Table":
    from rich.markup import escape
    from rich.table import Table

    table = Table(title="plan, in this order", title_justify="left")
    for name in ("action", "job", "from", "to"):
        table.add_column(name)
    for action in actions:
        before, after = _placement(action.before), _placement(action.after)
        table.add_row(action.kind, escape(action.job_id), escape(before), escape(after))
    return table


def _placement(placement: Mapping[str, int]) -> str:
    return ", ".join(f"{name}: {gpus}" for name, gpus in sorted(placement.items())) or "-"
