"""A cluster of the demo's own, from a folder of scripts that start and end one."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pollux.errors import DemoError
from pollux.local.nodes import LocalNodes

_SCRIPT_S = 300
_NODE_GRACE = "25s"
"""Silence after which a node counts as gone; the scripts' default is for nodes without a kubelet."""
_SHOWN_CHARS = 2_000


@contextmanager
def own_cluster(scripts: Path, state: Path, nodes: LocalNodes) -> Iterator[Path]:
    """A new cluster with these nodes, in the folder ``state``; its kubeconfig.

    It is gone after the block, and what a demo that was killed left there is gone before.

    Raises DemoError with the script's own words.
    """
    if state.exists():
        _run(scripts / "down.sh", "--purge", state)
    try:
        kubeconfig = Path(_run(scripts / "up.sh", state).splitlines()[-1])
        for node in nodes.nodes:
            _run(scripts / "node-up.sh", node.name, str(node.slots), state)
        yield kubeconfig
    finally:
        _run(scripts / "down.sh", "--purge", state)


def _run(script: Path, *arguments: str | Path) -> str:
    """What it printed; its state folder is the last argument."""
    command = [str(script), *map(str, arguments)]
    environ = {"KUBE_NODE_GRACE": _NODE_GRACE, **os.environ}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=_SCRIPT_S, env=environ
        )
    except subprocess.TimeoutExpired:
        raise DemoError(
            f"{script} did not end within {_SCRIPT_S} s; see the logs in {arguments[-1]}"
        ) from None
    except OSError as error:
        raise DemoError(f"{script} cannot be run: {error}") from None
    if done.returncode != 0:
        raise DemoError(f"{' '.join(command)} failed:\n{done.stderr[-_SHOWN_CHARS:]}")
    return done.stdout.strip()
