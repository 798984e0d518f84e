"""The user's loop under an ElasticJob: what an optimizer step is, and what it leaves alone."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from elastic_runs import DriverRun, Line, linear_model
from gang import run_gang
from torch import nn

from pollux_agent.errors import CheckpointError, DocumentError, LoopError
from pollux_agent.settings import environment
from pollux_agent.torch import ElasticJob, current_job
from pollux_agent.torch.checkpoint import CheckpointStore


def train(
    job: ElasticJob, optimizer: torch.optim.Optimizer, epochs: int, *, clip: float | None = None
) -> list[int]:
    """Train as a user would; the sample indices in the order of their use."""
    seen: list[int] = []
    for _ in job.epochs(epochs):
        for inputs, targets, indices in job.loader:
            optimizer.zero_grad()
            F.mse_loss(job.model(inputs).squeeze(1), targets).backward()
            if clip is not None:
                nn.utils.clip_grad_norm_(job.model.parameters(), clip)
            optimizer.step()
            seen += indices.tolist()
    return seen


def plain_training(batch_size: int, epochs: int, *, clip: float | None = None) -> list[torch.Tensor]:
    """The parameters after ordinary training over the same batches as the sampler's."""
    from pollux_agent.torch.sampler import ElasticSampler

    model, data = linear_model(), Line()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    sampler = ElasticSampler(len(data), seed=0)
    for _ in range(epochs):
        for batch in torch.tensor(sampler.order()).split(batch_size):
            optimizer.zero_grad()
            F.mse_loss(model(data.inputs[batch]).squeeze(1), data.targets[batch]).backward()
            if clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
        sampler.next_epoch()
    return [parameter.detach() for parameter in model.parameters()]


def elastic_training(local: int, clip: float | None = None) -> list[list[float]]:
    """The parameters after training two epochs at a batch of 8, at most ``local`` samples at a time."""
    model = linear_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    job = ElasticJob(model, optimizer, Line(), batch_size=8, max_batch_size=8, max_local_batch_size=local)
    train(job, optimizer, 2, clip=clip)
    assert job.step == 16
    assert job.progress == pytest.approx(16)
    return [parameter.detach().flatten().tolist() for parameter in model.parameters()]


@pytest.mark.parametrize("clip", [None, 0.3], ids=["unclipped", "gradients clipped by the user"])
@pytest.mark.parametrize("local", [8, 4, 2], ids=["whole", "two micro-batches", "four micro-batches"])
def test_accumulation_trains_as_the_whole_batch_does(local: int, clip: float | None) -> None:
    want = [parameter.flatten().tolist() for parameter in plain_training(8, 2, clip=clip)]
    got = elastic_training(local, clip)
    for mine, plain in zip(got, want, strict=True):
        assert mine == pytest.approx(plain, abs=1e-6)


def test_two_replicas_train_as_one_does() -> None:
    want = [parameter.flatten().tolist() for parameter in plain_training(8, 2)]
    for rank in run_gang(2, elastic_training, 2):
        for mine, plain in zip(rank, want, strict=True):
            assert mine == pytest.approx(plain, abs=1e-6)


def uneven_run() -> tuple[list[int], float]:
    model = linear_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    job = ElasticJob(model, optimizer, Line(7), batch_size=6, max_batch_size=6, max_local_batch_size=3)
    return train(job, optimizer, 2), job.progress


def test_a_last_step_with_fewer_samples_than_replicas_does_not_hang() -> None:
    (first, progress), (second, other) = run_gang(2, uneven_run)
    assert progress == other == pytest.approx(14 / 6)
    assert set(first) | set(second) == set(range(7))


def test_each_epoch_shows_each_sample_once() -> None:
    model = linear_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    job = ElasticJob(model, optimizer, Line(), batch_size=7, max_batch_size=7)
    seen = train(job, optimizer, 3)
    assert [sorted(seen[start : start + 64]) for start in (0, 64, 128)] == [list(range(64))] * 3
    assert job.complete
    assert current_job() is job
    assert job.statistical_epoch == pytest.approx(3)


class RateNotes(torch.optim.SGD):
    """SGD that notes the learning rate of each update."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, lr=lr)
        self.rates: list[float] = []

    def step(self, closure: Any = None) -> Any:
        self.rates.append(self.param_groups[0]["lr"])
        return super().step(closure)


@pytest.mark.parametrize(
    "early", [True, False], ids=["scheduler made before the job", "scheduler made after it"]
)
def test_the_factor_is_applied_to_the_update_alone(early: bool) -> None:
    model = linear_model()
    optimizer = RateNotes(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5) if early else None
    job = ElasticJob(
        model,
        optimizer,
        Line(),
        batch_size=16,
        max_batch_size=16,
        scaling_rule="sqrt",
        lr_schedule=lambda _: 0.1,
    )
    scheduler = scheduler or torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    for _ in job.epochs(2):
        train_pass(job, optimizer)
        scheduler.step()
    assert optimizer.rates == pytest.approx([0.001] * 4 + [0.0005] * 4)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.01 / 4)


def train_pass(job: ElasticJob, optimizer: torch.optim.Optimizer) -> None:
    for inputs, targets, _ in job.loader:
        optimizer.zero_grad()
        F.mse_loss(job.model(inputs).squeeze(1), targets).backward()
        optimizer.step()


def test_a_smaller_last_batch_gets_a_smaller_learning_rate() -> None:
    model = linear_model()
    optimizer = RateNotes(model.parameters(), lr=0.01)
    job = ElasticJob(model, optimizer, Line(20), batch_size=16, max_batch_size=16, scaling_rule="sqrt")
    train(job, optimizer, 1)
    assert optimizer.rates == pytest.approx([0.01, 0.005])


def test_a_step_with_a_broken_gradient_changes_nothing_and_is_no_progress() -> None:
    model = linear_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    job = ElasticJob(model, optimizer, Line(), batch_size=16, max_batch_size=16)
    step = 0
    for _ in job.epochs(1):
        for inputs, targets, _ in job.loader:
            before = [parameter.detach().clone() for parameter in model.parameters()]
            optimizer.zero_grad()
            loss = F.mse_loss(job.model(inputs).squeeze(1), targets)
            (loss * float("nan") if step == 2 else loss).backward()
            optimizer.step()
            same = all(map(torch.equal, before, model.parameters()))
            assert same == (step == 2)
            step += 1
    assert job.progress == pytest.approx(4)
    assert job.step == step == 5


def test_outside_the_loader_the_optimizer_is_an_ordinary_one() -> None:
    model = linear_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ElasticJob(model, optimizer, Line(), batch_size=16)
    before = model.weight.detach().clone()
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    assert torch.allclose(before - model.weight, torch.full((1, 3), 0.2))


def test_a_loop_left_early_keeps_whole_steps_and_drops_the_rest() -> None:
    model = linear_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    job = ElasticJob(model, optimizer, Line(), batch_size=16, max_batch_size=16, max_local_batch_size=8)
    for turn, (inputs, targets, _) in enumerate(job.loader):
        optimizer.zero_grad()
        F.mse_loss(job.model(inputs).squeeze(1), targets).backward()
        optimizer.step()
        if turn == 2:
            break
    assert job.step == 1
    assert all(parameter.grad is None for parameter in model.parameters())
    assert sum(len(indices) for *_, indices in job.loader) == 48


@pytest.mark.parametrize("updated", [False, True], ids=["before its update", "after its update"])
def test_an_error_within_a_step_keeps_it_only_if_it_was_made(updated: bool) -> None:
    model = linear_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    job = ElasticJob(model, optimizer, Line(), batch_size=16, max_batch_size=16)
    with pytest.raises(RuntimeError, match="of the script"):
        for inputs, targets, _ in job.loader:
            optimizer.zero_grad()
            F.mse_loss(job.model(inputs).squeeze(1), targets).backward()
            if job.step == 1 and not updated:
                raise RuntimeError("of the script")
            optimizer.step()
            if job.step == 1:
                raise RuntimeError("of the script")
    assert (job.step, job.progress) == ((2, 2.0) if updated else (1, 1.0))
    assert sum(len(indices) for *_, indices in job.loader) == (32 if updated else 48)


def test_alone_a_job_resumes_from_its_checkpoint_folder(tmp_path: Path) -> None:
    steps = []
    for epochs in (1, 3):
        model = linear_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        job = ElasticJob(model, optimizer, Line(), batch_size=8, max_batch_size=8, checkpoint_dir=tmp_path)
        train(job, optimizer, epochs)
        steps.append((job.step, job.steps_taken))
    assert steps == [(8, 8), (24, 16)]
    for mine, plain in zip(model.parameters(), plain_training(8, 3), strict=True):
        assert torch.allclose(mine, plain, atol=1e-6)


def test_alone_a_training_that_is_terminated_does_not_count_as_a_success(tmp_path: Path) -> None:
    model = linear_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    before = signal.getsignal(signal.SIGTERM)
    try:
        job = ElasticJob(model, optimizer, Line(), batch_size=8, checkpoint_dir=tmp_path)
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(SystemExit) as end:
            train(job, optimizer, 1)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert end.value.code == 128 + signal.SIGTERM
    assert (job.step, len(CheckpointStore(tmp_path).names())) == (1, 1)


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    for model in (linear_model(), nn.Linear(3, 2)):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        if model.out_features == 2:
            with pytest.raises(CheckpointError, match="does not fit the script"):
                ElasticJob(model, optimizer, Line(), batch_size=8, checkpoint_dir=tmp_path)
        else:
            job = ElasticJob(model, optimizer, Line(), batch_size=8, checkpoint_dir=tmp_path)
            job.finish()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param(
            {"batch_size": 65}, "batch_size is 65, but the training set has 64", id="M0 above the data"
        ),
        pytest.param({"batch_size": 0}, "batch_size is 0", id="no M0"),
        pytest.param({"batch_size": 8, "max_batch_size": 4}, "max_batch_size is 4, below", id="max below M0"),
        pytest.param({"batch_size": 8, "max_batch_size": 0}, "max_batch_size is 0, below", id="no batch"),
        pytest.param({"batch_size": 8, "max_local_batch_size": 0}, "max_local_batch_size is 0", id="no m"),
        pytest.param({"batch_size": 8, "scaling_rule": "cube"}, "no rule called 'cube'", id="unknown rule"),
    ],
)
def test_arguments_that_make_no_sense_are_named(arguments: dict[str, Any], message: str) -> None:
    model = linear_model()
    with pytest.raises(DocumentError, match=message):
        ElasticJob(model, torch.optim.SGD(model.parameters(), lr=0.1), Line(), **arguments)


def test_what_is_logged_when_the_run_is_closed_is_named(caplog: pytest.LogCaptureFixture) -> None:
    model = linear_model()
    job = ElasticJob(model, torch.optim.SGD(model.parameters(), lr=0.1), Line(), batch_size=8)
    job.log(accuracy=0.5)
    assert not caplog.records
    job.finish()
    job.log(accuracy=0.9)
    assert "accuracy: not logged" in caplog.text


@pytest.mark.parametrize("loop", ["epochs", "loader"])
def test_a_loop_within_itself_is_an_error_and_no_endless_training(loop: str) -> None:
    model = linear_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    job = ElasticJob(model, optimizer, Line(), batch_size=8)

    def step(inputs: torch.Tensor, targets: torch.Tensor) -> None:
        optimizer.zero_grad()
        F.mse_loss(job.model(inputs).squeeze(1), targets).backward()
        optimizer.step()

    with pytest.raises(LoopError, match=rf"a loop over job\.{loop}.* began within another one"):
        for _ in job.epochs(2):
            for inputs, targets, _ in job.loader:
                if loop == "epochs":
                    train(job, optimizer, 1)
                    break
                for more, wanted, _ in job.loader:
                    step(more, wanted)
                step(inputs, targets)


@pytest.mark.filterwarnings("error")
def test_a_loop_that_was_left_is_not_in_the_way_of_the_next() -> None:
    model = linear_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    job = ElasticJob(model, optimizer, Line(), batch_size=8)
    passes, batches = job.epochs(2), iter(job.loader)
    next(passes)
    next(batches)
    assert len(train(job, optimizer, 2)) == 2 * 64
    batches.close()  # type: ignore[attr-defined]


def test_no_epoch_at_all_is_refused() -> None:
    model = linear_model()
    job = ElasticJob(model, torch.optim.SGD(model.parameters(), lr=0.1), Line(), batch_size=8)
    with pytest.raises(DocumentError, match="epochs is 0"):
        next(job.epochs(0))


def test_state_that_could_not_be_loaded_safely_is_refused_at_once() -> None:
    class Odd:
        def state_dict(self) -> dict[str, Any]:
            return {"where": Path("x")}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...

    model = linear_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(DocumentError, match=r"stateful\['odd'\]"):
        ElasticJob(model, optimizer, Line(), batch_size=8, stateful={"odd": Odd()})


def test_a_disk_that_refuses_events_and_figures_does_not_stop_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = DriverRun(tmp_path)
    for name, value in environment(run.settings(0)).items():
        monkeypatch.setenv(name, value)
    for in_the_way in (run.folder.events(0, 0), run.folder.logged / "x"):
        in_the_way.mkdir(parents=True)
    model = linear_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    job = ElasticJob(model, optimizer, Line(), batch_size=4)
    train(job, optimizer, 1)
    assert (job.step, run.outcome(0).kind) == (48, "done")
    assert "events are not written down" in caplog.text
    assert "logged.json is not written" in caplog.text


def test_a_job_that_scales_strongly_keeps_its_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = DriverRun(
        tmp_path, kind="strong_scaling", initial_batch_size=10, max_batch_size=40, max_local_batch_size=4
    )
    for name, value in environment(run.settings(0)).items():
        monkeypatch.setenv(name, value)
    model = linear_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    job = ElasticJob(model, optimizer, Line(), batch_size=999)
    train(job, optimizer, 1)
    assert (job.batch_size, job.step) == (10, 21)  # 3 epochs of 64 samples: 6 steps of 10 and one of 4 each
    assert job.progress == pytest.approx(19.2)
