"""One job's workers as pods: one a node, owned by the driver's pod, all of them or none."""

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pollux_agent.driver.kube.api import KubeApi, KubeError, pod_path
from pollux_agent.driver.kube.cache import PodCache
from pollux_agent.driver.kube.documents import (
    JOB,
    ROLE,
    WORKER_ROLE,
    has_ended,
    is_terminal,
    labels,
    node_and_resource,
)
from pollux_agent.driver.kube.logs import LogFollower
from pollux_agent.driver.kube.manifest import Gang, worker_pod
from pollux_agent.driver.kube.trouble import (
    Trouble,
    end_note,
    is_starting,
    last_words,
    makes_room,
    pod_trouble,
    was_taken,
)
from pollux_agent.driver.machine import Start
from pollux_agent.errors import DocumentError
from pollux_agent.protocol import JobFolder, Placement

logger = logging.getLogger(__name__)

Json = Mapping[str, Any]

_KILL_GRACE_S = 1.0
_GRACE_MARGIN_S = 5.0
_LOG_WAIT_S = 5.0
_RETRY_S = 2.0
_START_S = 10.0
"""A pod that starts is not deleted before: the kubelet of Kubernetes 1.20 may let it run on for a minute."""


@dataclass(slots=True)
class _Worker:
    """One worker pod, from its creation on; ``main`` is the container that trains."""

    name: str
    uid: str
    main: str
    created_s: float
    log: LogFollower
    noted: bool = False
    taken: bool = False
    asked_grace_s: float | None = None
    asked_s: float = 0.0
    read_out: bool = False


@dataclass(slots=True, kw_only=True)
class KubeWorkers:
    """Implements the driver's ``Workers``. Not for several threads.

    ``make_gang`` gives what the pods of a start share, as the job is at that moment; ``lost_nodes`` are those
    that the scheduler found lost: pods on them are forgotten once they were asked to end.
    """

    job_id: str
    namespace: str
    driver_uid: str
    api: KubeApi
    cache: PodCache
    folder: JobFolder
    make_gang: Callable[[Start], Gang]
    lost_nodes: frozenset[str] = frozenset()
    _gang: Gang | None = field(default=None, init=False)
    _workers: dict[int, _Worker] = field(default_factory=dict, init=False)
    _ending: bool = field(default=False, init=False)
    _grace_s: float = field(default=_KILL_GRACE_S, init=False)
    _refusal: Trouble | None = field(default=None, init=False)
    _next_try_s: float = field(default=0.0, init=False)
    _started_s: float = field(default=0.0, init=False)
    _look_again_s: float = field(default=0.0, init=False)

    # --- the driver's Workers

    def blocked(self, placement: Placement) -> str:
        """Waits for pods of earlier incarnations, of this driver or of one before it, to be gone."""
        left = [pod["metadata"]["name"] for pod in self._leftovers()]
        return f"{', '.join(sorted(left))} of an earlier start still end" if left else ""

    def start(self, start: Start) -> None:
        self._gang = self.make_gang(start)
        self._workers = {}
        self._ending, self._refusal = False, None
        self._next_try_s, self._look_again_s, self._started_s = 0.0, 0.0, time.monotonic()
        self.tend()

    def signal(self) -> None:
        """Delete every pod: the kubelet asks its launcher to checkpoint and end."""
        self._end(self._gang.settings.grace_s + _GRACE_MARGIN_S if self._gang else _KILL_GRACE_S)

    def kill(self) -> None:
        self._end(_KILL_GRACE_S)

    def alive(self) -> Mapping[str, bool] | None:
        if self._gang is None:
            return None
        if not self._ending and (self._refusal is not None or 0 not in self._workers):
            return dict.fromkeys(self._gang.keys, True)  # the trouble is told by trouble(), not by absence
        to_come = not self._ending and self._is_alive(0)
        return {
            key: self._is_alive(rank) if rank in self._workers else to_come
            for rank, key in enumerate(self._gang.keys)
        }

    def taken(self) -> bool:
        """A pod that vanished without being asked to, or ended for a reason of its node, was taken."""
        for worker in self._workers.values():
            if worker.asked_grace_s is not None:
                continue
            pod = self.cache.pods().get(worker.name)
            gone = self.cache.is_gone(worker.name, worker.uid, worker.created_s)
            worker.taken = worker.taken or gone or (pod is not None and was_taken(pod))
        return any(worker.taken for worker in self._workers.values())

    def read_out(self) -> None:
        """The rest of what the pods printed; where that cannot be had, what their status keeps of it."""
        for worker in self._workers.values():
            if worker.read_out:
                continue
            worker.read_out = True
            worker.log.close(_LOG_WAIT_S)
            pod = self.cache.pods().get(worker.name)
            if pod is not None and worker.log.is_empty and (words := last_words(pod)):
                worker.log.note(f"the last that the pod kept: {words}")

    def release(self) -> None:
        self.read_out()
        for worker in self._workers.values():
            self._delete(worker.name, worker.uid, None)
        self._gang = None
        self._workers = {}

    # --- more

    def tend(self) -> None:
        """Do what is due: create pods that can be by now, end leftovers, forget pods on lost nodes."""
        self._create_due()
        self.taken()
        for worker in self._workers.values():
            self._note_end(worker)
            if self._ending:
                self._press(worker)
        pods = self.cache.pods()
        ending = [worker.name for worker in self._workers.values() if self._ending]
        for left in self._leftovers():
            ending.append(left["metadata"]["name"])
            if not left["metadata"].get("deletionTimestamp"):
                self._delete(left["metadata"]["name"], left["metadata"]["uid"], None)
        for name in ending:
            pod = pods.get(name)
            if pod is not None and pod.get("spec", {}).get("nodeName") in self.lost_nodes:
                logger.warning("Pod %s is on a lost node: it is forgotten, its writes are fenced off", name)
                self._delete(name, pod["metadata"]["uid"], 0)

    def trouble(self) -> Trouble | None:
        """Why this gang cannot come to work as a whole, once it has had its time; None while it may.

        GPUs that another pod is about to give back are waited for.
        """
        if self._gang is None or self._ending:
            return None
        if self._refusal is not None:
            return self._refusal
        if time.monotonic() < self._look_again_s:
            return None
        pods = self.cache.pods()
        settings = self._gang.settings
        waited_s = self._waited_s
        for rank, worker in self._workers.items():
            pod = pods.get(worker.name)
            if pod is None:
                continue
            found = pod_trouble(pod, settings.place_wait_s, waited_s, pull_wait_s=settings.pull_wait_s)
            waits = found and found.homeless and waited_s < settings.pull_wait_s
            if found and not (waits and self._waits(pod, self._gang.keys[rank])):
                return found
        return None

    def _waits(self, pod: Json, key: str) -> bool:
        """Whether a pod that finds no place on its node will have one, as far as this namespace tells."""
        resources = self._gang.settings.gpu_resources if self._gang else ()
        node, _ = node_and_resource(key, resources)
        try:
            pods = list(self.api.items(pod_path(self.namespace), fieldSelector=f"spec.nodeName={node}"))
        except KubeError as error:
            logger.warning("It cannot be seen what ends on %s: %s", node, error)
            pods = []
        if leaving := makes_room(pods, resources, self.api.server_unix_s):
            self._look_again_s = time.monotonic() + _RETRY_S
            logger.info("%s waits for the GPUs of %s, which ends", pod["metadata"]["name"], leaving)
        return bool(leaving)

    @property
    def _waited_s(self) -> float:
        """Since the start of the gang."""
        return time.monotonic() - self._started_s

    def _create_due(self) -> None:
        """Rank 0 first; the others once its address is known."""
        gang = self._gang
        if gang is None or self._ending or self._refusal is not None or time.monotonic() < self._next_try_s:
            return
        if 0 not in self._workers:
            self._create(gang, 0, "")
        address = self._address()
        if address:
            for rank in range(1, len(gang.keys)):
                if rank not in self._workers and self._refusal is None:
                    self._create(gang, rank, address)

    def _create(self, gang: Gang, rank: int, address: str) -> None:
        name = gang.pod_name(rank)
        created_s = time.monotonic()
        try:
            wanted = worker_pod(gang, rank, address)
            pod = self.api.create(pod_path(self.namespace), wanted)
        except DocumentError as error:
            self._refusal = Trouble(str(error), fatal=True)
        except KubeError as error:
            if error.status == 409:
                self._make_way(name)
            elif error.unavailable or (_over_quota(error) and self._waited_s < gang.settings.place_wait_s):
                logger.warning("%s could not be created: %s", name, error)
                self._next_try_s = time.monotonic() + _RETRY_S
            else:
                self._refusal = Trouble(f"{name} is refused: {error}", fatal=error.status in (400, 422))
        else:
            key, main = gang.keys[rank], str(wanted["spec"]["containers"][0].get("name", ""))
            log = LogFollower(
                self.api,
                self.namespace,
                name,
                self.folder.log(gang.start.incarnation, key),
                f"{gang.start.incarnation}/{key}",
                container=main,
            )
            log.start()
            self._workers[rank] = _Worker(name, pod["metadata"]["uid"], main, created_s, log)

    def _make_way(self, name: str) -> None:
        """A pod of that name is there. One of ours, from a create whose answer was lost or from a driver
        before us, is deleted; anybody else's stays, and the gang gives way to one with other names.
        """
        self._next_try_s = time.monotonic() + _RETRY_S
        try:
            pod = self.api.get(pod_path(self.namespace, name))
        except KubeError as error:
            if error.status != 404:
                logger.warning("%s is in the way: %s", name, error)
            return
        found = labels(pod)
        if (found.get(JOB), found.get(ROLE)) == (self.job_id, WORKER_ROLE):
            self._delete(name, pod["metadata"]["uid"], _KILL_GRACE_S)
        else:
            self._refusal = Trouble(f"a pod {name} is in the way that is none of this job's; remove it")

    def _address(self) -> str:
        worker = self._workers.get(0)
        pod = self.cache.pods().get(worker.name) if worker else None
        return str((pod or {}).get("status", {}).get("podIP") or "")

    def _is_alive(self, rank: int) -> bool:
        worker = self._workers.get(rank)
        if worker is None:
            return False
        pod = self.cache.pods().get(worker.name)
        if pod is None or pod["metadata"]["uid"] != worker.uid:
            return not self.cache.is_gone(worker.name, worker.uid, worker.created_s)
        return not (is_terminal(pod) or has_ended(pod, worker.main))

    def _end(self, grace_s: float) -> None:
        self._ending = True
        self._grace_s = grace_s
        for worker in self._workers.values():
            self._press(worker)

    def _press(self, worker: _Worker) -> None:
        """Delete a pod with the present grace, once it has started; again while that is not taken in."""
        now_s = time.monotonic()
        pod = self.cache.pods().get(worker.name)
        if pod is not None and (is_terminal(pod) or pod["metadata"]["uid"] != worker.uid):
            return
        if (pod is None or is_starting(pod)) and now_s < worker.created_s + _START_S:
            return  # tend() comes back to it
        told = pod is None or bool(pod["metadata"].get("deletionTimestamp"))
        if worker.asked_grace_s == self._grace_s and (told or now_s < worker.asked_s + _RETRY_S):
            return
        worker.asked_grace_s, worker.asked_s = self._grace_s, now_s
        self._delete(worker.name, worker.uid, self._grace_s)

    def _delete(self, name: str, uid: str, grace_s: float | None) -> None:
        try:
            self.api.delete(pod_path(self.namespace, name), grace_s=grace_s, uid=uid)
        except KubeError as error:
            logger.warning("%s could not be deleted: %s", name, error)

    def _note_end(self, worker: _Worker) -> None:
        pod = self.cache.pods().get(worker.name)
        if pod is None or worker.noted:
            return
        if note := end_note(pod):
            worker.noted = True
            worker.log.note(note)

    def _leftovers(self) -> Iterable[Json]:
        """Worker pods of this job that are none of the present gang's and still hold something."""
        ours = {worker.name for worker in self._workers.values()}
        for name, pod in self.cache.pods().items():
            if labels(pod).get(ROLE) == WORKER_ROLE and name not in ours and not is_terminal(pod):
                yield pod


def _over_quota(error: KubeError) -> bool:
    """Whether a quota is used up; its books lag behind pods that have just ended."""
    return error.status == 403 and "exceeded quota" in str(error)
