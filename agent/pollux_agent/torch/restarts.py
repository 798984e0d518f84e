"""What a restart costs, phase by phase, over the two incarnations that it lies between."""

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from pollux_agent.records import write_atomic
from pollux_agent.settings import WorkerSettings

PHASES = ("wait", "save", "stop", "start", "load", "first_step")
"""From the signal to the step boundary, the checkpoint, to the launcher's start, to the making of the job
object, to the end of the restore, to the end of the first step."""


@dataclass(slots=True)
class Restart:
    """Marks the moments of rank 0's stop and start; ``phases_s`` is complete once the first step is made."""

    settings: WorkerSettings | None
    phases_s: dict[str, float] = field(default_factory=dict)
    _loading_unix_s: float = field(default_factory=time.time)
    _loaded_unix_s: float | None = None

    def loaded(self) -> None:
        """The restore is done."""
        self._loaded_unix_s = time.time()

    def first_step(self) -> None:
        """The first step of a restarted job is made: add up the phases that both sides know of."""
        settings = self.settings
        if settings is None or self._loaded_unix_s is None:
            return
        stop = _read_stop(settings)
        moments = (
            settings.signal_unix_s,
            stop.get("saving_unix_s"),
            stop.get("saved_unix_s"),
            settings.launched_unix_s,
            self._loading_unix_s,
            self._loaded_unix_s,
            time.time(),
        )
        for name, begin, end in zip(PHASES, moments[:-1], moments[1:], strict=True):
            if begin is not None and end is not None:
                self.phases_s[name] = max(0.0, end - begin)

    def stopped(self, *, saving_unix_s: float, saved_unix_s: float) -> None:
        """Leave word for the next incarnation of the save made on request.

        Raises OSError where the disk refuses.
        """
        if self.settings is not None:
            word = {
                "incarnation": self.settings.incarnation,
                "saving_unix_s": saving_unix_s,
                "saved_unix_s": saved_unix_s,
            }
            write_atomic(self.settings.folder.last_stop, json.dumps(word).encode())


def _read_stop(settings: WorkerSettings) -> Mapping[str, float]:
    """What the incarnation before left word of; empty if it was killed."""
    try:
        word = json.loads(settings.folder.last_stop.read_text())
        incarnation = int(word["incarnation"])
        moments = {name: float(word[name]) for name in ("saving_unix_s", "saved_unix_s")}
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    return moments if incarnation == settings.incarnation - 1 else {}
