"""``pollux-agent drive``: the loop of one job's driver pod."""

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
    DEPLOYMENT,
    FRESH,
    JOB,
    STATE,
    KubeDriverSettings,
    annotations,
    labels,
)
from pollux_agent.driver.kube.files import DriverFiles
from pollux_agent.driver.kube.keeper import Keeper
from pollux_agent.driver.kube.left import send_left
from pollux_agent.driver.kube.manifest import Gang
from pollux_agent.driver.kube.narrow import Narrowed, narrow
from pollux_agent.driver.kube.notes import (
    allocation_of,
    driver_labels,
    fault_of,
    identity_of,
    lost_of,
    or_else,
    run_of,
    settings_of,
    spec_of,
    state_of,
    stop_of,
    template_of,
    try_of,
)
from pollux_agent.driver.kube.workers import KubeWorkers
from pollux_agent.driver.machine import FINAL_PHASES, Start, Timing
from pollux_agent.driver.state import DriverState
from pollux_agent.protocol import (
    Allocation,
    DriverEvent,
    JobFolder,
    JobSpec,
    Outcome,
    Placement,
    encode,
)
from pollux_agent.records import append_line, write_outcome

logger = logging.getLogger(__name__)

_TICK_S = 1.0
_TELL_EVERY_S = 60.0
_LOOK_EVERY_S = 5.0


def drive(api: KubeApi, *, namespace: str, pod: str, folder: JobFolder) -> int:
    """Drive the job of this pod to its end; the process's exit status, 0 unless the job is not over.

    On SIGTERM the workers checkpoint and end, and the job waits for its next driver. While the job's files
    cannot be written they go on as they are. Raises KubeError where the pod cannot be read, DocumentError
    where its annotations are wrong.
    """
    closing = threading.Event()
    own = api.get(pod_path(namespace, pod))
    cache = PodCache(api, namespace, f"{JOB}={pod}")

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
    """The driver, its workers, and what of them stands in the pod's annotations.

    ``template`` is the pod that workers are made from, and ``given`` the last allocation that could be read.
    """

    api: KubeApi
    cache: PodCache
    own: dict[str, Any]
    folder: JobFolder
    spec: JobSpec
    settings: KubeDriverSettings
    template: dict[str, Any]
    files: DriverFiles
    keeper: Keeper
    given: Allocation = field(init=False)
    workers: KubeWorkers = field(init=False)
    driver: Driver = field(init=False)
    over: bool = field(default=False, init=False)
    _worked: Placement = field(default_factory=dict, init=False)
    _narrowed: Narrowed | None = field(default=None, init=False)
    _looked_s: float = field(default=0.0, init=False)
    _told: DriverState | None = field(default=None, init=False)
    _told_unix_s: float = field(default=0.0, init=False)
    _close_unix_s: float | None = field(default=None, init=False)

    @classmethod
    def open(cls, api: KubeApi, cache: PodCache, own: dict[str, Any], folder: JobFolder) -> "KubeDriver":
        """From the pod's annotations and what a driver before left in the folder.

        Raises DocumentError where those that nobody else knows are wrong.
        """
        notes, meta = annotations(own), own["metadata"]
        made = cls(
            api=api,
            cache=cache,
            own=own,
            folder=folder,
            spec=spec_of(notes),
            settings=settings_of(notes),
            template=template_of(notes),
            files=DriverFiles(folder),
            keeper=Keeper(api=api, labels=driver_labels(meta["name"], _deployment(own))),
        )
        now = time.time()
        made.workers = KubeWorkers(
            job_id=meta["name"],
            namespace=meta["namespace"],
            driver_uid=meta["uid"],
            api=api,
            cache=cache,
            folder=folder,
            make_gang=made._gang,
        )
        fresh = notes.get(FRESH) == "true"
        told = or_else(state_of, notes, DriverState())
        state = made.files.begin(made.spec, told, fresh=fresh, now_unix_s=now)
        waiting = Allocation(decision=state.acted_decision, placement=state.placement)
        made.given = or_else(allocation_of, notes, waiting)
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
            message=f"submission {or_else(try_of, notes, 1)}{', from nothing' if fresh else ''}",
        )
        append_line(folder.driver_events, submitted)
        return made

    def turn(self, now_unix_s: float, *, closing: bool) -> bool:
        """One turn; False if there is nothing more to do, the job being over or, ``closing``, parked."""
        self.own = self._look()
        self.keeper.mend(self.own)
        notes = annotations(self.own)
        self.workers.lost_nodes = or_else(lost_of, notes, self.workers.lost_nodes)
        self.workers.tend()
        parks = closing or self.files.clean_up_pending
        if self.files.clean_up_pending and not self.workers.blocked({}) and not self.driver.state.placement:
            self.driver.state = self.files.clean_up(self.driver.state)
            parks = closing
        allocation = self.given = or_else(allocation_of, notes, self.given)
        wanted = replace(allocation, placement={}) if parks else self._effective(allocation, now_unix_s)
        state = self.driver.tick(now_unix_s=now_unix_s, allocation=wanted, stop=or_else(stop_of, notes, None))
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
            run_id=or_else(run_of, annotations(self.own), ""),
            incarnation=self.driver.state.incarnation,
            closing=closing,
        )

    def _look(self) -> dict[str, Any]:
        """The driver's own pod as last heard of; one that has lost its label is not in the cache."""
        meta = self.own["metadata"]
        if meta["name"] in (pods := self.cache.pods()):
            return dict(pods[meta["name"]])
        now_s = time.monotonic()
        if self._looked_s and now_s < self._looked_s + _LOOK_EVERY_S:
            return self.own
        self._looked_s = now_s
        try:
            found = self.api.get(pod_path(meta["namespace"], meta["name"]))
        except KubeError as error:
            logger.warning("The driver's own pod cannot be seen: %s", error)
            return self.own
        return found if found["metadata"]["uid"] == meta["uid"] else self.own

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
        """Write the state into the pod's annotation: on every change that matters, where somebody made it
        unreadable, and once a minute.
        """
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
        notes = annotations(self.own)
        if told is None or not notes.get(STATE) or fault_of(notes, STATE):
            return True
        return said != replace(told, attained_gpu_s=said.attained_gpu_s, counted_unix_s=said.counted_unix_s)

    def _gang(self, start: Start) -> Gang:
        return Gang(
            job_id=self.workers.job_id,
            driver=self.own,
            template=self.template,
            start=start,
            settings=self.settings,
            gpu_type=self.given.gpu_type,
            env=self.spec.env,
            mlflow_run_id=or_else(run_of, annotations(self.own), ""),
        )

    def _closed_too_long(self, closing: bool, now_unix_s: float) -> bool:
        if not closing:
            return False
        if self._close_unix_s is None:
            self._close_unix_s = now_unix_s + self.settings.grace_s + 10
        return now_unix_s > self._close_unix_s


def _deployment(own: dict[str, Any]) -> str:
    """As the job's identity says, since a label is more easily lost."""
    identity = or_else(identity_of, annotations(own), None)
    return identity.deployment if identity else labels(own).get(DEPLOYMENT, "")
