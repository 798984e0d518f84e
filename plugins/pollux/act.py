"""The one module that acts: it carries a plan out, and looks again before each change.

Releases come first; then it waits for their GPUs, and changes that need them follow as these come free. A
change whose GPUs are still in use after that waits for the next cycle. A GPU counts as in use while a
worker holds it or an allocation gives it, so none is ever given to two jobs.
"""

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Literal

from pydantic.dataclasses import dataclass

from pollux.cluster.base import Cluster, ClusterView
from pollux.errors import ClusterUnavailable, Conflict, Refused, UnknownJob
from pollux.observe import occupied
from pollux.plan import Action
from pollux.record import reason_in_short
from pollux_agent.protocol import DOCUMENT_CONFIG, Allocation

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
        self._away: ClusterUnavailable | None = None

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
            use = _Use(self._cluster.observe())
            if self._pass(use) or self._vacate(use):
                continue
            if time.monotonic() >= until_s:
                break
            time.sleep(min(_POLL_S, wait_s))
        for action in self._pending:
            self._note(action, "waits", _waiting_for(action, use))

    def _pass(self, use: "_Use") -> bool:
        """Patch all actions that may be; whether there were any."""
        batch = _that_fit(self._pending, use)
        self._patch(batch, "done", use.view)
        return bool(batch)

    def _vacate(self, use: "_Use") -> bool:
        """Where jobs wait for each other's GPUs for ever, stop the first that moves; whether one was."""
        if any(use.fits(action, held=False) for action in self._pending):
            return False
        moving = next((action for action in self._pending if action.before), None)
        if moving is None:
            return False
        self._patch([moving], "vacated", use.view)
        return True

    def _patch(self, actions: Sequence[Action], outcome: Outcome, view: ClusterView) -> None:
        """Patch their jobs, several at once where the cluster can; raises ClusterUnavailable as soon as one
        gets no answer, and what was not patched by then stays.
        """
        types = {node.name: node.gpu_type for node in view.nodes}
        with _mapper(min(self._cluster.patches_at_once, len(actions))) as at_once:
            answers = at_once(partial(self._try, outcome, types), actions)
        for action, answer in zip(actions, answers, strict=True):
            if answer is not None:
                self._pending.remove(action)
                self._outcomes[action.job_id] = answer
        if self._away is not None:
            raise self._away

    def _try(self, outcome: Outcome, types: Mapping[str, str], action: Action) -> ActionOutcome | None:
        """What became of it; None if the cluster does not answer."""
        if self._away is not None:
            return None
        answer = partial(ActionOutcome, job_id=action.job_id)
        if not self._still_ours():
            return answer(outcome="unavailable", message="this cycle took longer than its lease")
        placement, reason = action.after, action.reason
        if outcome == "vacated":
            placement, reason = {}, f"{reason}; it stops first, since its new GPUs are in use"
        try:
            self._cluster.patch_allocation(
                action.job_id,
                expected=action.expected,
                allocation=Allocation(
                    decision=self._decision,
                    placement=placement,
                    gpu_type=next((types[name] for name in placement if name in types), ""),
                    reason=reason,
                ),
            )
        except Conflict as error:
            return answer(outcome="conflict", message=reason_in_short(error))
        except Refused as error:
            return answer(outcome="refused", message=reason_in_short(error))
        except UnknownJob as error:
            return answer(outcome="gone", message=reason_in_short(error))
        except ClusterUnavailable as error:
            self._away = error
            return None
        return answer(outcome=outcome)

    def _note(self, action: Action, outcome: Outcome, message: str = "") -> None:
        self._outcomes[action.job_id] = ActionOutcome(job_id=action.job_id, outcome=outcome, message=message)


class _Use:
    """Which job uses how many GPUs of each node in a view: those held or given, or only those given."""

    def __init__(self, view: ClusterView) -> None:
        self.view = view
        self._sizes = {node.name: node.gpus for node in view.nodes}
        self._users: Mapping[bool, dict[str, dict[str, int]]] = {True: {}, False: {}}
        for job in view.jobs:
            given = occupied(job)
            for held, placement in (
                (True, given),
                (False, given if job.status.stop else job.allocation.placement),
            ):
                for name, gpus in placement.items():
                    if gpus:
                        self._users[held].setdefault(name, {})[job.job_id] = gpus

    def users(self, name: str, *, but: str, held: bool = True) -> Mapping[str, int]:
        """GPUs of a node by job, but one."""
        found = self._users[held].get(name, {})
        return {job_id: gpus for job_id, gpus in found.items() if job_id != but}

    def missing(
        self, action: Action, *, held: bool = True, taken: Mapping[str, int] | None = None
    ) -> list[str]:
        """The nodes on which the action's new GPUs are in use, or were ``taken`` since the view."""
        since = taken or {}
        return [
            name
            for name, gpus in action.after.items()
            if gpus > action.before.get(name, 0)
            and gpus + sum(self.users(name, but=action.job_id, held=held).values()) + since.get(name, 0)
            > self._sizes.get(name, 0)
        ]

    def fits(self, action: Action, *, held: bool = True) -> bool:
        return not self.missing(action, held=held)


def _that_fit(actions: Collection[Action], use: _Use) -> list[Action]:
    """Those that may be carried out together: what one takes the next cannot have, and what one is to give
    back is not free yet.
    """
    found: list[Action] = []
    taken: Counter[str] = Counter()
    for action in actions:
        if not use.missing(action, taken=taken):
            found.append(action)
            taken.update(
                {name: max(0, gpus - action.before.get(name, 0)) for name, gpus in action.after.items()}
            )
    return found


@contextmanager
def _mapper(num_threads: int) -> Iterator[Callable[..., Iterator[ActionOutcome | None]]]:
    """``map``, over that many threads where they are more than one."""
    if num_threads <= 1:
        yield map
        return
    with ThreadPoolExecutor(num_threads, "pollux-patch") as pool:
        yield pool.map


def _waiting_for(action: Action, use: _Use) -> str:
    users = [
        f"{name} ({', '.join(use.users(name, but=action.job_id)) or 'gone'})" for name in use.missing(action)
    ]
    return f"its GPUs are still in use on {'; '.join(users)}; next cycle"
