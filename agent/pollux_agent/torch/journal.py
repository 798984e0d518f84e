"""What one rank writes down about itself: events, and how it ended."""

import logging
import time
from pathlib import Path
from typing import Any

from pollux_agent.protocol import Outcome, Unsaved, encode, encode_plain
from pollux_agent.protocol.event import EventName
from pollux_agent.protocol.outcome import OutcomeKind
from pollux_agent.records import Room, append_text, outcome_room, write_completion, write_outcome
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
        self._unsaved, self._unwritten = "", False
        self.restart = Restart(settings)
        self._events: Path | None = None
        self._place: dict[str, Any] = {}
        if settings is not None:
            self._events = settings.folder.events(settings.incarnation, world.rank)
            own = settings.slots[world.local_rank : world.local_rank + 1]
            self._place = {"node": settings.node, "slots": list(own)}
            self._have_room(settings)

    def resumed(self) -> None:
        """The history is that of a checkpoint now."""
        self._first_step = self._history.step
        self.restart.loaded()

    @property
    def steps_taken(self) -> int:
        """Steps of this incarnation."""
        return self._history.step - self._first_step

    def event(self, event: EventName, *, batch_size: int = 0, t_unix_s: float | None = None) -> None:
        """Write an ``Event``; where the disk refuses, training goes on without it.

        Readers check it: to do so here, where it was last done a second ago, would take as long as all the
        rest.
        """
        if self._events is None:
            return
        fields = self._place | {
            "t_unix_s": time.time() if t_unix_s is None else t_unix_s,
            "event": event,
            "step": self._history.step,
            "progress": self._history.progress,
            "batch_size": batch_size,
        }
        try:
            append_text(self._events, encode_plain(fields))
            self._unwritten = False
        except OSError as error:
            if not self._unwritten:
                logger.warning("events are not written down for now: %s", error)
            self._unwritten = True

    def step(self, *, batch_size: int) -> None:
        """An optimizer step: the first one is written, then at most one a second."""
        now = time.monotonic()
        if now - self._last_step_event_s >= STEP_EVENT_INTERVAL_S:
            self._last_step_event_s = now
            self.event("step", batch_size=batch_size)

    def saved(self) -> None:
        """A checkpoint is written, as one is expected to be."""
        if self._unsaved:
            logger.warning("checkpoints are written again, from step %d", self._history.step)
            self._unsaved = ""
            if self._settings is not None:
                self._have_room(self._settings)

    def unsaved(self, why: str, *, standing_step: int | None) -> None:
        """No checkpoint can be written: say so once, in the log and to the driver, until one is again."""
        first = not self._unsaved
        self._unsaved = self._not_saved(why, standing_step)
        if not first or self._world.rank != 0:
            return
        logger.error("%s; training goes on, and saving is tried again and again", self._unsaved)
        if self._settings is None:
            return
        word = Unsaved(incarnation=self._settings.incarnation, time_unix_s=time.time(), message=self._unsaved)
        try:
            _word_room(self._settings).write(self._settings.folder.unsaved, encode(word).encode())
        except OSError as error:
            logger.warning("%s is not written: %s", self._settings.folder.unsaved, error)

    def stands(self, why: str, *, standing_step: int | None) -> None:
        """The end comes without a checkpoint: say so in the log, and with the outcome."""
        self._unsaved = self._not_saved(why, standing_step)
        if self._world.rank == 0:
            logger.error("%s", self._unsaved)

    def _not_saved(self, why: str, standing_step: int | None) -> str:
        return f"step {self._history.step} is not saved: {why}; {standing(standing_step)}"

    def stopped(self, *, standing_step: int | None) -> None:
        """Where no driver reads outcomes, tell the person at the shell where a stop has left the training."""
        if self._settings is not None or self._world.rank != 0:
            return
        if standing_step == self._history.step:
            kept = "which is saved: a start with the same checkpoint_dir goes on from there"
        elif standing_step is not None:
            kept = f"which is not saved: the checkpoint of step {standing_step} stands"
        else:
            kept = "which is not saved: there is no checkpoint to go on from"
        logger.warning("stopped as asked at step %d, %s", self._history.step, kept)

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
            error=self._unsaved if self._world.rank == 0 else "",
        )
        if kind == "done" and self._world.rank == 0:
            write_completion(self._settings.folder, outcome)
        write_outcome(self._settings.folder, outcome)
        if self._world.rank == 0:
            _word_room(self._settings).release()

    def _have_room(self, settings: WorkerSettings) -> None:
        """Checkpoints can be written, or are thought to be: have room to say that they can not."""
        folder, rank = settings.folder, self._world.rank
        if rank == 0:
            folder.unsaved.unlink(missing_ok=True)
            _word_room(settings).reserve()
        for left in folder.outcomes.glob(f".room-*-{rank}"):
            Room(left).release()
        outcome_room(folder, settings.incarnation, rank).reserve()


def standing(step: int | None) -> str:
    """Which checkpoint there is, in words; None is none."""
    return "there is no checkpoint" if step is None else f"the checkpoint of step {step} stands"


def _word_room(settings: WorkerSettings) -> Room:
    return Room(settings.folder.outcomes / ".room-unsaved")
