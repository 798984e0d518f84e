"""The service's store: one folder a job, and two small files, each written whole or not at all."""

import logging
import shutil
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Annotated

from pydantic import Field
from pydantic.dataclasses import dataclass

from pollux.cluster.base import MAX_LEASE, ClusterJob
from pollux.cluster.numbers import next_number, read_counter
from pollux_agent.driver import DriverState
from pollux_agent.driver.records import last_incarnation
from pollux_agent.errors import DocumentError
from pollux_agent.protocol import DOCUMENT_CONFIG, JobFolder, JobSpec, decode, encode
from pollux_agent.records import open_regular, write_atomic

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True, config=DOCUMENT_CONFIG)
class Lease:
    """Who may schedule, and until when; ``ttl_s`` is what it was taken for."""

    holder: Annotated[str, Field(min_length=1)]
    until_unix_s: float
    ttl_s: Annotated[float, Field(gt=0, le=MAX_LEASE.total_seconds())] = MAX_LEASE.total_seconds()


class JobStore:
    """Files of the service in the state folder; the service is their only writer."""

    def __init__(self, state: Path) -> None:
        self._jobs = state / "jobs"
        self._counter = state / "decision-counter"
        self._lease = state / "lease.json"

    def folder(self, job_id: str) -> JobFolder:
        return JobFolder(self._jobs / job_id)

    def load(self) -> list[tuple[ClusterJob, DriverState]]:
        """All readable jobs in order of submission; an unreadable one is left alone and named in the log."""
        jobs = []
        for path in sorted(self._jobs.glob("*/job.json")):
            try:
                job = decode(ClusterJob, _read(path))
                state_path = path.with_name("driver.json")
                known = state_path.exists()
                state = decode(DriverState, _read(state_path)) if known else self.new_driver(job.job_id)
            except (OSError, DocumentError) as error:
                logger.error("job %s cannot be read and is left out: %s", path.parent.name, error)
                continue
            jobs.append((job, state))
        return sorted(jobs, key=lambda item: item[0].submitted_unix_s)

    def save_job(self, job: ClusterJob) -> None:
        write_atomic(self.folder(job.job_id).root / "job.json", encode(job).encode())

    def save_driver(self, job_id: str, state: DriverState) -> None:
        write_atomic(self.folder(job_id).root / "driver.json", encode(state).encode())

    def new_driver(self, job_id: str) -> DriverState:
        """The state of a driver that knows nothing; where a job of that id trained before, it counts on from
        that one's last incarnation, whose files are not to be taken for its own.
        """
        return DriverState(incarnation=last_incarnation(self.folder(job_id)))

    def save_spec(self, job_id: str, spec: JobSpec, script: Path) -> None:
        """The spec as the workers see it, with the script's own path."""
        resolved = replace(spec, script=str(script))
        write_atomic(self.folder(job_id).spec, encode(resolved).encode())

    def go_on(self, job_id: str) -> None:
        """Have a job that was complete be so no more; its checkpoints stay."""
        self.folder(job_id).complete.unlink(missing_ok=True)

    def ask_fresh(self, job_id: str) -> None:
        """Note that the job's checkpoints are to be deleted before its next start."""
        write_atomic(self._fresh(job_id), b"")

    def fresh_asked(self, job_id: str) -> bool:
        return self._fresh(job_id).exists()

    def make_fresh(self, job_id: str) -> bool:
        """Delete checkpoints, completion marker and the memory of what was logged if that was asked for;
        whether it was.
        """
        if not self.fresh_asked(job_id):
            return False
        folder = self.folder(job_id)
        folder.complete.unlink(missing_ok=True)
        folder.logged.unlink(missing_ok=True)
        shutil.rmtree(folder.checkpoints, ignore_errors=True)
        self._fresh(job_id).unlink()
        return True

    def last_decision(self) -> int:
        """The last number given out, 0 before the first."""
        return read_counter(self._counted()) or 0

    def next_decision(self, found: Collection[int]) -> int:
        """Count up, above all given out before and above those that were ``found`` on jobs, as far as these
        count; a counter that holds no number has one again.
        """
        text = self._counted()
        number = next_number(read_counter(text), found)
        write_atomic(self._counter, f"{number}\n".encode())
        if text and read_counter(text) is None:
            logger.error(
                "%s held %r, after which no number can come; goes on with %d, above what is found on jobs",
                self._counter,
                text[:40],
                number,
            )
        return number

    def lease(self) -> Lease | None:
        try:
            return decode(Lease, self._lease.read_bytes())
        except (FileNotFoundError, DocumentError):
            return None

    def save_lease(self, lease: Lease | None) -> None:
        if lease is None:
            self._lease.unlink(missing_ok=True)
        else:
            write_atomic(self._lease, encode(lease).encode())

    def _counted(self) -> str:
        try:
            return self._counter.read_text(errors="replace").strip()
        except FileNotFoundError:
            return ""

    def _fresh(self, job_id: str) -> Path:
        return self.folder(job_id).root / "fresh"


def _read(path: Path) -> bytes:
    with open_regular(path) as file:
        return file.read()
