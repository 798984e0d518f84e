"""The driver's own files in the job's folder: its state, by which the next driver of the job goes on."""

import logging
import shutil
from dataclasses import dataclass, field, replace

from pollux_agent.driver.machine import FINAL_PHASES
from pollux_agent.driver.state import DriverState
from pollux_agent.errors import DocumentError
from pollux_agent.protocol import JobFolder, JobSpec, decode, encode
from pollux_agent.records import write_atomic

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class DriverFiles:
    """``driver.json`` and the spec as the workers read it."""

    folder: JobFolder
    clean_up_pending: bool = field(default=False, init=False)

    def begin(
        self, spec: JobSpec, told: DriverState | None, *, fresh: bool, now_unix_s: float
    ) -> DriverState:
        """The state to go on from: the newest of the file's and of ``told``, opened again.

        With ``fresh`` the checkpoints go before the first start, once no earlier workers are left.
        """
        if self._is_extended_by(spec):
            self.folder.complete.unlink(missing_ok=True)
        write_atomic(self.folder.spec, encode(spec).encode())
        known = [state for state in (self._load(), told) if state is not None]
        state = max(known, key=lambda state: (state.incarnation, state.acted_decision), default=DriverState())
        state = replace(state, outcome=None, final=False, fruitless_starts=0, retry_unix_s=0.0)
        if state.phase in FINAL_PHASES or not state.incarnation:
            state = replace(state, phase="waiting", since_unix_s=now_unix_s, message="waits for GPUs")
        self.clean_up_pending = fresh
        self.save(state)
        return state

    def save(self, state: DriverState) -> None:
        write_atomic(self.folder.root / "driver.json", encode(state).encode())

    def clean_up(self, state: DriverState) -> DriverState:
        """Start from nothing: no checkpoint, no completion marker, no memory of what was logged."""
        self.folder.complete.unlink(missing_ok=True)
        self.folder.logged.unlink(missing_ok=True)
        shutil.rmtree(self.folder.checkpoints, ignore_errors=True)
        self.clean_up_pending = False
        state = replace(state, best_step=0, failure=None)
        self.save(state)
        return state

    def _is_extended_by(self, spec: JobSpec) -> bool:
        try:
            return spec.extends(decode(JobSpec, self.folder.spec.read_bytes()))
        except (OSError, DocumentError):
            return False

    def _load(self) -> DriverState | None:
        try:
            return decode(DriverState, (self.folder.root / "driver.json").read_bytes())
        except FileNotFoundError:
            return None
        except (OSError, DocumentError) as error:
            logger.error("The state of the driver before cannot be read and is left out: %s", error)
            return None
