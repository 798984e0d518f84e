"""A pod that runs this machine's own Python, on nodes that are parts of this machine."""

import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pollux
import pollux_agent

HOST_IMAGE = "localhost/host:1"
"""An empty system, which has its files from the mounts."""


def host_pod(share: float, *, working_dir: Path, folders: Iterable[Path] = ()) -> dict[str, Any]:
    """Mounts what this Python needs, read-only. ``share`` is the part of a core that one GPU stands for."""
    paths = _outermost(["/usr", sys.base_prefix, sys.prefix, working_dir, *_packages(), *folders])
    names = [f"host-{number}" for number in range(len(paths))]
    container = {
        "name": "base",
        "image": HOST_IMAGE,
        "workingDir": str(working_dir),
        "env": [
            {"name": "POLLUX_SLOT_SHARE", "value": f"{share:.3f}"},
            {"name": "OMP_NUM_THREADS", "value": "1"},
        ],
        "resources": {"requests": {"cpu": "10m", "memory": "64Mi"}},
        "volumeMounts": [
            {"name": name, "mountPath": path, "readOnly": True}
            for name, path in zip(names, paths, strict=True)
        ],
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"labels": {"app.kubernetes.io/part-of": "pollux-demo"}},
        "spec": {
            "hostNetwork": True,
            "containers": [container],
            "volumes": [
                {"name": name, "hostPath": {"path": path}} for name, path in zip(names, paths, strict=True)
            ],
        },
    }


def _packages() -> list[Path]:
    """Where our own packages lie, also when they are installed from a checkout."""
    return [Path(folder) for package in (pollux, pollux_agent) for folder in package.__path__]


def _outermost(paths: Iterable[str | Path]) -> list[str]:
    """Real paths, without those inside of others."""
    found: list[str] = []
    for path in sorted({os.path.realpath(path) for path in paths}):
        if not any(path == outer or path.startswith(f"{outer}/") for outer in found):
            found.append(path)
    return found
