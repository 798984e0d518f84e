"""The races of ``pollux-agent bench overhead``: the same training in several modes, which train in turns.

Of all the processes only those of one mode run at a time, for a quarter of a second, while the others are
stopped by SIGSTOP, background threads and all. So each mode meets the same machine, however its speed drifts.
Memory is in huge pages where the kernel grants them: with small ones the pages that a process happens to
get make it up to a tenth faster or slower than another one of the same code, for as long as it lives.
"""

import os
import socket
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Self

from pollux_agent.bench.competitor import Competitor
from pollux_agent.bench.pairs import Ratios, compare
from pollux_agent.bench.tracking import tracking_server
from pollux_agent.protocol import JobSpec, encode
from pollux_agent.settings import WorkerSettings, environment

SCRIPT = Path(__file__).with_name("overhead_run.py")
REPORT_INTERVAL_S, CHECKPOINT_INTERVAL_S = 15.0, 30.0
"""Of a mode's own running time."""

_TURN_S = 0.25
_CALIBRATION_STEPS = 150

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
    """Runs cases; a context manager that owns a scratch folder."""

    def __init__(self, *, seconds: float, pairs: int, most_pairs: int, clock: str = "wall") -> None:
        self._seconds, self._pairs, self._most_pairs, self._clock = seconds, pairs, most_pairs, clock
        self._stack = ExitStack()
        self._step_s: dict[str, float] = {}
        self._numbers = count()

    def __enter__(self) -> Self:
        scratch = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="pollux-overhead-"))
        self._scratch = Path(scratch)
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
        if name not in self._step_s:
            (took_s,) = self._race(interpreter, name, ["plain"], turns=1, steps=_CALIBRATION_STEPS)
            self._step_s[name] = took_s / _CALIBRATION_STEPS
            told(f"{name}: {round(self._seconds / self._step_s[name])} steps a run")
        steps = max(1, round(_TURN_S / self._step_s[name]))
        turns = max(1, round(self._seconds / self._step_s[name] / steps))
        return compare(
            lambda modes: self._race(interpreter, name, modes, turns=turns, steps=steps),
            "plain",
            variants,
            pairs=self._pairs,
            most_pairs=self._most_pairs,
            told=lambda line: told(f"{name}: {line}"),
        )

    def step_ms(self, name: str) -> float:
        """A plain step, when the case began."""
        return 1000 * self._step_s[name]

    def _race(
        self, python: str, name: str, modes: Sequence[str], *, turns: int, steps: int
    ) -> Sequence[float]:
        """Seconds of each of ``modes`` for ``turns`` times ``steps`` steps, in turns of ``steps``."""
        with ExitStack() as stack:
            competitors = [self._competitor(stack, python, name, mode, len(modes)) for mode in modes]
            seconds = [0.0] * len(modes)
            for _ in range(turns):
                for place, competitor in enumerate(competitors):
                    seconds[place] += competitor.turn(steps)
        return seconds

    def _competitor(
        self, stack: ExitStack, python: str, name: str, mode: str, num_competitors: int
    ) -> Competitor:
        workload, ranks, local_batch = CASES[name]
        folder = self._scratch / str(next(self._numbers))
        folder.mkdir()
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        variables = _variables(ranks, port) | _adaptdl_variables(ranks, port)
        if mode in ("agent", "every"):
            url = stack.enter_context(tracking_server()).url
            variables |= _agent_variables(folder, ranks, local_batch, url, num_competitors)
        return stack.enter_context(
            Competitor(
                f"the {mode} run of {name}",
                [python, str(SCRIPT), mode, workload, str(local_batch), self._clock],
                [os.environ | variables | _rank_variables(rank) for rank in range(ranks)],
                folder,
            )
        )


def _variables(ranks: int, port: int) -> dict[str, str]:
    return {
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
        "THP_MEM_ALLOC_ENABLE": "1",
    }


def _adaptdl_variables(ranks: int, port: int) -> dict[str, str]:
    return {
        "ADAPTDL_MASTER_ADDR": "127.0.0.1",
        "ADAPTDL_MASTER_PORT": str(port),
        "ADAPTDL_NUM_REPLICAS": str(ranks),
        "ADAPTDL_NUM_NODES": "1",
    }


def _rank_variables(rank: int) -> dict[str, str]:
    return {"RANK": str(rank), "LOCAL_RANK": str(rank), "ADAPTDL_REPLICA_RANK": str(rank)}


def _agent_variables(
    folder: Path, ranks: int, local_batch: int, tracking_url: str, num_competitors: int
) -> dict[str, str]:
    """A worker's environment; of the wall time of its intervals it runs one part in ``num_competitors``."""
    settings = WorkerSettings(
        job_id=f"overhead-{folder.name}",
        job_dir=folder,
        incarnation=0,
        node="node-0",
        slots=tuple(range(ranks)),
        placement={"node-0": ranks},
        report_interval_s=REPORT_INTERVAL_S * num_competitors,
        checkpoint_interval_s=CHECKPOINT_INTERVAL_S * num_competitors,
        mlflow_tracking_uri=tracking_url,
        mlflow_run_id="r",
    )
    spec = JobSpec(
        name="overhead",
        script=str(SCRIPT),
        kind="strong_scaling",
        initial_batch_size=local_batch * ranks,
        max_local_batch_size=local_batch,
        max_gpus=ranks,
    )
    settings.folder.spec.write_text(encode(spec))
    return environment(settings)
