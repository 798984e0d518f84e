"""What the workers of an incarnation left in the job's folder. It is their data: it may be cut or wrong."""

from collections.abc import Iterable
from pathlib import Path

from pollux_agent.errors import DocumentError
from pollux_agent.protocol import Event, JobFolder, Outcome, Unsaved, decode
from pollux_agent.records import open_regular

_MAX_OUTCOME_BYTES = 1_000_000
_EVENT_TAIL_BYTES = 4_096
_LOG_TAIL_BYTES = 4_000
_MAX_WORDS = 500


def outcomes(folder: JobFolder, incarnation: int) -> tuple[Outcome, ...]:
    """The readable outcomes of an incarnation's ranks, in no particular order."""
    found = map(_outcome, folder.outcomes.glob(f"{incarnation}-*.json"))
    return tuple(outcome for outcome in found if outcome and outcome.incarnation == incarnation)


def completion(folder: JobFolder) -> Outcome | None:
    """The completion marker, None unless it says that the training is done."""
    marker = _outcome(folder.complete)
    return marker if marker is not None and marker.kind == "done" else None


def highest_step(folder: JobFolder, incarnation: int) -> int | None:
    """The step that rank 0 of an incarnation reached, None if it has taken none."""
    steps = []
    for line in tail(folder.events(incarnation, 0), _EVENT_TAIL_BYTES).splitlines():
        try:
            event = decode(Event, line)
        except DocumentError:
            continue
        if event.event == "step":
            steps.append(event.step)
    return max(steps, default=None)


def last_incarnation(folder: JobFolder) -> int:
    """The newest incarnation that left a log, an outcome or events; 0 if none did."""
    names = [path.stem for path in (*folder.logs.glob("*-*.log"), *folder.outcomes.glob("*-*.json"))]
    names += [path.stem.removeprefix("events-") for path in folder.root.glob("events-*-*.jsonl")]
    numbers = [name.partition("-")[0] for name in names]
    return max((int(number) for number in numbers if number.isdecimal()), default=0)


def unsaved(folder: JobFolder, incarnation: int) -> str:
    """Why an incarnation cannot write checkpoints now, empty while it can."""
    try:
        with open_regular(folder.unsaved) as file:
            word = decode(Unsaved, file.read(_EVENT_TAIL_BYTES))
    except (OSError, DocumentError):
        return ""
    return word.message[:_MAX_WORDS] if word.incarnation == incarnation else ""


def log_tail(folder: JobFolder, incarnation: int, nodes: Iterable[str]) -> str:
    """The last lines that an incarnation's workers printed, node by node; empty if none printed any."""
    tails = {node: tail(folder.log(incarnation, node), _LOG_TAIL_BYTES) for node in nodes}
    return "\n".join(f"{node}:\n{text}" for node, text in tails.items() if text.strip())


def _outcome(path: Path) -> Outcome | None:
    """A readable outcome of a sane size."""
    try:
        with open_regular(path) as file:
            data = file.read(_MAX_OUTCOME_BYTES + 1)
        return decode(Outcome, data) if len(data) <= _MAX_OUTCOME_BYTES else None
    except (OSError, DocumentError):
        return None


def tail(path: Path, num_bytes: int) -> str:
    """The end of a text file, empty if there is none."""
    try:
        with open_regular(path) as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - num_bytes))
            return file.read().decode(errors="replace")
    except OSError:
        return ""
