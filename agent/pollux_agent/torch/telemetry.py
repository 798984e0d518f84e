"""What rank 0 tells about the job: the report for the scheduler, and figures against progress for people."""

import json
import logging
import math
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field

from pollux_agent.errors import DocumentError
from pollux_agent.model.throughput import ThroughputParams
from pollux_agent.protocol import Report
from pollux_agent.records import FileNote, Note
from pollux_agent.report import Reporter
from pollux_agent.report.prior import Earlier
from pollux_agent.settings import WorkerSettings
from pollux_agent.torch.config import JobConfig
from pollux_agent.torch.history import History
from pollux_agent.torch.profile import Profile
from pollux_agent.torch.sampler import BatchPlan

logger = logging.getLogger(__name__)

PROFILE_EVERY_REPORTS = 10
STOP_TIMEOUT_S, DONE_TIMEOUT_S = 2.0, 15.0
PROFILE_NAME = "profile.json"
_MOST_LINES = 10_000
"""Of a note of what was logged, before it is written anew."""


@dataclass(slots=True)
class _Window:
    """What happened since the last report, in training time (boundaries and evaluation left out)."""

    seconds: float = 0.0
    steps: int = 0
    samples: int = 0
    progress: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class JobState:
    """What a report is made of besides the history; ``fits`` by GPU type."""

    plan: BatchPlan
    num_gpus: int
    noise_scale: float | None
    lr_factor: float
    target_progress: float | None
    fits: Mapping[str, ThroughputParams]
    restart_phases_s: Mapping[str, float] = field(default_factory=dict)


def figure(name: str, value: object) -> float:
    """A figure of the script's as a number: any object that is one, such as a tensor of one element.

    Raises DocumentError for anything else.
    """
    try:
        number = value.item() if hasattr(value, "item") else value
        if not isinstance(number, str):
            return float(number)  # type: ignore[arg-type]
    except (TypeError, ValueError, RuntimeError, OverflowError):
        pass
    shown = "beyond what a float holds" if isinstance(value, int) else f"{value!r}"[:200]
    raise DocumentError(f"log: {name} is {shown}; give a number, or a tensor of one element")


class Telemetry:
    """Sends reports and metrics; a metric's steps only ever rise, also over restarts."""

    def __init__(
        self,
        reporter: Reporter,
        settings: WorkerSettings | None,
        config: JobConfig,
        history: History,
        *,
        memory: Note | None = None,
    ) -> None:
        self._reporter, self._settings, self._config, self._history = reporter, settings, config, history
        self._window = _Window()
        self._memory = FileNote(settings.folder.logged) if settings is not None else memory
        self._remembered_s, self._lines, self._refused = -math.inf, _MOST_LINES, False

    def recall(self) -> None:
        """Take up what was logged after the checkpoint that the history is of, or without any checkpoint."""
        try:
            lines = self._memory.read().splitlines() if self._memory else []
        except OSError:
            return
        for line in lines:
            with suppress(ValueError, AttributeError, TypeError):  # one that the machine's end has cut off
                for name, step in json.loads(line).items():
                    self._history.logged[name] = max(int(step), self._history.logged.get(name, -1))

    def step(self, *, seconds: float, samples: int, progress: float) -> None:
        """Count a finished step of ``seconds``."""
        self._window.seconds += seconds
        self._window.steps += 1
        self._window.samples += samples
        self._window.progress += progress

    def log(self, values: Mapping[str, float]) -> None:
        """Log figures at the present progress; one that was logged there already is left out."""
        step = int(self._history.progress)
        new = {
            name: float(value) for name, value in values.items() if self._history.logged.get(name, -1) < step
        }
        if new:
            self._reporter.metrics(new, step=step)
            logged = dict.fromkeys(new, step)
            self._history.logged.update(logged)
            self._remember(logged)

    def _remember(self, logged: Mapping[str, int], *, at_once: bool = False) -> None:
        """Keep what was logged, in a line of its own or, now and then, all in one; where the disk refuses, a
        restart may log some of it again.
        """
        memory, now = self._memory, time.monotonic()
        if memory is None or (now < self._remembered_s + memory.every_s and not at_once):
            return
        self._remembered_s = now
        try:
            if self._lines < _MOST_LINES and memory.append(json.dumps(logged)):
                self._lines += 1
            else:
                memory.write(json.dumps(self._history.logged).encode() + b"\n")
                self._lines = 0
            self._refused = False
        except OSError as error:
            if not self._refused:
                logger.warning("%s is not written for now: %s", memory, error)
            self._refused = True

    def report(self, state: JobState) -> None:
        """Send the report, and the figures of the time since the last one."""
        window, self._window = self._window, _Window()
        initial = self._config.limits.initial_batch_size
        figures: dict[str, float] = {
            "batch_size": state.plan.batch_size,
            "gpus": state.num_gpus,
            "lr_factor": state.lr_factor,
            "examples_processed": self._history.examples,
            "optimizer_updates": self._history.step - self._history.skipped_steps,
            "progress": self._history.progress,
        }
        goodput = None
        if window.seconds > 0:
            goodput = window.progress * initial / window.seconds
            figures |= {
                "goodput": goodput,
                "throughput": window.samples / window.seconds,
                "efficiency": window.progress * initial / window.samples,
                "step_time_s": window.seconds / window.steps,
            }
        if state.noise_scale is not None:
            figures["pgns"] = state.noise_scale
        figures |= {f"restart_{name}_s": seconds for name, seconds in state.restart_phases_s.items()}
        self.log(figures)
        self._history.reports += 1
        if self._settings is not None:
            self._reporter.report(self._document(self._settings, state, goodput))

    def ask_for_earlier(self, give: Callable[[Earlier], None]) -> None:
        """Have ``give`` called, from a thread, with what earlier runs of the model know, if there is any."""
        self._reporter.ask_for_earlier(give)

    def profile(self, profiles: Mapping[str, Profile], fits: Mapping[str, ThroughputParams]) -> None:
        """Store the raw profile per GPU type, so that a later run of the same model can start from it."""
        document = {
            "schema": 1,
            "profiles": {gpu_type: profile.state_dict() for gpu_type, profile in profiles.items()},
            "fits": {gpu_type: asdict(params) for gpu_type, params in fits.items()},
        }
        self._reporter.artifact(PROFILE_NAME, json.dumps(document).encode())

    def close(self, *, done: bool) -> None:
        """Send what waits, for seconds at most; ``done`` also ends the run."""
        if self._memory is not None and self._memory.every_s:
            self._remember({}, at_once=True)
        if done:
            self._reporter.finish("FINISHED")
        self._reporter.close(DONE_TIMEOUT_S if done else STOP_TIMEOUT_S)

    def _document(self, settings: WorkerSettings, state: JobState, goodput: float | None) -> Report:
        history, limits = self._history, self._config.limits
        return Report(
            job_id=settings.job_id,
            incarnation=settings.incarnation,
            sequence=history.reports,
            time_unix_s=time.time(),
            fits=dict(state.fits),
            noise_scale=state.noise_scale,
            initial_batch_size=limits.initial_batch_size,
            max_batch_size=history.batch_size_limit(limits),
            max_local_batch_size=limits.max_local_batch_size,
            max_gpus_seen=history.max_gpus_seen,
            gpus_seen=dict(history.gpus_seen),
            restart_phases_s=dict(state.restart_phases_s),
            restarts=history.restarts,
            mean_restart_s=history.mean_restart_s,
            first_start_s=history.first_start_s,
            progress=history.progress,
            target_progress=state.target_progress,
            batch_size=state.plan.batch_size,
            goodput=goodput,
        )
