"""Arguments that an ElasticJob cannot use: refused at once by name, with the value and the fix."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from elastic_runs import Line, linear_model
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, default_collate

from pollux_agent.errors import DocumentError
from pollux_agent.torch import ElasticJob
from pollux_agent.torch.arguments import checked_multiplier
from pollux_agent.torch.telemetry import figure

NAN = float("nan")


class Nothing(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __len__(self) -> int:
        return 0


def sgd() -> torch.optim.Optimizer:
    return torch.optim.SGD(linear_model().parameters(), lr=0.1)


def job_of(**arguments: Any) -> ElasticJob:
    """A job that would train, but for these arguments."""
    model = linear_model()
    plain: dict[str, Any] = {
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "train_set": Line(),
        "batch_size": 8,
    }
    return ElasticJob(**(plain | arguments))


TWICE = sgd()

WRONG_KINDS: dict[str, list[Any]] = {
    "model": [None, F.relu],
    "train_set": [DataLoader(Line(), batch_size=4)],
    "optimizer": [None, [None], 0.1, StepLR(sgd(), 1), iter([sgd()])],
    "batch_size": [None, True, 2.5, "8", NAN],
    "max_batch_size": [True, 16.0, "16"],
    "max_local_batch_size": [False, 2.5, "8"],
    "min_local_batch_size": [1.0, "1"],
    "num_samples": [64.0, "64"],
    "seed": [None, True, 0.5, "a"],
    "noise_every": [None, True, 1.5, "10"],
    "num_workers": [None, True, 1.5, "2"],
    "pin_memory": [None, "x", 1],
    "checkpoint_dir": [7, b"kept", True],
    "lr_schedule": [0.1, StepLR(sgd(), 1)],
    "lr_scheduler": [0.1, F.relu, [sgd()], ReduceLROnPlateau(sgd()), [ReduceLROnPlateau(sgd())]],
    "grad_scaler": [1, sgd()],
    "collate_fn": [1, "default"],
    "worker_init_fn": [1],
    "watch": [3, True, ["loss"]],
    "mlflow_tracking_uri": [3],
    "stateful": [[1], linear_model()],
}
WRONG_VALUES: dict[str, list[Any]] = {
    "train_set": [TensorDataset(torch.zeros(0, 3)), [], Nothing()],
    "optimizer": [[], (), sgd(), [sgd()], [TWICE, TWICE]],
    "batch_size": [0, -1, 65],
    "max_batch_size": [0, 4],
    "max_local_batch_size": [0, -3],
    "min_local_batch_size": [0, -1],
    "num_samples": [0, -1, 100],
    "seed": [-1],
    "noise_every": [0, -1],
    "num_workers": [-1, 100_000],
    "stateful": [{3: linear_model()}, {"": linear_model()}],
    "checkpoint_dir": [""],
    "watch": [""],
}


def each_of(table: dict[str, list[Any]]) -> list[Any]:
    return [
        pytest.param(name, value, id=f"{name}={value if isinstance(value, str | int | float) else at}")
        for name, values in table.items()
        for at, value in enumerate(values)
    ]


@pytest.mark.parametrize(("name", "value"), each_of(WRONG_KINDS))
def test_a_wrong_kind_is_a_type_error_with_name_value_and_fix(name: str, value: Any) -> None:
    with pytest.raises(TypeError) as error:
        job_of(**{name: value})
    said = str(error.value)
    assert said.startswith(f"{name} is ")
    assert repr(value) in said or type(value).__name__ in said or "ReduceLROnPlateau" in said
    assert "give " in said or "stateful" in said


@pytest.mark.parametrize(("name", "value"), each_of(WRONG_VALUES))
def test_a_value_that_cannot_be_is_a_document_error_with_name_value_and_fix(name: str, value: Any) -> None:
    with pytest.raises(DocumentError) as error:
        job_of(**{name: value})
    assert f"{name} is " in str(error.value)
    assert len(str(error.value).split(";")) > 1


@pytest.mark.parametrize(
    ("arguments", "fix"),
    [
        ({"train_set": DataLoader(Line(), batch_size=4)}, r"give its data set \(loader\.dataset\)"),
        (
            {"train_set": TensorDataset(torch.zeros(0, 3))},
            "train_set is empty: its TensorDataset has 0 samples",
        ),
        ({"lr_scheduler": ReduceLROnPlateau(sgd())}, "once a pass, and name it in stateful"),
        ({"lr_scheduler": F.relu}, "goes in as lr_schedule"),
        ({"optimizer": []}, "Optimizer that the loop steps"),
    ],
    ids=["loader", "empty set", "plateau", "function as scheduler", "no optimizer"],
)
def test_the_fix_is_the_one_that_helps(arguments: dict[str, Any], fix: str) -> None:
    with pytest.raises((TypeError, DocumentError), match=fix):
        job_of(**arguments)


def test_what_is_right_is_taken(tmp_path: Path) -> None:
    for value in (str(tmp_path / "text"), tmp_path / "path"):
        model = linear_model()
        optimizer = torch.optim.SGD([model.bias], lr=0.1)
        job = job_of(
            model=model,
            optimizer=(optimizer,),
            grad_scaler=torch.amp.GradScaler("cpu"),
            batch_size=np.int64(8),
            max_batch_size=np.int32(16),
            seed=0,
            noise_every=1,
            checkpoint_dir=value,
            collate_fn=default_collate,
            lr_scheduler=[StepLR(optimizer, 1)],
            watch="loss",
            stateful={},
        )
        assert job.batch_size == 8


@pytest.mark.parametrize(
    ("schedule", "gave"),
    [
        (lambda epoch: None, "None"),
        (lambda epoch: NAN, "nan"),
        (lambda epoch: float("inf"), "inf"),
        (lambda epoch: -1.0, r"-1\.0"),
        (lambda epoch: "0.1", "'0.1'"),
        (lambda epoch: NAN if epoch > 0.2 else 1.0, "nan at epoch 0.25"),
    ],
    ids=["None", "NaN", "inf", "negative", "text", "NaN later"],
)
def test_a_schedule_that_gives_no_multiplier_is_named(schedule: Callable[[float], Any], gave: str) -> None:
    with pytest.raises(DocumentError, match=f"lr_schedule gave {gave}.*finite number from 0 on"):
        run(schedule)


@pytest.mark.parametrize("multiplier", [0, 0.5, np.float32(0.5), torch.tensor(0.5)], ids=str)
def test_a_schedule_may_give_any_number_from_0_on(multiplier: Any) -> None:
    assert run(lambda epoch: multiplier).complete


def run(schedule: Callable[[float], Any]) -> ElasticJob:
    model = linear_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    job = ElasticJob(model, optimizer, Line(), batch_size=8, max_batch_size=8, lr_schedule=schedule)
    for _ in job.epochs(1):
        for inputs, targets, _ in job.loader:
            optimizer.zero_grad()
            F.mse_loss(job.model(inputs).squeeze(1), targets).backward()
            optimizer.step()
    return job


@pytest.mark.parametrize("epochs", [None, "3", True, [1]], ids=str)
def test_epochs_are_a_number(epochs: Any) -> None:
    with pytest.raises(TypeError, match=r"epochs is .*; give a number"):
        next(job_of().epochs(epochs))


def normed(**arguments: Any) -> ElasticJob:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))
    return job_of(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), **arguments)


@pytest.mark.parametrize(
    "arguments", [{"max_local_batch_size": 1}, {"batch_size": 1}], ids=["local", "total"]
)
def test_one_sample_a_pass_does_not_go_with_batch_normalisation(arguments: dict[str, Any]) -> None:
    with pytest.raises(DocumentError, match=r"max_local_batch_size .* is 1, .* give at least 2"):
        normed(**arguments)
    normed(**arguments, min_local_batch_size=1)


def test_sparse_gradients_go_where_no_step_has_several_batches() -> None:
    model = linear_model()
    optimizer = torch.optim.SparseAdam(model.parameters())
    with pytest.raises(DocumentError, match=r"SparseAdam takes sparse gradients alone.*use Adam"):
        job_of(model=model, optimizer=optimizer)
    job_of(model=model, optimizer=optimizer, max_batch_size=8, max_local_batch_size=8)


def test_epochs_beyond_a_float_are_named() -> None:
    with pytest.raises(DocumentError, match="epochs is beyond"):
        next(job_of().epochs(10**400))


@pytest.mark.parametrize("gives", [1e308, 10**400, float("inf"), NAN], ids=["large", "whole", "inf", "nan"])
def test_a_multiplier_that_no_rate_can_bear_is_named(gives: float) -> None:
    with pytest.raises(DocumentError, match=r"lr_schedule gave .* from 0 on"):
        checked_multiplier(gives, 1.0)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    "value",
    [np.array([1.0]), np.array([[1]]), np.float32(1), torch.ones(1, requires_grad=True), torch.ones(()), 1],
    ids=["array", "nested", "scalar", "graph", "tensor", "int"],
)
def test_a_figure_may_be_whatever_has_one_element(value: Any) -> None:
    assert figure("a", value) == 1.0
