"""The small trace set that comes with the package: made from published models, nobody's measurements.

Batch sizes and steps an epoch are those of the Pollux paper's experiments (section 5.1: ResNet-18 on
CIFAR-10, DeepSpeech2, BERT fine-tuning). Step times follow its throughput model (Eq. 8 to 11) and gradients
its efficiency model (Eq. 7), with round parameters chosen to scale well, fairly and badly. Times are short:
a replay of all jobs takes seconds.
"""

import csv
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import numpy as np

from pollux_agent.model.throughput import ThroughputParams, grad_time, step_time

FOLDER = "example"
_PLACEMENTS = (
    *((gpus,) for gpus in range(1, 5)),
    *((4, rest) for rest in range(1, 5)),
    *((1, 1), (1, 2), (1, 3), (2, 2), (2, 3), (3, 3)),
    *((4, 4, rest) for rest in range(1, 5)),
    *((1, 1, 1), (2, 2, 2), (4, 4, 4, 4)),
)
_SCALES = ((4, 8), (6, 8), (6, 16), (8, 8), (8, 16), (8, 32), (16, 16), (16, 32), (16, 64))
_JOBS, _HOURS = 24, 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Model:
    """One application: its throughput parameters, and its noise scale at the beginning and at the end."""

    name: str
    params: ThroughputParams
    local: tuple[int, ...]
    batch_sizes: tuple[int, ...]
    epochs: int
    steps: int
    noise: tuple[float, float]
    requests: tuple[tuple[int, int], ...]


_MODELS = (
    _Model(
        name="resnet18",
        params=ThroughputParams(
            alpha_grad=0.02,
            beta_grad=6e-4,
            alpha_sync_local=0.01,
            beta_sync_local=5e-4,
            alpha_sync_node=0.06,
            beta_sync_node=1e-3,
            gamma=2.0,
        ),
        local=(32, 64, 128, 256, 512, 1024),
        batch_sizes=(128, 256, 512, 1024, 2048, 4096),
        epochs=30,
        steps=391,
        noise=(200.0, 20_000.0),
        requests=((4, 1024), (6, 2048), (8, 2048)),
    ),
    _Model(
        name="deepspeech2",
        params=ThroughputParams(
            alpha_grad=0.08,
            beta_grad=8e-3,
            alpha_sync_local=0.08,
            beta_sync_local=5e-3,
            alpha_sync_node=0.3,
            beta_sync_node=4e-3,
            gamma=1.5,
        ),
        local=(10, 20, 40, 80),
        batch_sizes=(20, 40, 80, 160, 320, 640),
        epochs=8,
        steps=360,
        noise=(60.0, 1_500.0),
        requests=((2, 80), (4, 160), (6, 320)),
    ),
    _Model(
        name="bert",
        params=ThroughputParams(
            alpha_grad=0.15,
            beta_grad=0.06,
            alpha_sync_local=0.7,
            beta_sync_local=0.02,
            alpha_sync_node=2.2,
            beta_sync_node=0.01,
            gamma=1.2,
        ),
        local=(4, 6, 8, 12),
        batch_sizes=(12, 24, 48, 96, 192, 384),
        epochs=2,
        steps=1500,
        noise=(400.0, 2_000.0),
        requests=((1, 12), (4, 48), (8, 192)),
    ),
)


def synthetic_traces() -> Path:
    """The folder of the set that is shipped, in the layout of recorded traces."""
    return Path(str(resources.files("pollux.simulate") / FOLDER))


def write_synthetic(folder: Path) -> None:
    """Make the set anew; the same bytes each time."""
    for model in _MODELS:
        _write_application(folder / "apps" / model.name, model)
    rng = np.random.default_rng(1)
    times = np.sort(rng.integers(0, int(_HOURS * 3600), size=_JOBS))
    kinds = rng.choice(len(_MODELS), size=_JOBS, p=[0.6, 0.25, 0.15])
    rows = []
    for number, (time_s, kind) in enumerate(zip(times, kinds, strict=True)):
        model = _MODELS[kind]
        gpus, batch = model.requests[rng.integers(len(model.requests))]
        rows.append((f"{model.name}-{number}", int(time_s), model.name, gpus, batch))
    header = ("name", "time", "application", "num_replicas", "batch_size")
    _write(folder / "workloads" / "synthetic" / "workload-1.csv", header, rows)


def _write_application(folder: Path, model: _Model) -> None:
    placements, scales = [], []
    for shape in _PLACEMENTS:
        for local in model.local:
            digits = "".join(map(str, shape))
            placements.append((digits, local, *_times(model, len(shape), sum(shape), local)))
    for nodes, gpus in _SCALES:
        for local in model.local:
            scales.append((nodes, gpus, local, *_times(model, nodes, gpus, local)))
    _write(folder / "placements.csv", ("placement", "local_bsz", "step_time", "sync_time"), placements)
    header = ("num_nodes", "num_replicas", "local_bsz", "step_time", "sync_time")
    _write(folder / "scalability.csv", header, scales)
    initial = model.batch_sizes[0]
    noise = np.geomspace(*model.noise, model.epochs)
    for batch in model.batch_sizes:
        gain = batch / initial * (noise + initial) / (noise + batch)
        done = np.cumsum(model.steps / gain)
        validation = [
            (float((epoch + 1) * model.steps), round(done[epoch]), 0, initial, _round(noise[epoch]))
            for epoch in range(model.epochs)
        ]
        names = ("progress", "iteration", "metric", "grad_sqr", "grad_var")
        _write(folder / f"validation-{batch}.csv", names, validation)


def _times(model: _Model, nodes: int, gpus: int, local: int) -> tuple[float, float]:
    step_s = float(step_time(model.params, nodes, gpus, local))
    return _round(step_s), _round(step_s - float(grad_time(model.params, local)))


def _round(value: float) -> float:
    return float(f"{value:.6g}")


def _write(path: Path, header: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(header)
        writer.writerows(rows)
