"""The worker: runs the training script as ``python SCRIPT ARGS...`` would, and records how its rank ended.

Started by the launcher, once a rank: forked by :func:`run_forked`, or as a process of its own with
``python -m pollux_agent.torch.worker SCRIPT ARGS...``.
"""

import io
import multiprocessing
import os
import re
import runpy
import signal
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

import numpy as np
import torch.distributed as dist

from pollux_agent.errors import DocumentError, PolluxAgentError, ScriptError
from pollux_agent.lifeline import die_with_parent, name_process
from pollux_agent.protocol import Outcome
from pollux_agent.protocol.outcome import OutcomeKind
from pollux_agent.records import is_full, write_outcome
from pollux_agent.settings import WorkerSettings, worker_settings

PROCESS_NAME = "pollux-worker"
"""What process lists call a worker."""

_MAX_TRACEBACK_CHARS = 20_000
_MAX_ERROR_CHARS = 1_000
_LOST_CONTACT = (dist.DistBackendError, dist.DistNetworkError, dist.DistStoreError)
_LOST_CONTACT_TEXT = re.compile(
    r"(gloo|nccl).*(connection (closed|reset|refused)|connect|timed out|timeout|broken pipe|remote)",
    re.IGNORECASE | re.DOTALL,
)


def main(arguments: Sequence[str]) -> int:
    """Run the script named first with the arguments that follow; the exit status, 0 unless it failed."""
    settings = worker_settings()
    if settings is None:
        raise DocumentError("POLLUX_JOB_ID: not set; a worker is started by the launcher")
    rank = int(os.environ["RANK"])
    kind: OutcomeKind = "failed"
    try:
        run_script(Path(arguments[0]), arguments[1:])
        error: BaseException = _unfinished()
    except SystemExit as exit_:
        error = _unfinished(exit_)
    except KeyboardInterrupt as stop:
        kind, error = "interrupted", stop
    except BaseException as raised:  # noqa: BLE001 - the outermost edge: whatever ends the script is recorded
        kind, error = ("interrupted" if lost_contact(raised) else "failed"), raised
    if settings.folder.outcome(settings.incarnation, rank).exists():
        return 0
    outcome = _outcome(settings, rank, kind, error)
    write_outcome(settings.folder, outcome)
    print(outcome.traceback, file=sys.stderr, end="", flush=True)  # noqa: T201 - the script's own last words
    return 1


def run_script(script: Path, arguments: Sequence[str]) -> None:
    """Run ``script`` as the main module, with ``sys.argv`` and ``sys.path[0]`` as Python sets them.

    Raises ScriptError if there is no such file, and whatever the script raises.
    """
    if not script.is_file():
        raise ScriptError(f"script: {str(script)!r} is no file; name an existing Python file")
    sys.argv = [str(script), *arguments]
    sys.path[0] = str(script.resolve().parent)
    runpy.run_path(str(script), run_name="__main__")


def lost_contact(error: BaseException) -> bool:
    """Whether a worker ended only because another worker, or the store, went away."""
    return any(
        isinstance(link, _LOST_CONTACT)
        or (isinstance(link, RuntimeError) and _LOST_CONTACT_TEXT.search(str(link)) is not None)
        for link in _chain(error)
    )


def user_frames(trace: TracebackType | None) -> TracebackType | None:
    """The traceback without the frames that run the script, or all of it if the script has no frame in it."""
    ours = (__file__, runpy.__file__)
    rest = trace
    while rest is not None and (
        rest.tb_frame.f_code.co_filename in ours or "runpy" in rest.tb_frame.f_code.co_filename
    ):
        rest = rest.tb_next
    return rest


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__


def _unfinished(exit_: SystemExit | None = None) -> ScriptError:
    """What is wrong when a script comes to its end and its rank has left no outcome."""
    if exit_ is not None and exit_.code not in (None, 0):
        return ScriptError(
            f"the script ended itself with status {exit_.code!r} before its training was complete"
        )
    if _job() is None:
        return ScriptError(
            "the script ended without having made an ElasticJob, so nothing was trained under Pollux; "
            "make one round the training loop, as the examples do"
        )
    return ScriptError(
        "the script ended before its training was complete; "
        "it must run its ElasticJob's loop to the last epoch, or call job.finish() where it ends early"
    )


def _job() -> object | None:
    """The script's ElasticJob, if it made one."""
    module = sys.modules.get("pollux_agent.torch.job")
    return module.current_job() if module is not None else None


def _outcome(settings: WorkerSettings, rank: int, kind: OutcomeKind, error: BaseException) -> Outcome:
    job = _job()
    name = "" if isinstance(error, ScriptError) else f"{type(error).__name__}: "
    if isinstance(error, PolluxAgentError) and error.__traceback__ is None:
        text = f"{error}\n"
    else:
        trace = user_frames(error.__traceback__)
        text = "".join(traceback.format_exception(type(error), error, trace))
    return Outcome(
        kind=kind,
        job_id=settings.job_id,
        incarnation=settings.incarnation,
        rank=rank,
        time_unix_s=time.time(),
        step=getattr(job, "step", 0),
        steps_taken=getattr(job, "steps_taken", 0),
        progress=getattr(job, "progress", 0.0),
        error=_readable(f"{name}{error}").strip()[:_MAX_ERROR_CHARS],
        traceback=_readable(text)[-_MAX_TRACEBACK_CHARS:],
    )


def _readable(text: str) -> str:
    """The text without lone surrogates, which names of files that are no UTF-8 hold and no JSON may."""
    return text.encode(errors="backslashreplace").decode()


class _Output(io.FileIO):
    """An output on a disk that may be full, or to a process that may be gone: what finds no room or no
    reader is lost, and no ``print`` fails for it. A launcher that is killed takes its workers along.
    """

    def write(self, data: Any) -> int:
        try:
            return super().write(data) or 0
        except OSError as error:
            if not is_full(error) and not isinstance(error, BrokenPipeError):
                raise
            return len(data)


def forgiving(stream: TextIO) -> TextIO:
    """The same stream, whose disk may be full and whose reader may be gone."""
    return io.TextIOWrapper(
        io.BufferedWriter(_Output(stream.fileno(), "w", closefd=False)),
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=getattr(stream, "line_buffering", False),
        write_through=getattr(stream, "write_through", False),
    )


def run_forked(*arguments: str) -> None:
    """Run a script in a process that was forked from one with everything loaded, as if it had begun afresh.

    It joins its CPU quota only now, ends with the process that it was forked from (which ends with the
    launcher), and has random numbers of its own. Ends with SystemExit, since torch would have a worker that
    returns wait for its peers, also where the launcher waits for its end.
    """
    die_with_parent(os.getppid())
    name_process(PROCESS_NAME)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    launcher = multiprocessing.parent_process()
    if launcher is not None and not launcher.is_alive():
        os._exit(1)
    settings = worker_settings()
    if settings is not None and settings.cpu_group is not None:
        settings.cpu_group.write_text(str(os.getpid()))
    multiprocessing.set_start_method(multiprocessing.get_all_start_methods()[0], force=True)
    np.random.seed()
    sys.stdout, sys.stderr = forgiving(sys.stdout), forgiving(sys.stderr)
    raise SystemExit(main(arguments) or None)


if __name__ == "__main__":
    die_with_parent(int(os.environ.get("POLLUX_PARENT_PID") or os.getppid()))
    sys.stdout, sys.stderr = forgiving(sys.stdout), forgiving(sys.stderr)
    sys.exit(main(sys.argv[1:]))
