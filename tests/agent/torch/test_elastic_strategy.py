"""Lightning, made elastic: trains as the plain Trainer does, on any split, validates and resumes."""

import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from elastic_runs import Line
from gang import run_gang
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint, RichProgressBar, TQDMProgressBar
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, WeightedRandomSampler

from pollux_agent.errors import DocumentError
from pollux_agent.lightning import ElasticStrategy
from pollux_agent.torch import training
from pollux_agent.torch.sampler import ElasticSampler

SAMPLES = 40


class Fit(LightningModule):
    """A small network on noisy points; counts what Lightning calls."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(11)
        self.layers = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
        self.validations = 0

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        inputs, targets, _ = batch
        loss = F.mse_loss(self.layers(inputs).squeeze(1), targets)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        inputs, targets, _ = batch
        self.log("val_loss", F.mse_loss(self.layers(inputs).squeeze(1), targets), sync_dist=True)

    def on_validation_end(self) -> None:
        self.validations += 1

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Order(torch.utils.data.Sampler[int]):
    """Two passes in the elastic sampler's order."""

    def __init__(self) -> None:
        self.sampler = ElasticSampler(SAMPLES, seed=0)
        self.passes = 0

    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Any:
        self.sampler.epoch, self.passes = self.passes, self.passes + 1
        return iter(self.sampler.order().tolist())


def trainer(folder: Path, strategy: ElasticStrategy | None, **changes: Any) -> Trainer:
    plain: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "max_epochs": 2,
        "gradient_clip_val": 0.5,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "default_root_dir": folder,
        "log_every_n_steps": 1,
    }
    return Trainer(**(plain | changes), **({"strategy": strategy} if strategy is not None else {}))


def elastic(**options: Any) -> ElasticStrategy:
    plain = {"max_batch_size": 8, "device": "cpu", "scaling_rule": "none"}
    return ElasticStrategy(**(plain | options))


def data(num_workers: int = 0) -> DataLoader[Any]:
    return DataLoader(Line(SAMPLES), batch_size=8, shuffle=True, num_workers=num_workers)


def weights(module: nn.Module) -> list[float]:
    return torch.cat([parameter.detach().flatten() for parameter in module.parameters()]).tolist()


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    module = Fit()
    batches = DataLoader(Line(SAMPLES), batch_sampler=BatchSampler(Order(), 8, drop_last=False))
    trainer(tmp_path_factory.mktemp("plain"), None).fit(module, batches)
    return weights(module)


@pytest.mark.parametrize("local", [8, 2])
def test_on_one_process_it_trains_as_plain_lightning_does(
    plain: list[float], tmp_path: Path, local: int
) -> None:
    module, strategy = Fit(), elastic(max_local_batch_size=local)
    trainer(tmp_path, strategy).fit(module, data(), DataLoader(Line(7), batch_size=4))
    assert strategy.job is not None and strategy.job.complete
    assert strategy.job.progress == pytest.approx(2 * SAMPLES / 8)
    assert strategy.job.step == 10
    assert module.validations == 2 + 1  # each pass, and Lightning's check before training
    assert weights(module) == pytest.approx(plain, abs=1e-5)


class Cosine(Fit):
    """With a schedule over epochs, Lightning's default."""

    def __init__(self, length: int, frequency: int) -> None:
        super().__init__()
        self.length, self.frequency, self.rates = length, frequency, list[float]()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        optimizer.register_step_pre_hook(lambda own, *_: self.rates.append(own.param_groups[0]["lr"]))
        self.cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=self.length)
        return [optimizer], [{"scheduler": self.cosine, "frequency": self.frequency}]


@pytest.mark.parametrize("frequency", [1, 2])
def test_a_schedule_over_epochs_follows_progress_and_not_passes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, frequency: int
) -> None:
    """Each sample is worth half of one at M0, so 6 epochs take 12 passes."""
    monkeypatch.setattr(training, "progress_of_step", lambda *_, batch_size, **__: batch_size / 8 / 2)
    epochs = 6
    module, strategy = Cosine(epochs // frequency, frequency), elastic()
    trainer(tmp_path, strategy, max_epochs=epochs).fit(module, data())
    assert strategy.job is not None
    assert strategy.job._position.epoch + 1 == 2 * epochs
    assert module.cosine.last_epoch == epochs // frequency
    assert module.rates == sorted(module.rates, reverse=True)
    assert min(module.rates) == pytest.approx(0.05 * (1 + math.cos(math.pi * (1 - frequency / epochs))))


@pytest.mark.parametrize("bar", [RichProgressBar, TQDMProgressBar])
def test_a_progress_bar_names_the_pass(
    bar: type[RichProgressBar | TQDMProgressBar], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = trainer(tmp_path, elastic(), max_epochs=3, callbacks=[bar()], enable_progress_bar=True)
    run.fit(Fit(), data())
    shown = "".join(capsys.readouterr())
    assert "Epoch 2" in shown
    assert "Epoch 2/" not in shown


def member(folder: Path, local: int) -> dict[str, Any]:
    from torch import distributed as dist

    rank, size = dist.get_rank(), dist.get_world_size()
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(size))
    module, strategy = Fit(), elastic(max_local_batch_size=local)
    saved = ModelCheckpoint(dirpath=folder / f"best-{size}", monitor="val_loss")
    run = trainer(folder, strategy, callbacks=[saved], enable_checkpointing=True)
    run.fit(module, data(), DataLoader(Line(7), batch_size=4))
    assert strategy.job is not None
    return {
        "weights": weights(module),
        "steps": strategy.job.step,
        "validations": module.validations,
        "val_loss": float(run.callback_metrics["val_loss"]),
        "best": saved.best_model_path,
    }


def test_on_two_processes_it_trains_as_on_one(tmp_path: Path) -> None:
    module = Fit()
    one = trainer(tmp_path, elastic())
    one.fit(module, data(), DataLoader(Line(7), batch_size=4))
    for found in run_gang(2, member, tmp_path, 2):
        assert found["weights"] == pytest.approx(weights(module), abs=1e-5)
        assert (found["steps"], found["validations"]) == (10, 3)
        assert found["val_loss"] == pytest.approx(float(one.callback_metrics["val_loss"]), rel=1e-3)
        assert Path(found["best"]).is_file()


class StopAt(Callback):
    """Has the job stop as a scheduler would."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.strategy.job.step == self.step:
            trainer.strategy.job.stop()


def test_it_resumes_where_it_was_stopped_with_callbacks(tmp_path: Path) -> None:
    whole = Fit()
    trainer(tmp_path, elastic()).fit(whole, data())
    for stop_at in (3, 7):
        strategy = elastic(checkpoint_dir=tmp_path / "kept", max_local_batch_size=4)
        patience = EarlyStopping("val_loss", patience=99)
        with pytest.raises(SystemExit):
            trainer(tmp_path, strategy, callbacks=[StopAt(stop_at), patience]).fit(
                Fit(), data(num_workers=1), DataLoader(Line(7), batch_size=4)
            )
        assert strategy.job is not None and strategy.job.step in (stop_at + 1, stop_at + 2)
    module, strategy = Fit(), elastic(checkpoint_dir=tmp_path / "kept")
    patience = EarlyStopping("val_loss", patience=99)
    run = trainer(tmp_path, strategy, callbacks=[patience])
    run.fit(module, data(), DataLoader(Line(7), batch_size=4))
    assert strategy.job is not None and (strategy.job.step, strategy.job.complete) == (10, True)
    assert weights(module) == pytest.approx(weights(whole), abs=1e-5)
    assert run.current_epoch == 2
    assert float(patience.best_score) < float("inf")

    again, strategy = Fit(), elastic(checkpoint_dir=tmp_path / "kept")
    trainer(tmp_path, strategy).fit(again, data())
    assert strategy.job is not None and strategy.job.steps_taken == 0
    assert weights(again) == pytest.approx(weights(whole), abs=1e-5)
    longer, strategy = Fit(), elastic(checkpoint_dir=tmp_path / "kept")
    trainer(tmp_path, strategy, max_epochs=3).fit(longer, data())
    assert strategy.job is not None and (strategy.job.step, strategy.job.steps_taken) == (15, 5)


def test_early_stopping_ends_the_job(tmp_path: Path) -> None:
    strategy = elastic()
    stopping = EarlyStopping("val_loss", mode="max", patience=1)  # it never rises
    run = trainer(tmp_path, strategy, max_epochs=50, callbacks=[stopping])
    run.fit(Fit(), data(), DataLoader(Line(7), batch_size=4))
    assert strategy.job is not None and strategy.job.complete
    assert strategy.job.progress < 50 * SAMPLES / 8


def test_steps_are_counted_at_m0_whatever_the_batch_size(tmp_path: Path) -> None:
    module, strategy = Fit(), elastic(batch_size=4, max_batch_size=32)
    run = trainer(tmp_path, strategy, max_epochs=None, max_steps=40)
    run.fit(module, data())
    assert strategy.job is not None and strategy.job.complete
    assert strategy.job.progress >= 40 * (1 - 1e-6)
    assert run.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.1 * 0.9 ** int(strategy.job.progress))


@pytest.mark.parametrize(
    ("module", "changes", "message"),
    [
        pytest.param(Fit, {"accumulate_grad_batches": 2}, "accumulate_grad_batches is 2", id="accumulation"),
        pytest.param(Fit, {"limit_train_batches": 3}, "limit_train_batches is 3", id="some batches"),
        pytest.param(Fit, {"limit_train_batches": 1}, "limit_train_batches is 1,", id="one batch"),
        pytest.param(Fit, {"limit_train_batches": 0.5}, "limit_train_batches is 0.5", id="a part"),
        pytest.param(Fit, {"overfit_batches": 2}, "overfit_batches is 2", id="a few again"),
        pytest.param(
            Fit, {"reload_dataloaders_every_n_epochs": 1}, "reload_dataloaders_every", id="new data"
        ),
        pytest.param(Fit, {"val_check_interval": 0.5}, "val_check_interval is 0.5", id="half a pass"),
        pytest.param(Fit, {"max_epochs": -1}, "max_epochs and max_steps", id="no end"),
    ],
)
def test_what_cannot_be_elastic_is_named(
    tmp_path: Path, module: type[Fit], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(DocumentError, match=message):
        trainer(tmp_path, elastic(), **changes).fit(module(), data(), DataLoader(Line(7), batch_size=4))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        pytest.param({"sampler": Order()}, "by a Order,", id="an order"),
        pytest.param({"sampler": WeightedRandomSampler([1.0] * 40, 40)}, "by a Weighted", id="weights"),
        pytest.param({"sampler": RandomSampler(range(40), num_samples=8)}, "by a Random", id="some"),
        pytest.param({"sampler": RandomSampler(range(40), replacement=True)}, "by a Random", id="again"),
        pytest.param({"batch_sampler": BatchSampler(Order(), 8, drop_last=False)}, "by a Order,", id="cut"),
        pytest.param({"batch_sampler": [[1, 2], [3]]}, "by a list,", id="own batches"),
        pytest.param({"drop_last": True, "batch_size": 8}, "drop_last is True", id="no last batch"),
    ],
)
def test_a_loader_that_picks_samples_in_its_own_way_is_refused(
    tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(DocumentError, match=message):
        trainer(tmp_path, elastic()).fit(Fit(), DataLoader(Line(SAMPLES), **options))


def test_the_batch_size_of_a_plain_batch_sampler_is_m0(tmp_path: Path) -> None:
    strategy, lines = elastic(), Line(SAMPLES)
    batches = BatchSampler(RandomSampler(lines), 8, drop_last=False)
    trainer(tmp_path, strategy).fit(Fit(), DataLoader(lines, batch_sampler=batches))
    assert strategy.job is not None
    assert strategy.job.initial_batch_size == 8


def test_a_checkpoint_of_plain_lightning_is_not_resumed_from(tmp_path: Path) -> None:
    usual = trainer(tmp_path, None)
    usual.fit(Fit(), data())
    usual.save_checkpoint(tmp_path / "usual.ckpt")
    with pytest.raises(DocumentError, match=r"ckpt_path is .*usual.ckpt'; leave it out"):
        trainer(tmp_path, elastic()).fit(Fit(), data(), ckpt_path=tmp_path / "usual.ckpt")


def test_a_preconditioner_of_ones_own_reaches_the_job(tmp_path: Path) -> None:
    wrong = {torch.optim.SGD: 2.0}
    with pytest.raises(DocumentError, match=r"preconditioners\[SGD\]: 2.0 has no method `diagonal`"):
        trainer(tmp_path, elastic(preconditioners=wrong)).fit(Fit(), data())


@pytest.mark.parametrize(("name", "is_logged"), [("train_loss", True), ("losss", False)])
def test_what_the_module_logs_can_be_watched(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, is_logged: bool
) -> None:
    trainer(tmp_path, elastic(watch=name)).fit(Fit(), data())
    assert (f"watch: '{name}' was not logged in 10 steps" not in caplog.text) == is_logged


def test_a_throughput_model_of_ones_own_reaches_the_job(tmp_path: Path) -> None:
    with pytest.raises(DocumentError, match=r"throughput"):
        trainer(tmp_path, elastic(throughput=2.0)).fit(Fit(), data())
