"""What one rank writes down about itself: events, and how it ended."""

import logging
import time

from pollux_agent.protocol import Event, Outcome
from pollux_agent.protocol.event import EventName
from pollux_agent.protocol.outcome import OutcomeKind
from pollux_agent.records import append_line, write_completion, write_outcome
from pollux_agent.settings import WorkerSettings
from pollux_agent.torch.history import History
from pollux_agent.torch.restarts import Restart
from pollux_agent.torch.world import World

logger = logging.getLogger(__name__)

STEP_EVENT_INTERVAL_S = 1.0


class Journal:
    """The event file and the outcome of one rank; writes nothing where no driver runs the job."""

    def __init__(self, settings: WorkerSettings | None, world: World, history: History) -> None:
        self._settings, self._world, self._history = settings, world, history
        self._last_step_event_s = float("-inf")
        self._first_step = history.step
        self.restart = Restart(settings)

    def resumed(self) -> None:
        """The history is that of a checkpoint now."""
        self._first_step = self._history.step
        self.restart.loaded()

    @property
    def steps_taken(self) -> int:
        """Steps of this incarnation."""
        return self._history.step - self._first_step

    def event(self, event: EventName, *, batch_size: int = 0, t_unix_s: float | None = None) -> None:
        """Write an event; where the disk refuses, training goes on without it."""
        if self._settings is None:
            return
        slots = self._settings.slots
        own = slots[self._world.local_rank : self._world.local_rank + 1]
        line = Event(
            t_unix_s=time.time() if t_unix_s is None else t_unix_s,
            event=event,
            node=self._settings.node,
            slots=own,
            step=self._history.step,
            progress=self._history.progress,
            batch_size=batch_size,
        )
        try:
            append_line(self._settings.folder.events(self._settings.incarnation, self._world.rank), line)
        except OSError as error:
            logger.warning("the event %s is not written down: %s", event, error)

    def step(self, *, batch_size: int) -> None:
        """An optimizer step: the first one is written, then at most one a second."""
        now = time.monotonic()
        if now - self._last_step_event_s >= STEP_EVENT_INTERVAL_S:
            self._last_step_event_s = now
            self.event("step", batch_size=batch_size)

    def saved_to_stop(self, saving_unix_s: float) -> None:
        """Leave word of the save made on request, which began then and is done now."""
        if self._world.rank != 0:
            return
        try:
            self.restart.stopped(saving_unix_s=saving_unix_s, saved_unix_s=time.time())
        except OSError as error:
            logger.warning("how long the stop took is not written down: %s", error)

    def outcome(self, kind: OutcomeKind) -> None:
        """How this rank ended; done is also the job's completion marker, written by rank 0."""
        if self._settings is None:
            return
        outcome = Outcome(
            kind=kind,
            job_id=self._settings.job_id,
            incarnation=self._settings.incarnation,
            rank=self._world.rank,
            time_unix_s=time.time(),
            step=self._history.step,
            steps_taken=self.steps_taken,
            progress=self._history.progress,
        )
        if kind == "done" and self._world.rank == 0:
            write_completion(self._settings.folder, outcome)
        write_outcome(self._settings.folder, outcome)
