"""The elastic job: the one object that a training script makes, and what makes its loop elastic."""

import atexit
import logging
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from numbers import Real
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import Dataset, IterableDataset

from pollux_agent.errors import DocumentError, LoopError
from pollux_agent.model.fit import ThroughputModel
from pollux_agent.model.throughput import StepTimes
from pollux_agent.protocol import ScalingRule as RuleName
from pollux_agent.report import NullReporter, Reporter, open_reporter
from pollux_agent.report.alone import open_run
from pollux_agent.settings import WorkerSettings, tracking_settings, worker_settings
from pollux_agent.torch.arguments import check_arguments, checked_multiplier
from pollux_agent.torch.checkpoint import CheckpointStore, first_incarnation
from pollux_agent.torch.config import job_config, job_spec
from pollux_agent.torch.gradients import GradientSync
from pollux_agent.torch.history import History, process_age_s
from pollux_agent.torch.journal import Journal
from pollux_agent.torch.loader import ElasticLoader, LoaderOptions, MapLoader, StreamLoader, dataset_length
from pollux_agent.torch.ownmodel import check_throughput
from pollux_agent.torch.places import PlaceNote, open_place
from pollux_agent.torch.precondition import Preconditioner, check_preconditioners
from pollux_agent.torch.profile import Pace
from pollux_agent.torch.sampler import ElasticSampler
from pollux_agent.torch.saver import Saver, Trained
from pollux_agent.torch.scaling import FollowsExamples, ScalingRule, rule
from pollux_agent.torch.schedules import ProgressSchedulers
from pollux_agent.torch.state import Stateful, check_stateful
from pollux_agent.torch.stepper import Stepper, check_accumulation, check_steps
from pollux_agent.torch.stopping import StopSignal
from pollux_agent.torch.stream import StreamPosition
from pollux_agent.torch.telemetry import Telemetry, figure
from pollux_agent.torch.training import Parts, Training
from pollux_agent.torch.tuner import Tuner
from pollux_agent.torch.watch import ProgressWatch
from pollux_agent.torch.world import join_world

logger = logging.getLogger(__name__)

_REPORT_INTERVAL_S = 30.0
_GRACE_S = 30.0
"""Between SIGTERM and SIGKILL, where nobody says: what Kubernetes grants."""
_CHECKPOINT_INTERVAL_S = 30.0
_RUN, _LOGGED = "mlflow-run.json", "logged.json"

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
    at a time (default M0); ``min_local_batch_size`` is the least that a replica's forward pass gets (default
    2 where the model has batch normalisation, else 1).

    ``lr_schedule`` maps the statistical epoch to a multiplier of the learning rate. A torch scheduler that
    counts steps is given as ``lr_scheduler``: the job steps it once for each step of size M0 that was made.
    One that counts epochs is stepped by the script as ``statistical_epoch`` passes whole numbers (passes may
    be more), and named in ``stateful``, which holds all else that belongs into a checkpoint.

    A ``train_set`` that is an IterableDataset is read by every replica, which keeps its part of each step;
    ``num_samples`` is its length where it does not know it. It has to give the same samples in the same order
    to all replicas, and either the same again after a restart or have ``state_dict``, ``load_state_dict``.

    Under a driver the job spec overrules batch sizes, rule and epochs, and checkpoints go to the job's
    folder or the spec's URL; alone they are written if ``checkpoint_dir`` is given: a path, or any URL that
    fsspec knows. Alone, figures go to the MLflow run that
    the script has open, else to one of its own at ``mlflow_tracking_uri`` (default MLFLOW_TRACKING_URI), or
    nowhere.

    ``scaling_rule`` names how the learning rate follows the batch size, or is an object with the method of
    :class:`pollux_agent.torch.scaling.ScalingRule`; ``throughput`` replaces the throughput model
    (:mod:`pollux_agent.model.racks` is an example). ``watch`` names a figure that falls in training, such as
    the loss, which the script logs every step or so: where it falls behind the predicted progress once the
    batch was raised, the batch goes back and is raised no more.

    ``noise_every``: steps between two measurements of the gradient noise scale, once there are some.
    ``preconditioners`` says for classes of optimizers that the agent does not know how they scale gradients
    (:class:`pollux_agent.torch.precondition.Preconditioner`).

    The loss must be a mean over the samples of its batch. Raises TypeError for an argument of a wrong kind,
    DocumentError for values that cannot be or contradict each other, CheckpointError if the newest checkpoint
    does not fit the script.
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
        min_local_batch_size: int | None = None,
        num_samples: int | None = None,
        scaling_rule: RuleName | ScalingRule = "adascale",
        throughput: ThroughputModel[StepTimes] | None = None,
        watch: str | None = None,
        seed: int = 0,
        lr_schedule: Callable[[float], float] | None = None,
        lr_scheduler: LRScheduler | Sequence[LRScheduler] = (),
        stateful: Mapping[str, Stateful] | None = None,
        grad_scaler: torch.amp.GradScaler | None = None,
        checkpoint_dir: str | Path | None = None,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool = False,
        worker_init_fn: Callable[[int], None] | None = None,
        mlflow_tracking_uri: str | None = None,
        noise_every: int = 10,
        preconditioners: Mapping[type[Optimizer], Preconditioner] | None = None,
    ) -> None:
        global _current
        check_arguments(
            model=model,
            optimizer=optimizer,
            batch_size=batch_size,
            max_batch_size=max_batch_size,
            max_local_batch_size=max_local_batch_size,
            min_local_batch_size=min_local_batch_size,
            num_samples=num_samples,
            watch=watch,
            seed=seed,
            lr_schedule=lr_schedule,
            lr_scheduler=lr_scheduler,
            stateful=stateful,
            checkpoint_dir=checkpoint_dir,
            num_workers=num_workers,
            pin_memory=pin_memory,
            grad_scaler=grad_scaler,
            collate_fn=collate_fn,
            worker_init_fn=worker_init_fn,
            mlflow_tracking_uri=mlflow_tracking_uri,
            noise_every=noise_every,
        )
        if _current is not None:
            _current.loader.abandon()
        _check_model(model)
        optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
        check_steps(optimizers)
        check_preconditioners(preconditioners)
        if throughput is not None:
            check_throughput(throughput)
        own_rule = None if isinstance(scaling_rule, str) else rule(scaling_rule)
        settings = worker_settings()
        self._driven = settings is not None
        self._tracking_uri = mlflow_tracking_uri
        device = _device_of(model)
        if settings is not None and device.type == "cpu":
            torch.set_num_threads(1)
        self._config = job_config(
            job_spec(settings),
            num_samples=dataset_length(train_set, num_samples),
            batch_size=batch_size,
            max_batch_size=max_batch_size,
            max_local_batch_size=max_local_batch_size,
            scaling_rule=scaling_rule if isinstance(scaling_rule, str) else "none",
            min_local_batch_size=_least(model, min_local_batch_size, max_local_batch_size or batch_size),
        )
        check_accumulation(optimizers, self._config.limits)
        schedulers = [lr_scheduler] if isinstance(lr_scheduler, LRScheduler) else list(lr_scheduler)
        stateful = {f"lr_scheduler.{number}": each for number, each in enumerate(schedulers)} | dict(
            stateful or {}
        )
        if grad_scaler is not None:
            stateful.setdefault("grad_scaler", grad_scaler)
        check_stateful(stateful)
        self._world = join_world(settings, device)
        self._history = History()
        self._rule = own_rule or rule(self._config.scaling_rule)
        if isinstance(self._rule, FollowsExamples):
            self._rule.follow(lambda: self._history.examples)
        self._throughput = throughput
        self._watch = ProgressWatch(watch, self._history) if watch is not None else None
        self._journal = Journal(settings, self._world, self._history)
        self._journal.event("start", t_unix_s=time.time() - (process_age_s() or 0.0))
        self._position = _position(train_set, num_samples, seed, self._config.limits.min_local_batch_size)
        if self._position.num_samples is None and lr_schedule is not None:
            raise DocumentError(
                "lr_schedule is given in epochs, but the length of the stream is not known; give num_samples"
            )
        self._lr_schedule = lr_schedule
        sync = _sync(model, optimizers, grad_scaler, noise_every, preconditioners)
        self.model = sync.module
        self._trained = Trained(
            model=getattr(model, "_orig_mod", model),
            optimizers=optimizers,
            sync=sync,
            sampler=self._position,
            history=self._history,
            stateful=stateful,
        )
        self._stop = StopSignal(settings.grace_s if settings else _GRACE_S, self._leave_early)
        self._training = self._start(settings, checkpoint_dir, ProgressSchedulers(schedulers))
        self._stop.overdue = self._training.overdue
        self.loader: ElasticLoader = self._loader(
            train_set,
            LoaderOptions(
                num_workers=num_workers,
                collate_fn=collate_fn,
                pin_memory=pin_memory,
                worker_init_fn=worker_init_fn,
            ),
        )
        self.complete = False
        self._loops = 0
        if _current is None:
            atexit.register(_last_words, os.getpid())
        _current = self

    def _loader(self, train_set: Dataset[Any], options: LoaderOptions) -> ElasticLoader:
        rank, num_replicas = self._world.rank, self._world.size
        if isinstance(self._position, StreamPosition):
            assert isinstance(train_set, IterableDataset)
            return StreamLoader(
                train_set,
                self._position,
                self._training,
                rank=rank,
                num_replicas=num_replicas,
                options=options,
                least=self._config.limits.min_local_batch_size,
            )
        return MapLoader(
            train_set, self._position, self._training, rank=rank, num_replicas=num_replicas, options=options
        )

    def _start(
        self,
        settings: WorkerSettings | None,
        checkpoint_dir: str | Path | None,
        schedulers: ProgressSchedulers,
    ) -> Training:
        """Restore what there is to restore, and put together the training that goes on from there."""
        world, trained, config = self._world, self._trained, self._config
        store = self._store(settings, checkpoint_dir)
        saver = _saver_of(trained.model)(
            store,
            trained,
            world,
            incarnation=settings.incarnation if settings is not None else None,
        )
        resumed = saver.restore()
        reporter = self._reporter(settings, store)
        memory = PlaceNote(store.place, _LOGGED) if store is not None else None
        telemetry = Telemetry(reporter, settings, config, self._history, memory=memory)
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
                    rule=self._rule,
                    initial_batch_size=config.limits.initial_batch_size,
                    schedule=self._schedule,
                    stop_asked=lambda: self._stop.asked,
                ),
                schedulers=schedulers,
                tuner=Tuner(
                    config.limits,
                    adaptive=config.adaptive,
                    num_nodes=world.num_nodes,
                    num_replicas=world.size,
                    prior=trained.fits.get(gpu_type),
                    throughput=self._throughput,
                    watch=self._watch,
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

    def _store(
        self, settings: WorkerSettings | None, checkpoint_dir: str | Path | None
    ) -> CheckpointStore | None:
        """In the job's folder, or behind the spec's URL, under a driver; where the script says alone."""
        if settings is None:
            return CheckpointStore(checkpoint_dir) if checkpoint_dir is not None else None
        if not self._config.checkpoint_url:
            return CheckpointStore(settings.folder.checkpoints)
        place = open_place(self._config.checkpoint_url, settings.job_id)
        if self._world.rank != 0:
            return CheckpointStore(place)
        return CheckpointStore(place, since=first_incarnation(settings.folder, settings.incarnation))

    def _leave_early(self, late: bool) -> None:
        """Asked to stop while the checkpoint is still being read."""
        self._journal.outcome("interrupted")
        if not self._driven and self._world.rank == 0:
            logger.warning("stopped as asked before the training began; checkpoints are as they were")
        raise SystemExit(0 if self._driven else 128 + signal.SIGTERM)

    def _reporter(self, settings: WorkerSettings | None, store: CheckpointStore | None) -> Reporter:
        """To the job's run under a driver; alone to a run of its own where MLflow's address is known."""
        if self._world.rank != 0:
            return NullReporter()
        if settings is not None:
            return open_reporter(settings)
        return open_run(
            tracking_settings(self._tracking_uri),
            name=Path(sys.argv[0]).stem or "training",
            incarnation=store.incarnation if store is not None else 0,
            memory=PlaceNote(store.place, _RUN) if store is not None else None,
        )

    def epochs(self, num_epochs: float) -> Iterator[int]:
        """Passes over the data, until ``num_epochs`` statistical epochs of progress are made.

        One statistical epoch is as much progress as one pass makes at M0, so larger batches take more
        passes, and the last one may end early. Gives the number of the pass. At the end the job is complete.
        A job that was complete goes on from where it ended if it is now asked for more epochs.
        Raises DocumentError for no epoch at all, TypeError for what is no number, and LoopError where another
        loop over epochs has begun within this one.
        """
        if isinstance(num_epochs, bool) or not isinstance(num_epochs, Real):
            raise TypeError(f"epochs is {num_epochs!r}; give a number of epochs, above 0")
        if num_epochs > sys.float_info.max and num_epochs != math.inf:
            raise DocumentError("epochs is beyond what a float holds; give a number of epochs")
        if not num_epochs > 0:
            raise DocumentError(f"epochs is {num_epochs}; train for at least 1")
        position, training = self._position, self._training
        wanted = self._config.epochs or num_epochs
        training.target = self._steps_of(wanted)
        self._loops += 1
        loop = self._loops
        if not (training.finished and position.closed):
            training.reopen()
            self.complete = False
            while True:
                if position.closed and position.ended:
                    position.next_epoch()
                yield position.epoch
                if loop != self._loops:
                    raise LoopError(
                        "a loop over job.epochs() began within another one; have one, with the loop over "
                        "job.loader in it"
                    )
                training.target = self._steps_of(wanted)
                training.close()
                if training.finished:
                    break
                if position.ended:
                    position.next_epoch()
        self.finish()

    def _steps_of(self, epochs: float) -> float | None:
        """As steps of size M0; None before the end of the first pass over a stream of unknown length."""
        samples = self._position.num_samples
        return None if samples is None else epochs * samples / self._config.limits.initial_batch_size

    def on_step(self, call: Callable[[], None]) -> None:
        """Have ``call`` called on every rank after each optimizer step, between what is timed.

        It may evaluate the model or talk to the other ranks; progress and step are those after the step.
        """
        self._training.after_step.append(call)

    def stop(self) -> None:
        """Ask to end all replicas' processes at the end of a step, this one or the next, as SIGTERM does.

        A checkpoint is written, and the next start goes on from there.
        """
        self._stop.asked = True

    def finish(self) -> None:
        """Declare the training complete; ``epochs`` does it, a loop that is left early must do it itself."""
        if not self.complete:
            self.complete = True
            self._training.complete()
            if not self._driven:
                self._stop.release()

    def log(self, **metrics: float) -> None:
        """Log figures against the present progress; rank 0's count, and no rank waits for another.

        Call it within the loop over ``epochs``: at its end the job's run is closed, which a warning says.
        Raises DocumentError for what is no number.
        """
        if self.complete:
            logger.warning("%s: not logged after the training; log within its loop", ", ".join(metrics))
        elif self._world.rank == 0:
            self._training.log({name: figure(name, value) for name, value in metrics.items()})

    @property
    def finished(self) -> bool:
        """Whether the progress that ``epochs`` was asked for is made."""
        return self._training.finished

    @property
    def rank(self) -> int:
        """This process's place among the replicas."""
        return self._world.rank

    @property
    def num_replicas(self) -> int:
        return self._world.size

    @property
    def initial_batch_size(self) -> int:
        """M0, the total batch size that the learning rate is for."""
        return self._config.limits.initial_batch_size

    @property
    def batch_size(self) -> int:
        """The total batch size M of the next step."""
        return self._training.plan.batch_size

    @property
    def batch_share(self) -> float:
        """The part of its step's samples, over all replicas, that the batch in the loop has.

        The sum over a step's batches and replicas is 1, so it weights losses into the step's mean loss.
        """
        return self._training.share

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
        """Useful progress, in passes over the data at M0; NaN while a pass has no known length."""
        samples = self._position.num_samples
        return math.nan if samples is None else self.progress / (self._steps_of(1) or math.inf)

    def _schedule(self) -> float:
        if self._lr_schedule is None:
            return 1.0
        epoch = self.statistical_epoch
        return checked_multiplier(self._lr_schedule(epoch), epoch)


def _last_words(pid: int) -> None:
    """At the end of the process ``pid``, not of one that the script has forked from it."""
    if _current is not None and os.getpid() == pid:
        _current._training.left()


def _device_of(model: nn.Module) -> torch.device:
    """Where the model's parameters are."""
    return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))


def _is_sharded(model: nn.Module) -> bool:
    """Whether ``fully_shard`` was applied; its module is imported by those who need it alone."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(model, fsdp.FSDPModule)


def _saver_of(model: nn.Module) -> type[Saver]:
    if not _is_sharded(model):
        return Saver
    from pollux_agent.torch.sharded_saver import ShardedSaver

    return ShardedSaver


def _sync(
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    grad_scaler: torch.amp.GradScaler | None,
    every: int,
    custom: Mapping[type[Optimizer], Preconditioner] | None,
) -> GradientSync:
    """What averages gradients and measures them; a sharded model's has the same methods."""
    if not _is_sharded(model):
        return GradientSync(
            model, optimizers, grad_scaler=grad_scaler, sample_every=every, preconditioners=custom
        )
    if grad_scaler is not None:
        raise DocumentError("grad_scaler: not with a sharded model; train it in bfloat16, which needs none")
    from pollux_agent.torch.fsdp import ShardedSync

    sharded = ShardedSync(model, optimizers, sample_every=every, preconditioners=custom)
    return cast(GradientSync, sharded)


def _check_model(model: nn.Module) -> None:
    """Raise DocumentError for a model that is already spread over replicas."""
    if isinstance(model, DistributedDataParallel | DataParallel):
        raise DocumentError(
            f"model is wrapped in {type(model).__name__}, but the job averages gradients itself; "
            "give the module inside it"
        )


def _least(model: nn.Module, given: int | None, most: int) -> int:
    """The least samples of a forward pass: batch normalisation cannot train on one."""
    if given is not None:
        return given
    normed = [part for part in model.modules() if isinstance(part, _BatchNorm)]
    if most == 1 and any(part.training for part in normed):
        raise DocumentError(
            "max_local_batch_size (default batch_size) is 1, but the model's batch normalisation needs 2 "
            "samples a pass; give at least 2, or min_local_batch_size=1 if each sample has several values a "
            "channel"
        )
    return min(2, most) if normed else 1


def _position(
    train_set: Dataset[Any], given: int | None, seed: int, least: int
) -> ElasticSampler | StreamPosition:
    length = dataset_length(train_set, given)
    if isinstance(train_set, IterableDataset):
        return StreamPosition(length, seed=seed)
    assert length is not None
    return ElasticSampler(length, seed=seed, least=least)
