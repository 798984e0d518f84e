"""What studies computed, kept in a folder so that a report which was interrupted goes on where it stopped."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from pollux.simulate.files import write_whole
from pollux_agent.errors import DocumentError
from pollux_agent.protocol import decode, encode

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Documents:
    """The documents in ``folder``; ``warn`` is told of those that are no such document."""

    folder: Path
    warn: Callable[[str], None]

    def get(self, name: str, kind: type[T], compute: Callable[[], T]) -> T:
        """The document of class ``kind`` that is kept by this name, else a new one, which is kept.

        The name says all that it depends on besides the traces. Raises OSError, and what ``compute`` raises.
        """
        path = self.folder / f"study-{name}.json"
        if path.exists():
            try:
                return decode(kind, path.read_bytes())
            except DocumentError as error:
                self.warn(f"{path}: is no study that was kept, and is computed again: {str(error)[:300]}")
        document = compute()
        write_whole(path, encode(document) + "\n")
        return document
