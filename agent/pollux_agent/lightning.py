"""Lightning, made elastic: ``Trainer(strategy=ElasticStrategy(...))`` with ``pollux_agent.lightning``.

Needs the extra ``pollux-agent[lightning]``. The module, its data, callbacks and loggers stay as they are; the
replicas are those that the launcher started, so ``devices=1`` is right on any number of them.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sized
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import RichProgressBar
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor
from torch import distributed as dist
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler

from pollux_agent.errors import DocumentError
from pollux_agent.model.fit import ThroughputModel
from pollux_agent.model.throughput import StepTimes
from pollux_agent.protocol import ScalingRule
from pollux_agent.settings import worker_settings
from pollux_agent.torch import ElasticJob, default_device
from pollux_agent.torch.config import job_spec
from pollux_agent.torch.precondition import Preconditioner
from pollux_agent.torch.schedules import EpochSchedulers
from pollux_agent.torch.state import Stateful, check_stateful
from pollux_agent.torch.world import World, join_world

logger = logging.getLogger(__name__)

_UNKNOWN_LENGTH = 1 << 31


class ElasticStrategy(SingleDeviceStrategy):
    """Trains over all replicas with a batch size that adapts.

    The train dataloader's data set, collate function and workers are used; its batch size is M0 unless
    ``batch_size`` is given. ``max_epochs`` counts epochs' worth of progress and ``max_steps`` steps of size
    M0, while Lightning's own epochs are passes over the data and its steps the batches of one replica. A
    scheduler of interval "step" is stepped once for each step of size M0 that was made, one of interval
    "epoch" once for each epoch's worth of progress, of which there are fewer than passes. Each replica runs
    the whole validation. The job's own checkpoints, in ``checkpoint_dir`` or in the driver's folder, are what
    a restart resumes from; they hold the callbacks' states too. ``watch`` names a figure that the module
    logs.

    Raises DocumentError for manual optimization, ``accumulate_grad_batches``, ``limit_train_batches``,
    ``ckpt_path``, a dataloader with a sampler of its own and what else contradicts.
    """

    strategy_name = "pollux"

    def __init__(
        self,
        *,
        batch_size: int | None = None,
        max_batch_size: int | None = None,
        max_local_batch_size: int | None = None,
        scaling_rule: ScalingRule = "adascale",
        lr_schedule: Callable[[float], float] | None = None,
        seed: int = 0,
        checkpoint_dir: str | Path | None = None,
        preconditioners: Mapping[type[torch.optim.Optimizer], Preconditioner] | None = None,
        throughput: ThroughputModel[StepTimes] | None = None,
        watch: str | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(default_device() if device is None else device)
        self.job: ElasticJob | None = None
        self._batch_size = batch_size
        self._options: dict[str, Any] = {
            "max_batch_size": max_batch_size,
            "max_local_batch_size": max_local_batch_size,
            "scaling_rule": scaling_rule,
            "lr_schedule": lr_schedule,
            "seed": seed,
            "checkpoint_dir": checkpoint_dir,
            "preconditioners": preconditioners,
            "throughput": throughput,
            "watch": watch,
        }
        self._watch = watch
        self._watched: Tensor | None = None
        self._source: _Source | None = None
        self._trainer: Trainer | None = None
        self._world: World | None = None

    @property
    def is_global_zero(self) -> bool:
        return bool(self.global_rank == 0)

    def setup_environment(self) -> None:
        self._world = join_world(worker_settings(), self.root_device)
        self.global_rank, self.world_size = self._world.rank, self._world.size
        self.local_rank = self._world.local_rank
        rank_zero_only.rank = self.global_rank
        super().setup_environment()

    def setup(self, trainer: Trainer) -> None:
        self._trainer = trainer
        super().setup(trainer)

    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """As Lightning's, for what is not trained; a job resumes by itself."""
        module = self.lightning_module
        if module is not None and module.trainer.state.fn == TrainerFn.FITTING:
            raise DocumentError(
                f"ckpt_path is {str(checkpoint_path)!r}; leave it out: the job goes on from its own "
                "checkpoints, in checkpoint_dir or the driver's folder; to start from the weights of another "
                "training, make the module with load_from_checkpoint"
            )
        loaded: dict[str, Any] = super().load_checkpoint(checkpoint_path, *args, **kwargs)
        return loaded

    def on_train_start(self) -> None:
        """Data and optimizers are there: join them to a job, and have Lightning take its batches."""
        trainer, module = self._trainer, self.lightning_module
        assert trainer is not None and module is not None
        fit = trainer.fit_loop
        combined = fit._combined_loader
        loader = combined.flattened[0]
        _check(trainer, module, loader, len(combined.flattened))
        job = self._new_job(module, loader)
        self._source = _Source(job, job.epochs(self._epochs(job, len(loader.dataset))))
        fit.max_epochs, fit.epoch_loop.max_steps = -1, -1
        _name_passes_alone(trainer)
        passes = fit.epoch_progress.current
        passes.ready = passes.started = passes.processed = passes.completed = self._source.number
        trainer.should_stop = self._source.finished
        combined.reset()
        combined.flattened, combined.limits = [self._source], [float("inf")]
        fit._data_fetcher.setup(combined)
        iter(fit._data_fetcher)
        fit.max_batches = float("inf")
        if isinstance(trainer.val_check_interval, float):
            trainer.val_check_batch = float("inf")

    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        """One batch's backward and, with the last batch of a step, its update."""
        result = super().optimizer_step(*args, **kwargs)
        trainer = self._trainer
        self._tell_watched()
        if self._source is not None and trainer is not None and not self._source.look_ahead():
            trainer.fit_loop._data_fetcher.done = True
            trainer.fit_loop.epoch_loop.batch_progress.is_last_batch = True
            if self._source.finished:
                trainer.should_stop = True
        return result

    def _tell_watched(self) -> None:
        """The job hears of the figure that it watches whenever the module has logged a new one."""
        if self._watch is None or self._trainer is None or self.job is None:
            return
        value = self._trainer.callback_metrics.get(self._watch)
        if value is not None and value is not self._watched:
            self._watched = value
            self.job.log(**{self._watch: value})

    def on_train_end(self) -> None:
        if self.job is not None and self._source is not None:
            self._source.end_pass()
            self.job.finish()

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """The mean over replicas, or what ``reduce_op`` names."""
        if not isinstance(tensor, Tensor) or self.world_size == 1:
            return tensor
        total = tensor.detach().clone()
        if str(reduce_op).lower() in ("mean", "avg", "none"):
            dist.all_reduce(total)
            return total / self.world_size
        dist.all_reduce(
            total,
            op=reduce_op if not isinstance(reduce_op, str) else getattr(dist.ReduceOp, reduce_op.upper()),
        )
        return total

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        if self.world_size == 1:
            return tensor
        parts = [torch.empty_like(tensor) for _ in range(self.world_size)]
        dist.all_gather(parts, tensor.contiguous())
        return torch.stack(parts)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        if self.world_size == 1:
            return obj
        box = [obj]
        dist.broadcast_object_list(box, src=src)
        return box[0]

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        if self.world_size > 1:
            dist.barrier()

    def _new_job(self, module: LightningModule, loader: DataLoader[Any]) -> ElasticJob:
        configs = self.lr_scheduler_configs
        by_epoch = {
            f"scheduler.{at}": each.scheduler for at, each in enumerate(configs) if not _by_step(each)
        }
        epochs = EpochSchedulers({each.scheduler: each.frequency for each in configs if _by_epoch(each)})
        self.job = job = ElasticJob(
            module,
            self.optimizers,
            loader.dataset,
            batch_size=self._batch_size or int(getattr(loader.batch_sampler, "batch_size", 1)),
            lr_scheduler=[each.scheduler for each in configs if _by_step(each)],
            stateful=by_epoch | _callbacks(self._trainer) | {"lightning": _Steps(self._trainer)},
            grad_scaler=getattr(self.precision_plugin, "scaler", None),
            num_workers=loader.num_workers,
            collate_fn=loader.collate_fn,
            pin_memory=loader.pin_memory,
            worker_init_fn=loader.worker_init_fn,
            **self._options,
        )
        epochs.advance(job.statistical_epoch)
        job.on_step(lambda: epochs.advance(job.statistical_epoch))
        return job

    def _epochs(self, job: ElasticJob, num_samples: int) -> float:
        """What the Trainer was asked for, in epochs' worth of progress."""
        assert self._trainer is not None
        fit = self._trainer.fit_loop
        spec = job_spec(worker_settings())
        if spec is not None and spec.epochs is not None:
            return spec.epochs
        if fit.epoch_loop.max_steps > 0:
            return float(fit.epoch_loop.max_steps * job.initial_batch_size / num_samples)
        if not fit.max_epochs or fit.max_epochs < 0:
            raise DocumentError("max_epochs and max_steps: neither is given; say how long to train")
        return float(fit.max_epochs)


class _Source:
    """The job's batches as Lightning takes them: one pass at a time, and looked at one ahead."""

    def __init__(self, job: ElasticJob, passes: Iterator[int]) -> None:
        self._job, self._passes = job, passes
        self._pass = next(passes, None)
        self._batches: Iterator[Any] | None = None
        self._ahead: list[Any] = []

    def __len__(self) -> int:
        return _UNKNOWN_LENGTH

    def __iter__(self) -> "_Source":
        self._batches = None
        return self

    def __next__(self) -> Any:
        if self._batches is None:
            number = next(self._passes, None) if self._pass is None else self._pass
            self._pass = None
            self._batches = iter(self._job.loader) if number is not None else iter(())
        return self._ahead.pop() if self._ahead else next(self._batches)

    @property
    def number(self) -> int:
        """The pass that comes first."""
        return self._pass or 0

    def look_ahead(self) -> bool:
        """Whether the pass has another batch; the step of the present one is finished."""
        if self._batches is not None and not self._ahead:
            self._ahead.extend(_first(self._batches))
        return bool(self._ahead)

    @property
    def finished(self) -> bool:
        """Whether all the progress asked for is made."""
        return self._job.finished

    def end_pass(self) -> None:
        """What follows the last pass is done."""
        if self.finished:
            for _ in self._passes:
                pass


class _Steps:
    """How far Lightning has counted, so that loggers go on from there."""

    def __init__(self, trainer: Trainer | None) -> None:
        assert trainer is not None
        self._loop = trainer.fit_loop.epoch_loop

    def state_dict(self) -> dict[str, Any]:
        return {"global_step": self._loop.global_step, "batches": self._loop._batches_that_stepped}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        total = self._loop.automatic_optimization.optim_progress.optimizer.step.total
        total.ready = total.completed = state["global_step"]
        self._loop._batches_that_stepped = state["batches"]


def _first(items: Iterator[Any]) -> Iterator[Any]:
    for item in items:
        yield item
        return


def _by_step(config: Any) -> bool:
    return bool(config.interval == "step" and not config.reduce_on_plateau)


def _by_epoch(config: Any) -> bool:
    return bool(
        config.interval == "epoch"
        and not config.reduce_on_plateau
        and isinstance(config.scheduler, LRScheduler)
    )


def _callbacks(trainer: Trainer | None) -> dict[str, Stateful]:
    """Those callbacks that have a state, and one that can be loaded safely."""
    found: dict[str, Stateful] = {}
    for callback in trainer.callbacks if trainer is not None else ():
        if not callback.state_dict():
            continue
        try:
            check_stateful({callback.state_key: callback})
        except DocumentError as error:
            logger.warning("the state of a callback is not kept over restarts: %s", error)
        else:
            found[f"callback.{callback.state_key}"] = callback
    return found


def _name_passes_alone(trainer: Trainer) -> None:
    """How many passes there will be is not known, of which Lightning's rich bar makes "Epoch 2/-2"."""
    for callback in trainer.callbacks:
        if isinstance(callback, RichProgressBar):
            width = len(callback.validation_description)
            callback._get_train_description = lambda number, width=width: f"Epoch {number}".ljust(width)


def _check(trainer: Trainer, module: LightningModule, loader: Any, num_loaders: int) -> None:
    """Raise DocumentError for what a step of several batches cannot do."""
    if not module.automatic_optimization:
        raise DocumentError("automatic_optimization is False; ElasticStrategy needs Lightning's own loop")
    if trainer.accumulate_grad_batches != 1:
        raise DocumentError(
            f"accumulate_grad_batches is {trainer.accumulate_grad_batches}; leave it at 1: the job sets it"
        )
    _check_whole_passes(trainer)
    if num_loaders != 1 or not isinstance(loader, DataLoader):
        raise DocumentError("train_dataloaders: give one DataLoader of torch, the job reads its data set")
    _check_order(loader)
    if isinstance(trainer.val_check_interval, float) and trainer.val_check_interval != 1.0:
        raise DocumentError(
            f"val_check_interval is {trainer.val_check_interval}; a pass has no fixed length, so give 1.0 or "
            "a number of batches"
        )


def _check_order(loader: DataLoader[Any]) -> None:
    """Raise DocumentError for a loader that picks its samples in a way of its own."""
    if isinstance(loader.dataset, IterableDataset) or not isinstance(loader.dataset, Sized):
        return
    batches = loader.batch_sampler
    order = batches.sampler if type(batches) is BatchSampler else batches or loader.sampler
    if not _takes_all_once(order, len(loader.dataset)):
        raise DocumentError(
            f"train_dataloaders: the loader picks samples by a {type(order).__name__}, but the job shuffles "
            "each pass over all of them; leave it out (shuffle=True), or have the data set pick"
        )
    if getattr(batches, "drop_last", False):
        raise DocumentError(
            "train_dataloaders: drop_last is True; leave it False: a pass has no fixed batches, and its last "
            "step takes what is left"
        )


def _takes_all_once(order: object, count: int) -> bool:
    if type(order) is RandomSampler:
        return not order.replacement and order.num_samples == count
    return type(order) is SequentialSampler


def _check_whole_passes(trainer: Trainer) -> None:
    """Raise DocumentError for what would cut a pass, whose batches are the job's; ``fast_dev_run`` has
    ``max_steps`` besides."""
    cuts = {
        "overfit_batches": (trainer.overfit_batches, 0, "train on a torch.utils.data.Subset"),
        "limit_train_batches": (
            trainer.limit_train_batches,
            1.0,
            "train on a torch.utils.data.Subset, or give max_steps",
        ),
        "reload_dataloaders_every_n_epochs": (
            trainer.reload_dataloaders_every_n_epochs,
            0,
            "have the data set change what it gives",
        ),
    }
    for name, (value, plain, fix) in cuts.items():
        whole = value == plain and isinstance(value, float) >= isinstance(plain, float)  # 1 is one batch
        if not whole and not (name == "limit_train_batches" and trainer.fast_dev_run):
            raise DocumentError(
                f"{name} is {value}, but a pass is over all of the data set; leave it, and {fix}"
            )
