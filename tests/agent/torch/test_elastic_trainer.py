"""Hugging Face's Trainer, made elastic: trains as the plain one does, on any split, and resumes."""

import os
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from gang import run_gang
from torch.utils.data import DataLoader, Dataset, IterableDataset
from transformers import (
    EarlyStoppingCallback,
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from pollux_agent.errors import DocumentError
from pollux_agent.huggingface import ElasticTrainer
from pollux_agent.torch.sampler import ElasticSampler

SAMPLES = 40


class Texts(Dataset[dict[str, torch.Tensor]]):
    """Random texts of 8 tokens, each with a rule to learn: a token is the one before plus one."""

    def __init__(self, count: int = SAMPLES) -> None:
        starts = torch.randint(16, (count, 1), generator=torch.Generator().manual_seed(0))
        self.tokens = (starts + torch.arange(8)) % 16

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


def tiny_model() -> GPT2LMHeadModel:
    torch.manual_seed(5)
    sizes = {"vocab_size": 16, "n_positions": 8, "n_embd": 8, "n_layer": 1, "n_head": 2}
    drops = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(**sizes, **drops, bos_token_id=0, eos_token_id=0))


def arguments(folder: Path, local: int = 8, **changes: Any) -> TrainingArguments:
    plain: dict[str, Any] = {
        "output_dir": str(folder),
        "use_cpu": True,
        "report_to": "none",
        "disable_tqdm": True,
        "per_device_train_batch_size": local,
        "num_train_epochs": 2,
        "learning_rate": 1e-2,
        "warmup_steps": 2,
        "max_grad_norm": 0.5,
        "save_strategy": "no",
        "logging_steps": 4,
        "seed": 3,
    }
    return TrainingArguments(**(plain | changes))


def elastic(folder: Path, local: int = 8, **changes: Any) -> ElasticTrainer:
    own = ("checkpoint_dir", "callbacks", "eval_dataset", "max_batch_size", "batch_size", "preconditioners")
    given = {"batch_size": 8, "max_batch_size": 8} | {
        name: changes.pop(name) for name in (*own, "watch", "throughput") if name in changes
    }
    return ElasticTrainer(
        tiny_model(), args=arguments(folder, local, **changes), train_dataset=Texts(), **given
    )


def weights(trainer: Trainer) -> list[float]:
    return torch.cat([parameter.detach().flatten() for parameter in trainer.model.parameters()]).tolist()


class Ordered(Trainer):
    """The plain Trainer over the same batches as the elastic sampler's."""

    def _get_train_sampler(self, *_: Any) -> Any:
        return _Order(len(self.train_dataset))


class _Order(torch.utils.data.Sampler[int]):
    def __init__(self, count: int) -> None:
        self.sampler = ElasticSampler(count, seed=3)
        self.passes = 0

    def __len__(self) -> int:
        return self.sampler.num_samples

    def __iter__(self) -> Iterator[int]:
        self.sampler.epoch, self.passes = self.passes, self.passes + 1
        return iter(self.sampler.order().tolist())


def logged(trainer: Trainer) -> list[dict[str, float]]:
    """The losses and rates of a training's log."""
    names = ("loss", "learning_rate", "epoch", "step")
    return [{name: row[name] for name in names} for row in trainer.state.log_history if "loss" in row]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Ordered:
    trainer = Ordered(tiny_model(), args=arguments(tmp_path_factory.mktemp("plain")), train_dataset=Texts())
    trainer.train()
    return trainer


LABELS, PREDICTED = 8, 7
"""Tokens of a text: the Trainer's loss is per label, though the first of them is not predicted."""


@pytest.mark.parametrize("local", [8, 2])
def test_on_one_process_it_trains_as_the_plain_trainer_does(
    plain: Ordered, tmp_path: Path, local: int
) -> None:
    trainer = elastic(tmp_path, local)
    output = trainer.train()
    assert output.global_step == trainer.state.global_step == trainer.state.max_steps == 10
    assert weights(trainer) == pytest.approx(weights(plain), abs=1e-4)
    for mine, theirs in zip(logged(trainer), logged(plain), strict=True):
        assert mine["loss"] * PREDICTED / LABELS == pytest.approx(theirs["loss"], rel=1e-3)
        assert {**mine, "loss": 0} == {**theirs, "loss": 0}
    assert trainer.job is not None and trainer.job.complete


def member(folder: Path, local: int) -> dict[str, Any]:
    from torch import distributed as dist

    rank, size = dist.get_rank(), dist.get_world_size()
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(size))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="1")  # asked for, though the group is there
    trainer = elastic(folder, local, eval_dataset=Texts(7), eval_strategy="steps", eval_steps=4)
    trainer.train()
    assert trainer.job is not None
    losses = [row["eval_loss"] for row in trainer.state.log_history if "eval_loss" in row]
    return {
        "weights": weights(trainer),
        "losses": losses,
        "steps": trainer.job.step,
        "log": logged(trainer),
    }


def test_on_two_processes_it_trains_as_on_one_and_evaluates(plain: Ordered, tmp_path: Path) -> None:
    first, second = run_gang(2, member, tmp_path, 2)
    assert first == second
    assert first["weights"] == pytest.approx(weights(plain), abs=1e-4)
    assert first["steps"] == 10
    assert len(first["losses"]) == 2 + 1  # at 4 and 8, and the Trainer's own at the end
    for mine, theirs in zip(first["log"], logged(plain), strict=True):
        assert mine["loss"] * PREDICTED / LABELS == pytest.approx(theirs["loss"], rel=1e-3)


class StopAt(TrainerCallback):
    """Has the job stop as a scheduler would."""

    def __init__(self, step: int) -> None:
        self.step, self.trainer = step, None

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.step:
            self.trainer.job.stop()


def test_it_resumes_where_it_was_stopped_with_history_and_callbacks(plain: Ordered, tmp_path: Path) -> None:
    stopper = StopAt(5)
    patience = EarlyStoppingCallback(early_stopping_patience=99)
    better = {"metric_for_best_model": "eval_loss", "greater_is_better": True}  # it never gets better
    first = elastic(
        tmp_path,
        checkpoint_dir=tmp_path / "kept",
        callbacks=[stopper, patience],
        eval_dataset=Texts(7),
        eval_strategy="steps",
        eval_steps=2,
        **better,
    )
    stopper.trainer = first
    with pytest.raises(SystemExit):
        first.train()
    assert first.state.global_step in (5, 6)
    waited = patience.early_stopping_patience_counter
    assert waited > 0
    again = EarlyStoppingCallback(early_stopping_patience=99)
    second = elastic(
        tmp_path,
        4,
        checkpoint_dir=tmp_path / "kept",
        callbacks=[again],
        eval_dataset=Texts(7),
        eval_strategy="steps",
        eval_steps=2,
        **better,
    )
    second.train()
    assert second.state.global_step == 10
    assert weights(second) == pytest.approx(weights(plain), abs=1e-4)
    steps = [row["step"] for row in second.state.log_history if "eval_loss" in row]
    assert steps == sorted(set(steps)) and steps[0] == 2
    assert again.early_stopping_patience_counter > waited
    assert second.state.best_metric is not None


def test_early_stopping_ends_the_job(tmp_path: Path) -> None:
    trainer = elastic(
        tmp_path,
        callbacks=[EarlyStoppingCallback(early_stopping_patience=1)],
        eval_dataset=Texts(7),
        eval_strategy="steps",
        eval_steps=1,
        metric_for_best_model="eval_loss",
        greater_is_better=True,
    )
    trainer.train()
    assert trainer.job is not None and trainer.job.complete
    assert trainer.state.global_step == 2


def test_it_saves_and_loads_the_best_model_as_the_trainer_does(tmp_path: Path) -> None:
    trainer = elastic(
        tmp_path,
        eval_dataset=Texts(7),
        eval_strategy="steps",
        save_strategy="steps",
        eval_steps=5,
        save_steps=5,
        load_best_model_at_end=True,
    )
    trainer.train()
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == ["checkpoint-10", "checkpoint-5"]
    assert trainer.state.best_model_checkpoint == str(tmp_path / "checkpoint-10")


def test_steps_are_counted_at_m0_whatever_the_batch_size(tmp_path: Path) -> None:
    trainer = elastic(tmp_path, 4, batch_size=4, max_batch_size=64, max_steps=24, logging_steps=3)
    trainer.train()
    assert trainer.job is not None
    assert trainer.state.global_step == 24 == round(trainer.job.progress)
    assert trainer.lr_scheduler.last_epoch == 24
    steps = [row["step"] for row in logged(trainer)]
    assert all(earlier < later for earlier, later in pairwise(steps))
    assert all(0 < row["loss"] < 4 for row in logged(trainer))


@pytest.mark.parametrize(
    "changes",
    [
        {"auto_find_batch_size": True},
        {"gradient_accumulation_steps": 2, "batch_size": 3},
        {"dataloader_drop_last": True},
        {"train_sampling_strategy": "sequential"},
        {"torch_compile": True},
        {"include_num_input_tokens_seen": "all"},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_what_sizes_batches_in_its_own_way_is_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    with pytest.raises(DocumentError, match=f"ElasticTrainer|{next(iter(changes))} is "):
        elastic(tmp_path, **changes)


def test_it_evaluates_on_start_if_asked_to(tmp_path: Path) -> None:
    trainer = elastic(tmp_path, max_steps=2, eval_on_start=True, eval_dataset=Texts(8))
    trainer.train()
    first = next(row for row in trainer.state.log_history if "eval_loss" in row)
    assert first["step"] == 0


class NanAt(ElasticTrainer):
    """The loss of the fourth batch is NaN, and its gradient 0."""

    batches = 0

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        self.batches += 1
        loss = super().training_step(*args, **kwargs)
        return loss * float("nan") if self.batches == 4 else loss


@pytest.mark.parametrize("filtered", [True, False])
def test_a_loss_that_is_not_finite_is_left_out_of_the_log_as_the_plain_trainer_does(
    tmp_path: Path, filtered: bool
) -> None:
    trainer = NanAt(
        tiny_model(),
        args=arguments(tmp_path, logging_nan_inf_filter=filtered),
        train_dataset=Texts(),
        batch_size=8,
        max_batch_size=8,
    )
    output = trainer.train()
    assert (output.training_loss == output.training_loss) == filtered
    losses = [row["loss"] for row in logged(trainer)]
    assert all(0 < loss < 4 for loss in losses) == filtered


class OwnLoader(ElasticTrainer):
    def get_train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(Texts(), batch_size=2)


class OwnOrder(Ordered, ElasticTrainer):
    pass


@pytest.mark.parametrize(
    ("kind", "name"), [(OwnLoader, "get_train_dataloader"), (OwnOrder, "_get_train_sampler")]
)
def test_a_subclass_that_reads_the_data_in_its_own_way_is_refused(
    tmp_path: Path, kind: type[ElasticTrainer], name: str
) -> None:
    with pytest.raises(DocumentError, match=f"{name} is {kind.__name__}'s own"):
        kind(tiny_model(), args=arguments(tmp_path), train_dataset=Texts())


class Endless(IterableDataset[dict[str, torch.Tensor]]):
    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        while True:
            yield Texts()[0]


def test_a_stream_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DocumentError, match="train_dataset is a Endless without a length"):
        ElasticTrainer(tiny_model(), args=arguments(tmp_path, max_steps=2), train_dataset=Endless())


@pytest.mark.parametrize("where", [True, "checkpoint-5"])
def test_a_checkpoint_of_the_plain_trainer_is_not_resumed_from(tmp_path: Path, where: bool | str) -> None:
    trainer = elastic(tmp_path, max_steps=2)
    with pytest.raises(DocumentError, match=f"resume_from_checkpoint is {where!r}"):
        trainer.train(resume_from_checkpoint=where)
    trainer.train(resume_from_checkpoint=False)
    assert trainer.state.global_step == 2


class Plain:
    """P = I."""

    needs_state = False

    def diagonal(self, optimizer: Any, group: Any, params: Any) -> None:
        return None


def test_an_optimizer_that_the_agent_does_not_know_can_be_made_known(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    known = {torch.optim.Adamax: Plain()}
    trainer = elastic(tmp_path, max_steps=2, preconditioners=known)
    trainer.optimizer = torch.optim.Adamax(trainer.model.parameters())
    trainer.train()
    assert trainer.state.global_step == 2
    assert "no preconditioner" not in caplog.text


@pytest.mark.parametrize(("name", "is_logged"), [("loss", True), ("losss", False)])
def test_what_the_trainer_logs_can_be_watched(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, is_logged: bool
) -> None:
    elastic(tmp_path, watch=name, logging_steps=1, num_train_epochs=3).train()
    assert (f"watch: '{name}' was not logged in 10 steps" not in caplog.text) == is_logged


def test_a_throughput_model_of_ones_own_reaches_the_job(tmp_path: Path) -> None:
    with pytest.raises(DocumentError, match=r"throughput"):
        elastic(tmp_path, throughput=2.0).train()
