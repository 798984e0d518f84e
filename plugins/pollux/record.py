"""Every decision on disk: one folder a decision, from which anyone can replay it.

::

    decisions/<number>/
        snapshot.json   the Snapshot, written before anything is decided
        decision.json   the Decision, and plan.json, its ordered actions: written before anything is done
        result.json     what became of each action; seconds that no seed fixes stand apart in it

All folders are kept unless a number to keep is set.
"""

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pollux.errors import PolluxError, SnapshotError
from pollux.plan import Action
from pollux.snapshot import Decision
from pollux_agent.errors import DocumentError
from pollux_agent.protocol import decode, read_decision, to_plain
from pollux_agent.records import write_atomic


class Records:
    """The folder of all decisions; made with the first one."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def save(self, decision: int, name: str, text: str) -> None:
        """Write a file of a decision, whole or not at all; raises SnapshotError where that is impossible."""
        path = self._root / str(decision) / name
        try:
            write_atomic(path, text.encode())
        except OSError as error:
            raise SnapshotError(f"{path} cannot be written: {error}; free the disk or its rights") from error

    def newest_decision(self, below: int | None = None) -> Decision | None:
        """The newest decision, of those under ``below`` if given; None if there is none, or none to read."""
        try:
            return self.read_newest_decision(below)
        except (OSError, DocumentError):
            return None

    def read_newest_decision(self, below: int | None = None) -> Decision | None:
        """The same, but raises OSError or DocumentError if it cannot be read."""
        for number in reversed(self._numbers()):
            path = self._root / str(number) / "decision.json"
            if (below is None or number < below) and path.exists():
                return decode(Decision, path.read_bytes())
        return None

    def last_number(self) -> int:
        """The largest number of a decision recorded here, 0 before the first."""
        return max(self._numbers(), default=0)

    def newest_result(self) -> Path | None:
        """The folder of the newest decision whose cycle ran to its end, None before the first."""
        for number in reversed(self._numbers()):
            folder = self._root / str(number)
            if (folder / "result.json").exists():
                return folder
        return None

    def prune(self, keep: int) -> int:
        """Delete all but the newest ``keep`` decisions; how many went."""
        old = self._numbers()[:-keep]
        for number in old:
            shutil.rmtree(self._root / str(number), ignore_errors=True)
        return len(old)

    def _numbers(self) -> list[int]:
        if not self._root.is_dir():
            return []
        found = (read_decision(path.name) for path in self._root.iterdir())
        return sorted(number for number in found if number is not None)


def to_json(plain: Mapping[str, Any]) -> str:
    """Plain values as JSON for people and programs, the same text for the same values."""
    return json.dumps(plain, sort_keys=True, indent=2, allow_nan=False) + "\n"


def plan_json(decision: int, actions: Sequence[Action]) -> str:
    """A plan as the text of ``plan.json``."""
    return to_json({"schema": 1, "decision": decision, "actions": [to_plain(action) for action in actions]})


def reason_in_short(error: PolluxError) -> str:
    """An error's message, cut to what fits a line of a log or a reason."""
    text = " ".join(str(error).split())
    return text if len(text) <= 300 else text[:297] + "..."
