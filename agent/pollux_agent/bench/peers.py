"""Runs a measurement in the environment of the peers, which `make peers` makes."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")

DEFAULT_PEERS = Path(".peers")


def peer_python(peers: Path) -> Path | None:
    """The peers' interpreter, None where that environment was not made."""
    python = peers / "bin" / "python"
    return python if python.exists() else None


def ask_peer(python: Path, script: Path, question: object) -> Any:
    """What ``script`` answers: it reads JSON from its input and prints JSON, in one process and on one core.

    Raises subprocess.CalledProcessError if it fails.
    """
    done = subprocess.run(
        [str(python), "-W", "ignore", str(script)],
        input=json.dumps(question),
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | dict.fromkeys(_THREADS, "1"),
    )
    return json.loads(done.stdout)
