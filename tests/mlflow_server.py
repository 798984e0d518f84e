"""A real MLflow server of a test's own."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from pollux.local.ports import free_port

_START_S = 120


@contextmanager
def mlflow_server(folder: Path, *options: str) -> Iterator[str]:
    """Its URL, for the time of the block."""
    url = f"http://127.0.0.1:{(port := free_port())}"
    command = [sys.executable, "-m", "mlflow", "server", "--host=127.0.0.1", f"--port={port}", "--workers=1"]
    command += [f"--backend-store-uri=sqlite:///{folder / 'mlflow.db'}", *options]
    command += [f"--artifacts-destination={folder / 'artifacts'}"]
    environ = os.environ | {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    with (folder / "mlflow.log").open("ab") as log:
        process = subprocess.Popen(command, env=environ, stdout=log, stderr=log, start_new_session=True)
    try:
        until_s = time.monotonic() + _START_S
        while not _answers(url):
            assert process.poll() is None and time.monotonic() < until_s, (folder / "mlflow.log").read_text()
            time.sleep(0.1)
        yield url
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(30)


def _answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=5).is_success
    except httpx.TransportError:
        return False
