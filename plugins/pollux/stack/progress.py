"""The view of a start: which services are ready and which are still awaited."""

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.status import Status

from pollux.stack.record import StackRecord


class StartProgress:
    """Called with each state of the start; prints a line when a service is ready."""

    def __init__(self, *, enabled: bool = True) -> None:
        self._console = Console(stderr=True, quiet=not enabled)
        self._status: Status = self._console.status("starting the stack")
        self._seen: set[str] = set()

    def __enter__(self) -> Self:
        self._status.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._status.stop()

    def __call__(self, record: StackRecord) -> None:
        ready = {name for name, part in record.components.items() if part.ready}
        for name in sorted(ready - self._seen):
            self._console.print(f"  {name} is ready", highlight=False)
        self._seen |= ready
        waiting = [name for name in record.components if name not in ready]
        self._status.update(f"waiting for {', '.join(waiting)}" if waiting else "ready")
