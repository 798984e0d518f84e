"""Runs a measurement in the environment of the peers, which `make peers` makes."""

import json
import subprocess
from pathlib import Path
from typing import Any

DEFAULT_PEERS = Path(".peers")


def peer_python(peers: Path) -> Path | None:
    """The peers' interpreter, None where that environment was not made."""
    python = peers / "bin" / "python"
    return python if python.exists() else None


def ask_peer(python: Path, script: Path, question: object) -> Any:
    """What ``script`` answers: it reads JSON from its input and prints JSON, in one process.

    Raises subprocess.CalledProcessError if it fails.
    """
    done = subprocess.run(
        [str(python), "-W", "ignore", str(script)],
        input=json.dumps(question),
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout)
