"""A training whose steps make no update: it says so, and then fails instead of going on for ever."""

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from elastic_runs import Line, linear_model
from gang import run_gang
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.utils.data import IterableDataset

from pollux_agent.errors import LoopError
from pollux_agent.torch import ElasticJob
from pollux_agent.torch.checkpoint import CheckpointStore

PASS_STEPS = 8
NAN, INF = float("nan"), float("inf")


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        data = Line()
        while True:
            yield from (data[at] for at in range(len(data)))


def run(
    spoil: Callable[[int], float | None],
    *,
    epochs: int = 1000,
    scaled: bool = False,
    sharded: bool = False,
    leave: bool = False,
    stop_at: int = -1,
    data: Any = None,
    **arguments: Any,
) -> ElasticJob:
    """Train with the loss times ``spoil(step)``; None makes no step. ``leave``: after each batch."""
    model = linear_model()
    if sharded:
        fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", growth_interval=4) if scaled else None
    plain: dict[str, Any] = {"batch_size": 8, "max_batch_size": 8, "grad_scaler": scaler}
    job = ElasticJob(model, optimizer, Line() if data is None else data, **(plain | arguments))
    for _ in job.epochs(epochs):
        for inputs, targets, _ in job.loader:
            factor = spoil(job.step)
            optimizer.zero_grad()
            loss: Tensor = F.mse_loss(job.model(inputs).squeeze(1), targets) * (factor or 1.0)
            (loss if scaler is None else scaler.scale(loss)).backward()
            if factor is not None and scaler is not None:
                scaler.step(optimizer)
                scaler.update()
            elif factor is not None:
                optimizer.step()
            if job.step == stop_at:
                job.stop()
            if leave:
                break
    return job


NOT_FINITE = "gradients were not finite.*clip"
NOT_CALLED = r"optimizer\.step\(\) was never called in the loop"


@pytest.mark.parametrize(
    ("spoil", "options", "since", "why"),
    [
        pytest.param(lambda _: NAN, {}, 0, NOT_FINITE, id="NaN from the start"),
        pytest.param(lambda step: NAN if step > 9 else 1, {}, 10, NOT_FINITE, id="NaN later"),
        pytest.param(lambda step: INF if step > 9 else 1, {}, 10, NOT_FINITE, id="inf"),
        pytest.param(
            lambda _: NAN, {"max_local_batch_size": 4}, 0, NOT_FINITE, id="NaN in steps of two micro-batches"
        ),
        pytest.param(lambda _: NAN, {"scaled": True}, 0, NOT_FINITE, id="NaN under a GradScaler"),
        pytest.param(lambda _: NAN, {"leave": True}, 0, NOT_FINITE, id="NaN, each pass left after a batch"),
        pytest.param(lambda _: NAN, {"data": Stream()}, 0, NOT_FINITE, id="NaN on a stream without an end"),
        pytest.param(lambda _: None, {}, 0, NOT_CALLED, id="no step"),
        pytest.param(lambda _: None, {"scaled": True}, 0, NOT_CALLED, id="no step of the GradScaler"),
        pytest.param(
            lambda _: None, {"max_local_batch_size": 4}, 0, NOT_CALLED, id="no step of two micro-batches"
        ),
    ],
)
def test_a_training_that_updates_no_more_warns_once_and_fails(
    spoil: Callable[[int], float | None],
    options: dict[str, Any],
    since: int,
    why: str,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
) -> None:
    caplog.set_level(logging.WARNING, "pollux_agent.torch.stall")
    with pytest.raises(LoopError, match=f"no update since step {since}, in 200 steps.*{why}"):
        run(spoil, **options)
    (warning,) = [each for each in caplog.messages if "no update since" in each]
    assert f"no update since step {since}, in 50 steps" in warning


def test_steps_without_an_update_may_last_a_whole_pass() -> None:
    """250 steps are a pass here, and one batch of each can be learnt from."""
    job = run(lambda step: 1.0 if step % 250 == 0 else NAN, epochs=2 / 250, data=Line(2000))
    assert job.complete
    assert job.step == 251
    with pytest.raises(LoopError, match="since step 1, in 250 steps"):
        run(lambda step: 1.0 if step == 0 else NAN, data=Line(2000))


def test_a_grad_scaler_may_look_for_its_scale(caplog: pytest.LogCaptureFixture) -> None:
    job = run(lambda step: INF if step < 30 else 1.0, scaled=True, epochs=2)
    assert job.complete
    assert "no update" not in caplog.text


def stalled_ranks(poisoned: bool, sharded: bool) -> str:
    from torch import distributed as dist

    here = NAN if dist.get_rank() == 1 else 1.0
    try:
        run(lambda _: here if poisoned else None, sharded=sharded)
    except LoopError as error:
        return str(error)
    return "trained"


@pytest.mark.parametrize("sharded", [False, True], ids=["whole model", "sharded model"])
@pytest.mark.parametrize(("poisoned", "why"), [(True, "not finite"), (False, "never called")])
def test_all_ranks_fail_at_the_same_step(poisoned: bool, why: str, sharded: bool) -> None:
    for said in run_gang(2, stalled_ranks, poisoned, sharded):
        assert "no update since step 0, in 200 steps" in said
        assert why in said
        assert "weights are finite" in said


def test_the_last_checkpoint_holds_finite_weights(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    with pytest.raises(LoopError, match=r"weights are finite.*there is no checkpoint"):
        run(lambda _: NAN, checkpoint_dir=tmp_path)
    assert store.newest() is None
    job = run(lambda step: 1.0, epochs=1, checkpoint_dir=tmp_path)
    with pytest.raises(LoopError, match=r"weights are finite.*the checkpoint of step 8 stands"):
        run(lambda _: NAN, checkpoint_dir=tmp_path)
    state = store.load(store.newest() or "")
    assert job.step == PASS_STEPS
    assert all(bool(value.isfinite().all()) for value in state["model"].values())


def test_the_count_goes_on_after_a_restart_but_gives_a_new_process_time(tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        run(lambda _: NAN, checkpoint_dir=tmp_path, stop_at=149, data=Line(2400))
    with pytest.raises(LoopError, match="since step 0, in 351 steps"):
        run(lambda _: NAN, checkpoint_dir=tmp_path, data=Line(2400))
