"""``pollux-agent drive``: the loop of one job's driver pod."""

import json
import logging
import signal
import threading
import time
from dataclasses import dataclass, field, replace
from typing import Any

from pollux_agent.driver.driver import Driver
from pollux_agent.driver.kube.api import KubeApi, KubeError, pod_path
from pollux_agent.driver.kube.cache import PodCache
from pollux_agent.driver.kube.documents import (
    ALLOCATION,
    FRESH,
    JOB,
    RUN,
    SETTINGS,
    SPEC,
    STATE,
    STOP,
    TRY,
    WORKER,
    KubeDriverSettings,
    annotations,
    lost_nodes,
)
from pollux_agent.driver.kube.files import DriverFiles
from pollux_agent.driver.kube.left import send_left
from pollux_agent.driver.kube.manifest import Gang
from pollux_agent.driver.kube.narrow import Narrowed, narrow
from pollux_agent.driver.kube.workers import KubeWorkers
from pollux_agent.driver.machine import FINAL_PHASES, Start, Timing
from pollux_agent.driver.state import DriverState, StopReason
from pollux_agent.errors import DocumentError, PolluxAgentError
from pollux_agent.protocol import (
    Allocation,
    DriverEvent,
    JobFolder,
    JobSpec,
    Outcome,
    Placement,
    decode,
    encode,
)
from pollux_agent.records import append_line, write_outcome

logger = logging.getLogger(__name__)

_TICK_S = 1.0
_TELL_EVERY_S = 60.0
_STOPS: dict[str, StopReason] = {
    "failed": "failed",
    "success": "success",
    "clear": "clear",
    "orphan": "orphan",
}


def drive(api: KubeApi, *, namespace: str, pod: str, folder: JobFolder) -> int:
    """Drive the job of this pod to its end; the process's exit status, 0 unless the job is not over.

    On SIGTERM the workers checkpoint and end, and the job waits for its next driver. While the job's files
    cannot be written they go on as they are. Raises KubeError where the pod cannot be read, DocumentError
    where its annotations are wrong.
    """
    closing = threading.Event()
    own = api.get(pod_path(namespace, pod))
    job_id = own["metadata"]["labels"][JOB]
    cache = PodCache(api, namespace, f"{JOB}={job_id}")

    def close(*_: object) -> None:
        closing.set()
        cache.changed.set()

    signal.signal(signal.SIGTERM, close)
    cache.start()
    driver = KubeDriver.open(api, cache, own, folder)
    trouble: int | None = None
    while not driver.over:
        cache.changed.wait(_TICK_S)
        cache.changed.clear()
        try:
            if not driver.turn(time.time(), closing=closing.is_set()):
                break
            trouble = None
        except OSError as error:
            if error.errno != trouble:
                logger.error("Waits until the job's files can be written: %s", error)
            trouble = error.errno
    if driver.over:
        driver.send_left(closing)
    return 0 if driver.over else 1


@dataclass(slots=True, kw_only=True)
class KubeDriver:
    """The driver, its workers, and what of them stands in the pod's annotations."""

    api: KubeApi
    cache: PodCache
    own: dict[str, Any]
    folder: JobFolder
    spec: JobSpec
    settings: KubeDriverSettings
    files: DriverFiles
    workers: KubeWorkers = field(init=False)
    driver: Driver = field(init=False)
    over: bool = field(default=False, init=False)
    _worked: Placement = field(default_factory=dict, init=False)
    _narrowed: Narrowed | None = field(default=None, init=False)
    _told: DriverState | None = field(default=None, init=False)
    _told_unix_s: float = field(default=0.0, init=False)
    _close_unix_s: float | None = field(default=None, init=False)

    @classmethod
    def open(cls, api: KubeApi, cache: PodCache, own: dict[str, Any], folder: JobFolder) -> "KubeDriver":
        """From the pod's annotations and what a driver before left in the folder."""
        notes = annotations(own)
        made = cls(
            api=api,
            cache=cache,
            own=own,
            folder=folder,
            spec=decode(JobSpec, notes[SPEC]),
            settings=decode(KubeDriverSettings, notes[SETTINGS]),
            files=DriverFiles(folder),
        )
        now = time.time()
        meta = own["metadata"]
        made.workers = KubeWorkers(
            job_id=meta["labels"][JOB],
            namespace=meta["namespace"],
            driver_uid=meta["uid"],
            api=api,
            cache=cache,
            folder=folder,
            make_gang=made._gang,
        )
        fresh = notes.get(FRESH) == "true"
        state = made.files.begin(made.spec, _state_of(notes), fresh=fresh, now_unix_s=now)
        made.driver = Driver(
            folder=folder,
            workers=made.workers,
            state=state,
            save=made.files.save,
            timing=Timing(grace_s=made.settings.grace_s),
        )
        submitted = DriverEvent(
            t_unix_s=now,
            event="submit",
            incarnation=state.incarnation,
            decision=state.acted_decision,
            message=f"submission {notes.get(TRY, '1')}{', from nothing' if fresh else ''}",
        )
        append_line(folder.driver_events, submitted)
        return made

    def turn(self, now_unix_s: float, *, closing: bool) -> bool:
        """One turn; False if there is nothing more to do, the job being over or, ``closing``, parked."""
        self.own = dict(self.cache.pods().get(self.own["metadata"]["name"], self.own))
        notes = annotations(self.own)
        self.workers.lost_nodes = lost_nodes(self.own)
        self.workers.tend()
        parks = closing or self.files.clean_up_pending
        if self.files.clean_up_pending and not self.workers.blocked({}) and not self.driver.state.placement:
            self.driver.state = self.files.clean_up(self.driver.state)
            parks = closing
        allocation = _allocation(notes, self.driver.state)
        wanted = replace(allocation, placement={}) if parks else self._effective(allocation, now_unix_s)
        state = self.driver.tick(
            now_unix_s=now_unix_s, allocation=wanted, stop=_STOPS.get(notes.get(STOP, ""))
        )
        if state.phase == "running":
            self._worked = dict(state.placement)
        self._look_for_trouble(allocation, now_unix_s)
        self._tell(now_unix_s)
        if state.phase in FINAL_PHASES:
            self.over = self._told == self._said(state)
            return not self.over
        return not (closing and not state.placement) and not self._closed_too_long(closing, now_unix_s)

    def send_left(self, closing: threading.Event) -> None:
        """Once the job is over: its last figures, where MLflow was away at its end."""
        send_left(
            self.folder,
            tracking_uri=self.settings.mlflow_tracking_uri,
            run_id=annotations(self.own).get(RUN, ""),
            incarnation=self.driver.state.incarnation,
            closing=closing,
        )

    def _effective(self, allocation: Allocation, now_unix_s: float) -> Allocation:
        """The allocation, or what is left of it while all of it cannot start."""
        if self._narrowed is not None and not self._narrowed.holds(allocation, now_unix_s):
            self._narrowed = replace(self._narrowed, over=True)
        if self._narrowed is None or self._narrowed.over:
            return allocation
        return replace(allocation, placement=self._narrowed.placement)

    def _look_for_trouble(self, allocation: Allocation, now_unix_s: float) -> None:
        """A gang that does not come to work as a whole gives way to one that did, or to none."""
        state = self.driver.state
        if state.phase != "starting" or (trouble := self.workers.trouble()) is None:
            return
        logger.warning("Incarnation %d cannot start: %s", state.incarnation, trouble.reason)
        if trouble.fatal and not self._worked and state.best_step == 0:
            self._fail(trouble.reason, now_unix_s)
            return
        self._narrowed = narrow(
            allocation,
            self._worked,
            spec=self.spec,
            reason=trouble.reason,
            before=self._narrowed,
            now_unix_s=now_unix_s,
        )
        self.cache.changed.set()

    def _fail(self, reason: str, now_unix_s: float) -> None:
        """The job itself is at fault: it fails with the cause, as if its script had told it."""
        outcome = Outcome(
            kind="failed",
            job_id=self.workers.job_id,
            incarnation=self.driver.state.incarnation,
            rank=0,
            time_unix_s=now_unix_s,
            error=f"the workers cannot start: {reason}",
        )
        write_outcome(self.folder, outcome)
        self.workers.kill()

    def _said(self, state: DriverState) -> DriverState:
        """The state with the reason why the job has less than it was given."""
        if self._narrowed is None or self._narrowed.over or state.phase in FINAL_PHASES:
            return state
        return replace(state, message=f"{state.message}; {self._narrowed.reason}")

    def _tell(self, now_unix_s: float) -> None:
        """Write the state into the pod's annotation: on every change that matters, and once a minute."""
        said = self._said(self.driver.state)
        if abs(now_unix_s - self._told_unix_s) < _TELL_EVERY_S and not self._news(said):
            return
        meta = self.own["metadata"]
        body = {"metadata": {"annotations": {STATE: encode(said)}}}
        try:
            self.api.patch(pod_path(meta["namespace"], meta["name"]), body)
        except KubeError as error:
            logger.warning("The job's state could not be told: %s", error)
            return
        self._told, self._told_unix_s = said, now_unix_s

    def _news(self, said: DriverState) -> bool:
        """Whether more than the count of GPU seconds has changed since the state was told."""
        told = self._told
        return told is None or said != replace(
            told, attained_gpu_s=said.attained_gpu_s, counted_unix_s=said.counted_unix_s
        )

    def _gang(self, start: Start) -> Gang:
        notes = annotations(self.own)
        return Gang(
            job_id=self.workers.job_id,
            driver=self.own,
            template=_json(notes.get(WORKER, "{}"), WORKER),
            start=start,
            settings=self.settings,
            gpu_type=_allocation(notes, self.driver.state).gpu_type,
            env=self.spec.env,
            mlflow_run_id=notes.get(RUN, ""),
        )

    def _closed_too_long(self, closing: bool, now_unix_s: float) -> bool:
        if not closing:
            return False
        if self._close_unix_s is None:
            self._close_unix_s = now_unix_s + self.settings.grace_s + 10
        return now_unix_s > self._close_unix_s


def _allocation(notes: Any, state: DriverState) -> Allocation:
    """The stored allocation; one that cannot be read is named in the log and leaves the job as it is."""
    try:
        return decode(Allocation, notes[ALLOCATION])
    except (KeyError, DocumentError) as error:
        logger.error("The allocation cannot be read, so the job keeps what it has: %s", error)
        return Allocation(decision=state.acted_decision, placement=state.placement)


def _state_of(notes: Any) -> DriverState | None:
    try:
        return decode(DriverState, notes[STATE])
    except (KeyError, DocumentError):
        return None


def _json(text: str, name: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError:
        raise PolluxAgentError(f"annotation {name}: no JSON") from None
    return found if isinstance(found, dict) else {}
