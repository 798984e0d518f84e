"""The one module that acts: it carries a plan out, and looks again before each change.

Releases come first; then it waits for their GPUs, and changes that need them follow as these come free. A
change whose GPUs are still in use after that waits for the next cycle. A GPU counts as in use while a
worker holds it or an allocation gives it, so none is ever given to two jobs.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from pydantic.dataclasses import dataclass

from pollux.cluster.base import Cluster, ClusterView
from pollux.errors import ClusterUnavailable, Conflict, Refused, UnknownJob
from pollux.observe import occupied
from pollux.plan import Action
from pollux.record import reason_in_short
from pollux_agent.protocol import DOCUMENT_CONFIG, Allocation, Placement

Outcome = Literal["done", "waits", "vacated", "conflict", "refused", "gone", "unavailable", "shadow"]
"""done: patched; waits: its GPUs are in use; vacated: stopped so that others can move, to move itself next
cycle; conflict: a newer decision was there first; gone: no such job any more; unavailable: the cluster
stopped answering, or this cycle's lease ran out; shadow: not tried."""

_POLL_S = 0.2


@dataclass(frozen=True, slots=True, kw_only=True, config=DOCUMENT_CONFIG)
class ActionOutcome:
    """What became of one action; ``message`` is for people, empty where there is nothing to add."""

    job_id: str
    outcome: Outcome
    message: str = ""


class Act:
    """Carries out the actions of one decision, once."""

    def __init__(
        self,
        cluster: Cluster,
        actions: Sequence[Action],
        *,
        decision: int,
        still_ours: Callable[[], bool],
    ) -> None:
        self._cluster = cluster
        self._decision = decision
        self._still_ours = still_ours
        self._pending = list(actions)
        self._outcomes: dict[str, ActionOutcome] = {}

    def run(self, wait_s: float) -> tuple[ActionOutcome, ...]:
        """Act for at most about ``wait_s``; one outcome per action that changes something."""
        wanted = [action.job_id for action in self._pending]
        try:
            self._run(wait_s)
        except ClusterUnavailable as error:
            for action in self._pending:
                self._note(action, "unavailable", reason_in_short(error))
        return tuple(self._outcomes[job_id] for job_id in wanted)

    def shadow(self) -> tuple[ActionOutcome, ...]:
        """What would have been tried."""
        return tuple(
            ActionOutcome(job_id=action.job_id, outcome="shadow", message=action.reason)
            for action in self._pending
        )

    def _run(self, wait_s: float) -> None:
        until_s = time.monotonic() + wait_s
        while self._pending:
            view = self._cluster.observe()
            while self._pass(view) or self._vacate(view):
                view = self._cluster.observe()
            if not self._pending or time.monotonic() >= until_s:
                break
            time.sleep(min(_POLL_S, wait_s))
        for action in self._pending:
            self._note(action, "waits", _waiting_for(action, view))

    def _pass(self, view: ClusterView) -> bool:
        """Patch the first action that may be; whether there was one."""
        for action in self._pending:
            if _fits(action, view, held=True):
                self._pending.remove(action)
                self._patch(action, action.after, action.reason, "done", view)
                return True
        return False

    def _vacate(self, view: ClusterView) -> bool:
        """Where jobs wait for each other's GPUs for ever, stop the first that moves; whether one was."""
        if any(_fits(action, view, held=False) for action in self._pending):
            return False
        moving = next((action for action in self._pending if action.before), None)
        if moving is None:
            return False
        self._pending.remove(moving)
        reason = f"{moving.reason}; it stops first, since its new GPUs are in use"
        self._patch(moving, {}, reason, "vacated", view)
        return True

    def _patch(
        self, action: Action, placement: Placement, reason: str, outcome: Outcome, view: ClusterView
    ) -> None:
        if not self._still_ours():
            self._note(action, "unavailable", "this cycle took longer than its lease")
            return
        try:
            self._cluster.patch_allocation(
                action.job_id,
                expected=action.expected,
                allocation=Allocation(
                    decision=self._decision,
                    placement=placement,
                    gpu_type=next((node.gpu_type for node in view.nodes if node.name in placement), ""),
                    reason=reason,
                ),
            )
        except Conflict as error:
            self._note(action, "conflict", reason_in_short(error))
        except Refused as error:
            self._note(action, "refused", reason_in_short(error))
        except UnknownJob as error:
            self._note(action, "gone", reason_in_short(error))
        except ClusterUnavailable:
            self._pending.insert(0, action)
            raise
        else:
            self._note(action, outcome)

    def _note(self, action: Action, outcome: Outcome, message: str = "") -> None:
        self._outcomes[action.job_id] = ActionOutcome(job_id=action.job_id, outcome=outcome, message=message)


def _in_use(view: ClusterView, name: str, *, but: str, held: bool) -> Mapping[str, int]:
    """GPUs in use on a node per job other than ``but``; without ``held`` only what allocations give."""
    users = {}
    for job in view.jobs:
        placement = occupied(job) if held or job.status.stop else job.allocation.placement
        if job.job_id != but and placement.get(name):
            users[job.job_id] = placement[name]
    return users


def _missing(action: Action, view: ClusterView, *, held: bool) -> list[str]:
    """The nodes on which the action's new GPUs are in use."""
    sizes = {node.name: node.gpus for node in view.nodes}
    return [
        name
        for name, gpus in action.after.items()
        if gpus > action.before.get(name, 0)
        and gpus + sum(_in_use(view, name, but=action.job_id, held=held).values()) > sizes.get(name, 0)
    ]


def _fits(action: Action, view: ClusterView, *, held: bool) -> bool:
    return not _missing(action, view, held=held)


def _waiting_for(action: Action, view: ClusterView) -> str:
    users = [
        f"{name} ({', '.join(_in_use(view, name, but=action.job_id, held=True)) or 'gone'})"
        for name in _missing(action, view, held=True)
    ]
    return f"its GPUs are still in use on {'; '.join(users)}; next cycle"
