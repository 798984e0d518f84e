"""The checks as a table for people."""

from collections.abc import Sequence

from rich.markup import escape
from rich.table import Table

from pollux.verify.checks import Check


def checks_table(checks: Sequence[Check]) -> Table:
    """One row a check; what a run's files say is shown as text, never as markup."""
    failed = sum(not check.ok for check in checks)
    title = f"{failed} of {len(checks)} checks failed" if failed else f"all {len(checks)} checks passed"
    table = Table(title=title, title_style="bold red" if failed else "bold green")
    table.add_column("check")
    table.add_column("verdict")
    table.add_column("what was found", overflow="fold")
    for check in checks:
        verdict = "[green]ok[/]" if check.ok else "[bold red]FAILED[/]"
        table.add_row(check.name, verdict, escape(check.explanation))
    return table
