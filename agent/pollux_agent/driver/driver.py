"""One job's driver: observes, asks the state machine, and does what it says."""

import logging
from collections.abc import Callable, Mapping
from typing import Protocol, runtime_checkable

from pollux_agent.driver.machine import FINAL_PHASES, Action, Kill, Seen, Signal, Start, Timing, turn
from pollux_agent.driver.records import completion, highest_step, log_tail, outcomes, unsaved
from pollux_agent.driver.state import DriverState, StopReason
from pollux_agent.protocol import Allocation, DriverEvent, JobFolder, Placement
from pollux_agent.records import append_line

logger = logging.getLogger(__name__)

_MAX_TURNS = 4
"""From workers gone to workers started takes two turns; the rest waits for the next tick."""


class Workers(Protocol):
    """What starts one job's workers: processes here, pods on Kubernetes. No method raises."""

    def blocked(self, placement: Placement) -> str:
        """Why this placement cannot start now, empty if it can."""
        ...

    def start(self, start: Start) -> None:
        """Start a gang. A node on which that does not work counts as gone."""
        ...

    def signal(self) -> None:
        """Ask every node's workers to checkpoint and end; called once a gang."""
        ...

    def kill(self) -> None:
        """End every process of the gang now."""
        ...

    def alive(self) -> Mapping[str, bool] | None:
        """Whether anything of the gang is left on each of its nodes; None without a gang."""
        ...

    def release(self) -> None:
        """The gang is gone and recorded: forget it."""
        ...


@runtime_checkable
class TakenWorkers(Protocol):
    """Workers that a cluster may take away."""

    def taken(self) -> bool:
        """Whether the cluster ended some of the present gang, for reasons of its own."""
        ...


@runtime_checkable
class DistantWorkers(Protocol):
    """Workers whose output comes to the job's folder by and by."""

    def read_out(self) -> None:
        """The gang is gone: what it printed is in the folder on return, as far as it can be had."""
        ...


class Driver:
    """Call :meth:`tick` often; ``save`` keeps each new state before it is acted upon."""

    def __init__(
        self,
        *,
        folder: JobFolder,
        workers: Workers,
        state: DriverState,
        save: Callable[[DriverState], None],
        timing: Timing,
    ) -> None:
        self.state = state
        self._folder = folder
        self._workers = workers
        self._save = save
        self._timing = timing
        self._unwritten: list[DriverEvent] = []

    def tick(self, *, now_unix_s: float, allocation: Allocation, stop: StopReason | None) -> DriverState:
        """Bring the job nearer to its allocation, or to its end.

        Raises OSError where the new state cannot be kept, and nothing was done; or where events could not be
        written down, which is done at a later tick.
        """
        for _ in range(_MAX_TURNS):
            before = self.state
            seen = self._observe(now_unix_s, allocation, stop)
            answer = turn(before, seen, self._timing)
            if answer.state != before:
                self._save(answer.state)
            self.state = answer.state
            self._unwritten += answer.events
            if before.placement and not self.state.placement:
                self._workers.release()
            for action in answer.actions:
                self._do(action)
            if self.state.phase == before.phase or self.state.phase in FINAL_PHASES:
                break
        self._write_down()
        return self.state

    def _write_down(self) -> None:
        while self._unwritten:
            event = self._unwritten[0]
            append_line(self._folder.driver_events, event)
            logger.info("%s: %s %s", self._folder.root.name, event.event, event.message)
            del self._unwritten[0]

    def _do(self, action: Action) -> None:
        match action:
            case Start():
                self._workers.start(action)
            case Signal():
                self._workers.signal()
            case Kill():
                self._workers.kill()

    def _observe(self, now_unix_s: float, allocation: Allocation, stop: StopReason | None) -> Seen:
        gang = self._workers.alive()
        incarnation = self.state.incarnation
        waits = self.state.phase == "waiting"
        gone = not waits and not (gang and any(gang.values()))
        if gone and isinstance(self._workers, DistantWorkers):
            self._workers.read_out()
        return Seen(
            now_unix_s=now_unix_s,
            allocation=allocation,
            stop=stop,
            gang=gang,
            blocked=self._workers.blocked(allocation.placement) if waits and allocation.placement else "",
            complete=completion(self._folder),
            outcomes=outcomes(self._folder, incarnation),
            step=highest_step(self._folder, incarnation) if gone or self.state.phase == "starting" else None,
            unsaved="" if waits else unsaved(self._folder, incarnation),
            log_tail=log_tail(self._folder, incarnation, self.state.placement) if gone else "",
            taken=gone and isinstance(self._workers, TakenWorkers) and self._workers.taken(),
            idle_s=0.0 if waits else self._idle_s(now_unix_s),
        )

    def _idle_s(self, now_unix_s: float) -> float:
        try:
            last_unix_s = self._folder.events(self.state.incarnation, 0).stat().st_mtime
        except OSError:
            last_unix_s = self.state.since_unix_s
        return max(0.0, now_unix_s - last_unix_s)
