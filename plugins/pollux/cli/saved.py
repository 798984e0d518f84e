"""What commands make of a saved snapshot, and how they end where they cannot."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import typer

if TYPE_CHECKING:
    from pollux.snapshot import Snapshot

T = TypeVar("T")


def from_saved(path: Path, answer: "Callable[[Snapshot], T]") -> T:
    """What ``answer`` makes of the snapshot in a file; ends with 2 for a bad one, else 1 for no answer."""
    from pollux.errors import ConfigError, DecisionError, SnapshotError
    from pollux.snapshot import Snapshot
    from pollux_agent.errors import DocumentError
    from pollux_agent.protocol import decode

    try:
        snapshot = decode(Snapshot, path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, DocumentError) as error:
        typer.echo(f"{path}: {error}", err=True)
        raise typer.Exit(2) from None
    try:
        return answer(snapshot)
    except (ConfigError, SnapshotError) as error:
        typer.echo(f"{path}: {error}", err=True)
        raise typer.Exit(2) from None
    except DecisionError as error:
        typer.echo(f"the policy's decision breaks a rule: {error}", err=True)
    except MemoryError:
        gpus = sum(node.gpus for node in snapshot.nodes)
        what = f"{len(snapshot.jobs)} jobs on {gpus} GPUs of {len(snapshot.nodes)} nodes"
        typer.echo(f"{path}: {what} need more memory than there is; try it on a larger machine", err=True)
    raise typer.Exit(1)
