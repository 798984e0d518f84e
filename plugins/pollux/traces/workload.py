"""A workload: which applications were submitted when, and what their users asked for."""

from dataclasses import dataclass, replace
from pathlib import Path

from pollux.errors import TraceError
from pollux.traces.tables import read_table

_MAX_S = 10 * 365 * 86400.0
_MOST = 2**31


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One submission. ``num_gpus`` and ``batch_size`` are what the user asks for."""

    name: str
    submitted_s: float
    application: str
    num_gpus: int
    batch_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """The submissions of one file, in the order of the file; ``set`` is the folder's name."""

    name: str
    set: str
    requests: tuple[Request, ...]

    def where(self, request: Request) -> str:
        """The words that an error about one of the submissions begins with."""
        return f"workload {self.set}/{self.name}, job {request.name!r} ({request.application})"

    def first(self, jobs: int) -> "Workload":
        """The workload of the ``jobs`` that are submitted first, in the order of their submission."""
        early = sorted(self.requests, key=lambda request: request.submitted_s)[:jobs]
        return replace(self, requests=tuple(early))


def read_workload(path: Path) -> Workload:
    """Read a workload file; raises TraceError naming the line, the field and the fix."""
    table = read_table(path, texts=["name", "application"], numbers=["time", "num_replicas", "batch_size"])
    requests: dict[str, Request] = {}
    for row, name, application, time, gpus, batch in table.itertuples():
        line = row + 2
        if name in requests:
            raise TraceError(f"{path}, line {line}: name {name!r} is there twice; give each job its own name")
        if time > _MAX_S:
            raise TraceError(f"{path}, line {line}: time is {time:g} s; it must be under {_MAX_S:g} s")
        for field, value in (("num_replicas", gpus), ("batch_size", batch)):
            if value < 1 or value != int(value) or value > _MOST:
                raise TraceError(
                    f"{path}, line {line}: {field} is {value:.15g}; "
                    f"it must be a whole number from 1 to {_MOST}"
                )
        requests[name] = Request(
            name=name, submitted_s=time, application=application, num_gpus=int(gpus), batch_size=int(batch)
        )
    return Workload(name=path.stem, set=path.resolve().parent.name, requests=tuple(requests.values()))
