"""Several replicas stop together, and another number of them goes on."""

import os
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from elastic_runs import DriverRun, Line, linear_model
from gang import run_gang

from pollux_agent.settings import environment
from pollux_agent.torch import ElasticJob


def member(environ: dict[str, str], stop_at: int) -> dict[str, Any]:
    """Train as one of the gang; the last rank alone gets SIGTERM at its step ``stop_at``."""
    from torch import distributed as dist

    rank = dist.get_rank()
    os.environ.update(environ, LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(dist.get_world_size()))
    model = linear_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    job = ElasticJob(model, optimizer, Line(), batch_size=999)
    seen: list[tuple[int, int]] = []
    stopped = False
    try:
        for epoch in job.epochs(1):
            for inputs, targets, indices in job.loader:
                optimizer.zero_grad()
                if job.steps_taken == stop_at and rank == dist.get_world_size() - 1:
                    os.kill(os.getpid(), signal.SIGTERM)
                F.mse_loss(job.model(inputs).squeeze(1), targets).backward()
                optimizer.step()
                seen += [(epoch, index) for index in indices.tolist()]
    except SystemExit as end:
        stopped = end.code == 0
    weights = [parameter.detach().flatten().tolist() for parameter in model.parameters()]
    return {
        "seen": seen,
        "stopped": stopped,
        "step": job.step,
        "weights": weights,
        "momentum": momentum(optimizer),
    }


def momentum(optimizer: torch.optim.Optimizer) -> list[list[float]]:
    return [state["momentum_buffer"].flatten().tolist() for state in optimizer.state.values()]


def test_one_rank_asked_to_stop_stops_all_at_the_same_step_and_a_resized_gang_goes_on(tmp_path: Path) -> None:
    run = DriverRun(tmp_path, kind="strong_scaling", initial_batch_size=8, max_batch_size=8)
    seen: list[tuple[int, int]] = []
    for incarnation, (ranks, stop_at) in enumerate([(2, 5), (3, 4), (1, -1)]):
        settings = run.settings(incarnation, slots=tuple(range(ranks)), placement={"node-0": ranks})
        gang = run_gang(ranks, member, environment(settings), stop_at)
        assert len({answer["step"] for answer in gang}) == 1
        assert all(answer["weights"] == gang[0]["weights"] for answer in gang)
        assert all(answer["momentum"] == gang[0]["momentum"] for answer in gang)
        for rank, answer in enumerate(gang):
            seen += answer["seen"]
            assert answer["stopped"] == (stop_at >= 0)
            outcome = run.outcome(incarnation, rank)
            assert outcome.kind == ("interrupted" if stop_at >= 0 else "done")
            assert outcome.step == answer["step"]
            events = run.events(incarnation, rank)
            assert events[-1].event == ("stop" if stop_at >= 0 else "done")
            assert all(event.slots == (rank,) for event in events)
    assert [run.outcome(number).step for number in range(3)] == [6, 11, 24]
    for epoch in range(3):
        assert Counter(index for number, index in seen if number == epoch) == Counter(range(64))
