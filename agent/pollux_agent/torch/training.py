"""The training as it runs: counts steps and progress, and does at each step boundary what is due there."""

import logging
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from pollux_agent.errors import CheckpointError
from pollux_agent.model.efficiency import step_gain
from pollux_agent.report.prior import Earlier
from pollux_agent.settings import WorkerSettings
from pollux_agent.torch.config import JobConfig
from pollux_agent.torch.history import process_age_s
from pollux_agent.torch.journal import Journal, standing
from pollux_agent.torch.profile import Pace, Profile, StepTimer
from pollux_agent.torch.sampler import BatchPlan, MicroBatch
from pollux_agent.torch.saver import Saver, Trained
from pollux_agent.torch.schedules import ProgressSchedulers
from pollux_agent.torch.stall import Stall
from pollux_agent.torch.stepper import FinishedStep, Stepper
from pollux_agent.torch.telemetry import PROFILE_EVERY_REPORTS, JobState, Telemetry
from pollux_agent.torch.tuner import FIRST_TUNE_STEPS, Tuner, local_batch_size
from pollux_agent.torch.world import World

logger = logging.getLogger(__name__)

_COMPLETE = 1 - 1e-9
"""Share of the target at which it counts as reached: progress is a sum of rounded fractions."""


_SAVING_SHARE = 0.1
"""Checkpoints take no more of the time than about this, however large they are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What a training works with."""

    settings: WorkerSettings | None
    config: JobConfig
    world: World
    gpu_type: str
    trained: Trained
    stepper: Stepper
    schedulers: ProgressSchedulers
    tuner: Tuner
    journal: Journal
    telemetry: Telemetry
    saver: Saver
    report_interval_s: float
    checkpoint_interval_s: float
    pace: Pace | None


def progress_of_step(
    noise_scale: float | None, *, initial_batch_size: int, batch_size: int, adaptive: bool
) -> float:
    """Useful progress of one step of ``batch_size`` samples, in steps of size M0.

    The gain of Pollux Eq. 7 for M above M0. No sample counts more than one at M0 does, so a small last step
    counts its share; and while phi is unknown a step counts for one of M0, however large.
    """
    if batch_size <= initial_batch_size or not adaptive:
        return batch_size / initial_batch_size
    return 1.0 if noise_scale is None else step_gain(noise_scale, initial_batch_size, batch_size)


class Training:
    """The loader's ``Steps``. Every rank has one, and all take the same turns at the same step."""

    def __init__(self, parts: Parts, *, resumed: bool) -> None:
        self._parts, self._history = parts, parts.trained.history
        self._resumed, self._began = resumed, False
        self._within, self._busy, self._stop_at_close = False, False, False
        self._timer = StepTimer()
        self._stall = Stall(parts.trained, standing=self.standing, speaks=parts.world.rank == 0)
        self._stepper, self._pace, self._tells = parts.stepper, parts.pace, parts.telemetry.step
        self._waits_for = parts.world.device if parts.world.device.type == "cuda" else None
        self._lr_factor, self._save_s = 1.0, 0.0
        self._initial_batch_size = parts.config.limits.initial_batch_size
        self._adaptive = parts.config.adaptive
        self.after_step: list[Callable[[], None]] = []
        self.share = 0.0
        self._tune_in = self._tune_every = FIRST_TUNE_STEPS
        self._tuned_s = self._reported_s = time.monotonic()
        self.target: float | None = None
        self._handed_on: list[Earlier] = []
        parts.schedulers.resume(self._history.progress)
        self.plan = self._agree(self._choose(None), 0)[0]
        if parts.settings is not None and parts.world.rank == 0 and parts.tuner.params is None:
            parts.telemetry.ask_for_earlier(self._handed_on.append)

    @property
    def finished(self) -> bool:
        """Whether the target is reached."""
        return self.target is not None and self._history.progress >= self.target * _COMPLETE

    @property
    def _noise_scale(self) -> float | None:
        return self._parts.trained.sync.noise.noise_scale

    @property
    def stepped(self) -> bool:
        return self._parts.stepper.stepped

    def reopen(self) -> None:
        """The job goes on, whether or not it was complete before."""
        self._busy = False
        settings = self._parts.settings
        if settings is not None and self._parts.world.rank == 0:
            settings.folder.complete.unlink(missing_ok=True)

    def begin_pass(self) -> None:
        self._timer.start()

    def begin(self, micro: MicroBatch) -> None:
        """Raises LoopError, on all ranks, where steps make no update any more."""
        if self._history.idle_steps:
            self._stall.check()
        self._within = True
        self.share = micro.num_samples / micro.step_samples
        self._stepper.begin(micro)

    def end(self, *, left: bool = False) -> bool:
        """Ends a micro-batch, and with the last one its step; False once there is nothing left to do.

        Raises SystemExit at the boundary at which all ranks agreed to stop. Behind the last step of a pass
        it waits for :meth:`close`: what the script does there must find the variables of its loop. So it does
        where the loop was ``left`` by a break: Python drops what is raised there.
        """
        step = self._stepper.end()
        if self._waits_for is not None:
            torch.cuda.synchronize(self._waits_for)
        if self._pace is not None:
            self._pace.pause()
        self._timer.end()
        if step is None:
            return True
        self._count(step)
        self._within = False
        if step.skipped or self._history.idle_steps:
            self._stall.count(step)
        for call in self.after_step:  # before a stop saves: what they do belongs to the step
            call()
        if step.stop:
            over = self.finished or self._parts.trained.sampler.ended
            self._stop_at_close = left or (over and not self._parts.saver.collective)
            if not self._stop_at_close:
                self.stop()
        self._boundary()
        self._timer.start()
        return not self.finished

    def close(self) -> None:
        """A pass is over, with all that the script does behind it; raises SystemExit if a stop waits."""
        self._parts.trained.sampler.closed = True
        self._stall.check()
        if self._parts.world.rank == 0:
            self._parts.tuner.pass_ended(self._journal.steps_taken)
        if self._stop_at_close and not self.finished:
            self.stop()

    def abandon(self) -> None:
        self._parts.stepper.abandon()
        self._within = False

    def overdue(self, late: bool) -> None:
        """SIGTERM came a while ago, and no step has looked at it since: in an evaluation, before the first
        step, or where data are long in coming.

        Rank 0 saves what the last step has left and ends, which ends the others, who can have gone no
        further. ``late``, or where a save takes all ranks, the last checkpoint stands.
        """
        saver = self._parts.saver
        if self._busy:
            return
        if self._journal.steps_taken == 0:
            self.stop(save=False)
        elif late:
            self._journal.stands("its end came too late to save", standing_step=saver.saved_step)
            self.stop(save=False)
        elif self._parts.world.rank == 0 and not saver.collective and not self._within:
            self.stop()

    def standing(self) -> str:
        """Which checkpoint there is, in words; rank 0 knows."""
        if self._parts.world.rank != 0:
            return "rank 0 says which checkpoint stands"
        return standing(self._parts.saver.saved_step)

    @property
    def _journal(self) -> Journal:
        return self._parts.journal

    def stop(self, *, save: bool = True) -> None:
        """Checkpoint, say so, and end this process; alone with the status that a shell has for SIGTERM."""
        self._busy = True
        saving_unix_s = time.time()
        if save:
            self.checkpoint()
        self._parts.journal.saved_to_stop(saving_unix_s)
        self._parts.journal.event("stop", batch_size=self.plan.batch_size)
        self._parts.journal.outcome("interrupted")
        self._parts.journal.stopped(standing_step=self._parts.saver.saved_step)
        if self._parts.world.rank == 0:
            self._send_report()
            self._parts.telemetry.profile(self._parts.trained.profiles, self._parts.trained.fits)
        self._parts.telemetry.close(done=False)
        self._parts.world.leave()
        raise SystemExit(0 if self._parts.settings is not None else 128 + signal.SIGTERM)

    def complete(self) -> None:
        """The last checkpoint, the completion marker, and the end of the run."""
        self._busy = True
        self.checkpoint()
        self._parts.journal.event("done", batch_size=self.plan.batch_size)
        self._parts.journal.outcome("done")
        if self._parts.world.rank == 0:
            self._send_report()
            self._parts.telemetry.profile(self._parts.trained.profiles, self._parts.trained.fits)
        self._parts.telemetry.close(done=True)

    def left(self) -> None:
        """The process ends: say what becomes of a training that was neither completed nor stopped.

        Under a driver the worker says it.
        """
        alone_rank_0 = self._parts.settings is None and self._parts.world.rank == 0
        if alone_rank_0 and not self._busy and self._journal.steps_taken:
            logger.warning(
                "the script ends at step %d, before its training is complete; %s. A loop that is left early "
                "on purpose calls job.finish(), or job.stop() to be gone on with later",
                self._history.step,
                self.standing(),
            )

    def log(self, values: Mapping[str, float]) -> None:
        """Log the user's own figures."""
        self._parts.tuner.observe(values)
        self._parts.telemetry.log(values)

    def checkpoint(self) -> None:
        """Write a checkpoint; where the disk refuses, training goes on with the earlier ones."""
        saver, journal, busy = self._parts.saver, self._parts.journal, self._busy
        self._busy = True
        began_s = time.monotonic()
        try:
            if saver.save():
                journal.event("checkpoint", batch_size=self.plan.batch_size)
                journal.saved()
        except CheckpointError as error:
            journal.unsaved(str(error), standing_step=saver.saved_step)
        finally:
            self._busy = busy
            self._save_s = time.monotonic() - began_s

    def _count(self, step: FinishedStep) -> None:
        history, samples = self._history, step.samples
        accum_s, optim_s, warm = self._timer.take()
        progress = 0.0
        if not step.skipped:
            progress = progress_of_step(
                step.noise_scale,
                initial_batch_size=self._initial_batch_size,
                batch_size=samples,
                adaptive=self._adaptive,
            )
        history.step += 1
        history.skipped_steps += step.skipped
        history.examples += samples
        if samples > history.max_batch_size_seen:
            history.max_batch_size_seen = samples
        history.progress += progress
        self._parts.schedulers.advance(history.progress, self.target)
        self._lr_factor = step.lr_factor
        if warm and samples == self.plan.batch_size:
            world = self._parts.world
            key = (world.num_nodes, world.size, local_batch_size(self.plan, world.size))
            self._profile.record(key, accum_s=accum_s, optim_s=optim_s)
        self._tells(seconds=sum(accum_s) + optim_s, samples=samples, progress=progress)
        if not self._began:
            self._first_step()
        self._parts.journal.step(batch_size=samples)

    @property
    def _profile(self) -> Profile:
        profiles, gpu_type = self._parts.trained.profiles, self._parts.gpu_type
        if gpu_type not in profiles:
            profiles[gpu_type] = Profile()
        return profiles[gpu_type]

    def _first_step(self) -> None:
        """The first step of this incarnation: what the start cost."""
        self._began = True
        self._history.max_gpus_seen = max(self._history.max_gpus_seen, self._parts.world.size)
        settings = self._parts.settings
        if not self._resumed:
            launched = settings.launched_unix_s if settings is not None else None
            self._history.first_start_s = process_age_s() if launched is None else time.time() - launched
            return
        self._parts.journal.restart.first_step()
        signalled = settings.signal_unix_s if settings is not None else None
        self._history.count_restart(None if signalled is None else time.time() - signalled)

    def _boundary(self) -> None:
        self._tune_in -= 1
        if self._tune_in <= 0:
            self._tune()
        now = time.monotonic()
        saver, world = self._parts.saver, self._parts.world
        interval_s = max(self._parts.checkpoint_interval_s, self._save_s / _SAVING_SHARE)
        due = int(now - saver.saved_s >= interval_s)
        if saver.collective:
            (due,) = world.broadcast((due,))
        if due and (saver.collective or world.rank == 0):
            self.checkpoint()
        if world.rank != 0:
            return
        if self._history.reports == 0 or now - self._reported_s >= self._parts.report_interval_s:
            self._send_report()

    def _tune(self) -> None:
        """Fit and choose on rank 0, then agree; again after twice the steps, or a report interval."""
        parts, plan = self._parts, self.plan
        if parts.world.rank == 0:
            while self._handed_on:
                self._take_up(self._handed_on.pop())
            parts.tuner.refit(self._profile)
            if parts.tuner.params is not None:
                parts.trained.fits[parts.gpu_type] = parts.tuner.params
                self._history.measured(parts.gpu_type, self._profile.most_replicas)
            plan = self._choose(self.plan)
            now = time.monotonic()
            step_s = (now - self._tuned_s) / self._tune_every
            self._tuned_s = now
            self._tune_every = max(1, min(2 * self._tune_every, int(parts.report_interval_s / step_s)))
        plan, self._tune_every = self._agree(plan, self._tune_every)
        self._tune_in = self._tune_every
        if plan != self.plan:  # an equal one must not take its place: the loader would start to read anew
            self.plan = plan
            self._timer.changed()

    def _take_up(self, earlier: Earlier) -> None:
        """Go on from what an earlier run of the same model has measured, and up to how many GPUs.

        With its fit alone the job would see that no single doubling of its GPUs pays for its restart, and
        stay small where one that knows nothing hopes for more, grows, and finds out.
        """
        logger.info("fits of earlier runs of this model are the prior on %s", ", ".join(earlier.fits))
        parts = self._parts
        for gpu_type, fit in earlier.fits.items():
            if gpu_type == parts.gpu_type:
                parts.tuner.learn(fit)
            else:
                parts.trained.fits.setdefault(gpu_type, fit)
        for gpu_type, num_gpus in earlier.gpus_seen.items():
            self._history.measured(gpu_type, num_gpus)
        self._history.max_gpus_seen = max(self._history.max_gpus_seen, earlier.max_gpus_seen)

    def _choose(self, current: BatchPlan | None) -> BatchPlan:
        largest = self._history.max_batch_size_seen
        return self._parts.tuner.choose(self._noise_scale, current, largest_batch_size=largest)

    def _agree(self, plan: BatchPlan, number: int) -> tuple[BatchPlan, int]:
        """Rank 0's plan and number, on every rank."""
        batch_size, micro_batches, number = self._parts.world.broadcast(
            (plan.batch_size, plan.micro_batches, number)
        )
        return BatchPlan(batch_size=batch_size, micro_batches=micro_batches), number

    def _send_report(self) -> None:
        self._reported_s = time.monotonic()
        parts = self._parts
        parts.telemetry.report(
            JobState(
                plan=self.plan,
                num_gpus=parts.world.size,
                noise_scale=self._noise_scale,
                lr_factor=self._lr_factor,
                target_progress=self.target,
                fits=parts.trained.fits,
                restart_phases_s=parts.journal.restart.phases_s,
            )
        )
        if self._history.reports % PROFILE_EVERY_REPORTS == 0:
            parts.telemetry.profile(parts.trained.profiles, parts.trained.fits)
