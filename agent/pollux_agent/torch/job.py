"""The elastic job: the one object that a training script makes, and what makes its loop elastic."""

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import Dataset

from pollux_agent.errors import DocumentError
from pollux_agent.protocol import JobSpec, ScalingRule, decode
from pollux_agent.report import NullReporter, open_reporter
from pollux_agent.settings import WorkerSettings, worker_settings
from pollux_agent.torch.checkpoint import CheckpointStore
from pollux_agent.torch.config import job_config
from pollux_agent.torch.gradients import GradientSync
from pollux_agent.torch.history import History, process_age_s
from pollux_agent.torch.journal import Journal
from pollux_agent.torch.loader import ElasticLoader, LoaderOptions, num_samples
from pollux_agent.torch.profile import Pace
from pollux_agent.torch.sampler import ElasticSampler
from pollux_agent.torch.saver import Saver, Trained
from pollux_agent.torch.scaling import rule
from pollux_agent.torch.state import Stateful, check_stateful
from pollux_agent.torch.stepper import Stepper
from pollux_agent.torch.telemetry import Telemetry
from pollux_agent.torch.training import Parts, StopSignal, Training
from pollux_agent.torch.tuner import Tuner
from pollux_agent.torch.world import join_world

logger = logging.getLogger(__name__)

_REPORT_INTERVAL_S = 30.0
_CHECKPOINT_INTERVAL_S = 30.0

_current: "ElasticJob | None" = None


def current_job() -> "ElasticJob | None":
    """The job that this process trains, None before there is one."""
    return _current


class ElasticJob:
    """Makes an ordinary training loop elastic; the loop uses this object's ``model``, ``loader``, ``epochs``.

    ::

        job = ElasticJob(model, optimizer, train_set, batch_size=32, max_local_batch_size=256)
        for epoch in job.epochs(30):
            for inputs, targets in job.loader:
                optimizer.zero_grad()
                loss = F.cross_entropy(job.model(inputs), targets)
                loss.backward()
                optimizer.step()
            job.log(accuracy=evaluate(model))

    ``batch_size`` (M0) is the total batch size that the learning rate was chosen for;
    ``max_batch_size`` bounds the total (default 32 x M0) and ``max_local_batch_size`` what one replica holds
    at a time (default M0). ``lr_schedule`` maps the statistical epoch to a multiplier of the learning rate; a
    torch scheduler works too, stepped once an epoch and named in ``stateful``, which holds all else that
    belongs into a checkpoint. Under a driver the job spec overrules batch sizes, rule and epochs, and
    checkpoints go to the job's folder; alone they are written if ``checkpoint_dir`` is given.

    ``noise_every``: steps between two measurements of the gradient noise scale, once there are some.

    The loss must be a mean over the samples of its batch. Raises DocumentError for arguments that contradict
    each other, CheckpointError if the newest checkpoint does not fit the script.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer],
        train_set: Dataset[Any],
        *,
        batch_size: int,
        max_batch_size: int | None = None,
        max_local_batch_size: int | None = None,
        scaling_rule: ScalingRule = "adascale",
        seed: int = 0,
        lr_schedule: Callable[[float], float] | None = None,
        stateful: Mapping[str, Stateful] | None = None,
        grad_scaler: torch.amp.GradScaler | None = None,
        checkpoint_dir: str | Path | None = None,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool = False,
        worker_init_fn: Callable[[int], None] | None = None,
        noise_every: int = 10,
    ) -> None:
        global _current
        _current = self
        settings = worker_settings()
        device = _device_of(model)
        if settings is not None and device.type == "cpu":
            torch.set_num_threads(1)
        self._config = job_config(
            decode(JobSpec, settings.folder.spec.read_bytes()) if settings is not None else None,
            num_samples=num_samples(train_set),
            batch_size=batch_size,
            max_batch_size=max_batch_size,
            max_local_batch_size=max_local_batch_size,
            scaling_rule=scaling_rule,
        )
        stateful = dict(stateful or {})
        if grad_scaler is not None:
            stateful.setdefault("grad_scaler", grad_scaler)
        check_stateful(stateful)
        self._world = join_world(settings, device)
        self._history = History()
        self._journal = Journal(settings, self._world, self._history)
        self._journal.event("start", t_unix_s=time.time() - (process_age_s() or 0.0))
        self._sampler = ElasticSampler(num_samples(train_set), seed=seed)
        self._lr_schedule = lr_schedule
        optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
        sync = GradientSync(model, optimizers, sample_every=noise_every, grad_scaler=grad_scaler)
        self.model = sync.module
        self._trained = Trained(
            model=model,
            optimizers=optimizers,
            sync=sync,
            sampler=self._sampler,
            history=self._history,
            stateful=stateful,
        )
        self._training = self._start(settings, checkpoint_dir)
        self.loader = ElasticLoader(
            train_set,
            self._sampler,
            self._training,
            rank=self._world.rank,
            num_replicas=self._world.size,
            options=LoaderOptions(
                num_workers=num_workers,
                collate_fn=collate_fn,
                pin_memory=pin_memory,
                worker_init_fn=worker_init_fn,
            ),
        )
        self.complete = False

    def _start(self, settings: WorkerSettings | None, checkpoint_dir: str | Path | None) -> Training:
        """Restore what there is to restore, and put together the training that goes on from there."""
        stop = StopSignal()
        world, trained, config = self._world, self._trained, self._config
        folder = settings.folder.checkpoints if settings is not None else checkpoint_dir
        saver = Saver(
            CheckpointStore(Path(folder)) if folder is not None else None,
            trained,
            world,
            incarnation=settings.incarnation if settings is not None else None,
        )
        reporter = open_reporter(settings) if world.rank == 0 else NullReporter()
        telemetry = Telemetry(reporter, settings, config, self._history)
        resumed = saver.restore()
        self._journal.resumed()
        telemetry.recall()
        if resumed:
            self._journal.event("resume")
        gpu_type = settings.gpu_type if settings is not None else world.device.type
        return Training(
            Parts(
                settings=settings,
                config=config,
                world=world,
                gpu_type=gpu_type,
                trained=trained,
                stepper=Stepper(
                    trained.sync,
                    trained.optimizers,
                    rule=rule(config.scaling_rule),
                    initial_batch_size=config.limits.initial_batch_size,
                    schedule=self._schedule,
                    stop_asked=lambda: stop.asked,
                ),
                tuner=Tuner(
                    config.limits,
                    adaptive=config.adaptive,
                    num_nodes=world.num_nodes,
                    num_replicas=world.size,
                    prior=trained.fits.get(gpu_type),
                ),
                journal=self._journal,
                telemetry=telemetry,
                saver=saver,
                report_interval_s=settings.report_interval_s if settings else _REPORT_INTERVAL_S,
                checkpoint_interval_s=settings.checkpoint_interval_s if settings else _CHECKPOINT_INTERVAL_S,
                pace=Pace(settings.slot_share) if settings is not None and settings.slot_share else None,
            ),
            resumed=resumed,
        )

    def epochs(self, num_epochs: int) -> Iterator[int]:
        """Passes over the data, until ``num_epochs`` statistical epochs of progress are made.

        One statistical epoch is as much progress as one pass makes at M0, so larger batches take more
        passes, and the last one may end early. Gives the number of the pass. At the end the job is complete.
        Raises DocumentError for less than one epoch.
        """
        if num_epochs < 1:
            raise DocumentError(f"epochs is {num_epochs}; train for at least 1")
        self._training.target = (
            (self._config.epochs or num_epochs)
            * self._sampler.num_samples
            / self._config.limits.initial_batch_size
        )
        while True:
            yield self._sampler.epoch
            if self._training.finished:
                break
            self._sampler.next_epoch()
        self.finish()

    def finish(self) -> None:
        """Declare the training complete; ``epochs`` does it, a loop that is left early must do it itself."""
        if not self.complete:
            self.complete = True
            self._training.complete()

    def log(self, **metrics: float) -> None:
        """Log figures against the present progress; rank 0's count, and no rank waits for another.

        Call it within the loop over ``epochs``: at its end the job's run is closed, which a warning says.
        """
        if self.complete:
            logger.warning("%s: not logged after the training; log within its loop", ", ".join(metrics))
        elif self._world.rank == 0:
            self._training.log(metrics)

    @property
    def rank(self) -> int:
        """This process's place among the replicas."""
        return self._world.rank

    @property
    def num_replicas(self) -> int:
        return self._world.size

    @property
    def batch_size(self) -> int:
        """The total batch size M of the next step."""
        return self._training.plan.batch_size

    @property
    def step(self) -> int:
        """Optimizer steps over all incarnations."""
        return self._history.step

    @property
    def steps_taken(self) -> int:
        """Optimizer steps of this incarnation."""
        return self._journal.steps_taken

    @property
    def progress(self) -> float:
        """Useful progress, in steps of size M0."""
        return self._history.progress

    @property
    def statistical_epoch(self) -> float:
        """Useful progress, in passes over the data at M0."""
        return self.progress * self._config.limits.initial_batch_size / self._sampler.num_samples

    def _schedule(self) -> float:
        return 1.0 if self._lr_schedule is None else self._lr_schedule(self.statistical_epoch)


def _device_of(model: nn.Module) -> torch.device:
    """Where the model's parameters are."""
    return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
