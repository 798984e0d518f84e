"""Starts the runs that ``pollux-agent bench overhead`` compares: a process a rank, joined over loopback."""

import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Self

from pollux_agent.bench.pairs import Ratios, alternate
from pollux_agent.bench.tracking import Tracking, tracking_server
from pollux_agent.errors import PolluxAgentError
from pollux_agent.protocol import JobSpec, encode
from pollux_agent.settings import WorkerSettings, environment

SCRIPT = Path(__file__).with_name("overhead_run.py")
REPORT_INTERVAL_S = 15.0
_CALIBRATION_STEPS = 150
_SLACK_S = 120.0

CASES: Mapping[str, tuple[str, int, int]] = MappingProxyType(
    {
        "cnn_1rank": ("cnn", 1, 24),
        "cnn_2rank": ("cnn", 2, 24),
        "transformer_1rank": ("transformer", 1, 16),
        "transformer_2rank": ("transformer", 2, 16),
    }
)
"""Name -> (workload, ranks, samples a rank and step): a plain step takes 5 to 20 ms on one core."""


class Bench:
    """Runs cases; a context manager that owns a scratch folder and a tracking server."""

    def __init__(self, *, seconds: float, pairs: int, most_pairs: int) -> None:
        self._seconds, self._pairs, self._most_pairs = seconds, pairs, most_pairs
        self._stack = ExitStack()
        self._steps: dict[str, int] = {}
        self._number = 0

    def __enter__(self) -> Self:
        scratch = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="pollux-overhead-"))
        self._scratch = Path(scratch)
        self._tracking: Tracking = self._stack.enter_context(tracking_server())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def case(
        self,
        name: str,
        variants: Sequence[str],
        *,
        told: Callable[[str], None],
        python: Path | None = None,
    ) -> Ratios:
        """Ratios of ``variants`` to plain torch; ``python`` is the interpreter if not this one."""
        interpreter = str(python or sys.executable)
        if name not in self._steps:
            step_s = self._run(interpreter, name, "plain", _CALIBRATION_STEPS) / _CALIBRATION_STEPS
            self._steps[name] = max(1, round(self._seconds / step_s))
            told(f"{name}: {self._steps[name]} steps of {1000 * step_s:.1f} ms a run")
        return alternate(
            lambda mode: self._run(interpreter, name, mode, self._steps[name]),
            "plain",
            variants,
            pairs=self._pairs,
            most_pairs=self._most_pairs,
            told=lambda line: told(f"{name}: {line}"),
        )

    def step_ms(self, name: str, ratios: Ratios) -> float:
        """A plain step, in the median run."""
        return 1000 * ratios.baseline_s / self._steps[name]

    def _run(self, python: str, name: str, mode: str, steps: int) -> float:
        workload, ranks, local_batch = CASES[name]
        self._number += 1
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        common = os.environ | self._variables(mode, ranks, local_batch, port)
        processes = [
            subprocess.Popen(
                [python, str(SCRIPT), mode, workload, str(local_batch), str(steps)],
                env=common | {"RANK": str(rank), "LOCAL_RANK": str(rank), "ADAPTDL_REPLICA_RANK": str(rank)},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(ranks)
        ]
        try:
            answers = [each.communicate(timeout=10 * self._seconds + _SLACK_S) for each in processes]
        finally:
            for process in processes:
                process.kill()
                process.wait()
        for process, (_, said) in zip(processes, answers, strict=True):
            if process.returncode != 0:
                raise PolluxAgentError(f"the {mode} run of {name} failed: {said.strip()[-2000:]}")
        return float(answers[0][0].split()[-1])

    def _variables(self, mode: str, ranks: int, local_batch: int, port: int) -> dict[str, str]:
        variables = {
            "WORLD_SIZE": str(ranks),
            "LOCAL_WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
        }
        if mode == "adaptdl":
            return variables | {
                "ADAPTDL_MASTER_ADDR": "127.0.0.1",
                "ADAPTDL_MASTER_PORT": str(port),
                "ADAPTDL_NUM_REPLICAS": str(ranks),
                "ADAPTDL_NUM_NODES": "1",
            }
        if mode == "plain":
            return variables
        settings = WorkerSettings(
            job_id=f"overhead-{self._number}",
            job_dir=self._scratch / str(self._number),
            incarnation=0,
            node="node-0",
            slots=tuple(range(ranks)),
            placement={"node-0": ranks},
            report_interval_s=REPORT_INTERVAL_S,
            mlflow_tracking_uri=self._tracking.url,
            mlflow_run_id="r",
        )
        settings.job_dir.mkdir()
        spec = JobSpec(
            name="overhead",
            script=str(SCRIPT),
            kind="strong_scaling",
            initial_batch_size=local_batch * ranks,
            max_local_batch_size=local_batch,
            max_gpus=ranks,
        )
        settings.folder.spec.write_text(encode(spec))
        self._tracking.tags.clear()
        return variables | environment(settings)
