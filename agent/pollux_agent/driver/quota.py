"""CPU shares: what a slot is on a machine without GPUs, and how the kernel is made to keep to it."""

import logging
import os
import signal
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

logger = logging.getLogger(__name__)

_PERIOD_US = 10_000
"""Short, so that a worker is never held up for long in the middle of an all-reduce."""
_MIN_QUOTA_US = 1_000
"""Less is refused by the kernel."""
_WEIGHT_OVER_OTHERS = 64
"""Without a high weight all jobs together would count as one process against those of the whole machine."""
_CGROUP = Path("/sys/fs/cgroup")


def slot_share(*, num_slots: int, cap: float, reserve: float, num_cores: float) -> float:
    """Fraction of a core that one slot is: an equal part of what remains after ``reserve`` cores."""
    return min(cap, 1.0, max(num_cores - reserve, 0.1) / max(num_slots, 1))


def available_cores(base: Path = _CGROUP) -> float:
    """Cores that this process may use, less than the machine has in a container with a CPU quota."""
    cores = float(len(os.sched_getaffinity(0)))
    for version, group in _parents(base):
        with suppress(OSError, ValueError):  # no quota: version 1 says -1, version 2 max
            if version == 1:
                quota, period = ((group / f"cpu.cfs_{part}_us").read_text() for part in ("quota", "period"))
            else:
                quota, period = (group / "cpu.max").read_text().split()
            if int(quota) > 0:
                cores = min(cores, int(quota) / int(period))
    return cores


@dataclass(frozen=True, slots=True)
class Group:
    """A control group: processes that share one CPU quota, with all the processes that they start."""

    path: Path

    @property
    def members(self) -> Path:
        """The file that lists the processes in the group; one that writes its id into it enters."""
        return self.path / "cgroup.procs"

    def pids(self) -> list[int]:
        try:
            return [int(line) for line in self.members.read_text().split()]
        except OSError:
            return []

    def kill(self) -> None:
        """SIGKILL to every process in the group."""
        for pid in self.pids():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def remove(self) -> bool:
        """Remove the empty group; False if the kernel will not have it yet."""
        try:
            self.path.rmdir()
        except FileNotFoundError:
            return True
        except OSError:
            return False
        return True


@dataclass(frozen=True, slots=True)
class Cgroups:
    """The groups of one service, all inside ``root``."""

    root: Path
    version: Literal[1, 2]

    def create(self, name: str, num_cpus: float) -> Group:
        """A group that may use ``num_cpus`` cores; raises OSError where that is not permitted.

        What it leaves unused while it waits for others it may use up in the next periods (a burst of at
        most one period's quota, where the kernel has that): a rank that waited runs on at once.
        """
        path = self.root / name
        path.mkdir(exist_ok=True)
        period_us = max(_PERIOD_US, min(1_000_000, round(_MIN_QUOTA_US / num_cpus)))
        quota_us = max(_MIN_QUOTA_US, round(num_cpus * period_us))
        if self.version == 1:
            (path / "cpu.cfs_period_us").write_text(str(period_us))
            (path / "cpu.cfs_quota_us").write_text(str(quota_us))
            burst = path / "cpu.cfs_burst_us"
        else:
            (path / "cpu.max").write_text(f"{quota_us} {period_us}")
            burst = path / "cpu.max.burst"
        if burst.exists():
            burst.write_text(str(quota_us))
        return Group(path)

    def weigh(self) -> None:
        """Put what the quotas promise before whatever else the machine does."""
        if self.version == 1:
            (self.root / "cpu.shares").write_text(str(1024 * _WEIGHT_OVER_OTHERS))
        else:
            (self.root / "cpu.weight").write_text(str(100 * _WEIGHT_OVER_OTHERS))

    def clear(self) -> None:
        """Remove what a killed service left, its last processes included."""
        for path in [entry for entry in self.root.iterdir() if entry.is_dir()]:
            group = Group(path)
            group.kill()
            if not group.remove():
                logger.warning("control group %s is still in use", path)

    def close(self) -> None:
        self.clear()
        with suppress(OSError):
            self.root.rmdir()


def open_cgroups(name: str, base: Path = _CGROUP) -> Cgroups | None:
    """Control groups under the one that this process is in, or None where CPU quotas are not permitted."""
    for version, parent in _parents(base):
        groups = Cgroups(parent / name, version)
        try:
            groups.root.mkdir(exist_ok=True)
            if version == 2:
                for folder in (parent, groups.root):
                    (folder / "cgroup.subtree_control").write_text("+cpu")
            groups.clear()
            groups.weigh()
            probe = groups.create("probe", 1.0)
            probe.remove()
        except OSError as error:
            logger.info("no CPU quota by control groups version %s: %s", version, error)
            with suppress(OSError):
                groups.root.rmdir()
        else:
            return groups
    return None


def _parents(base: Path) -> list[tuple[Literal[1, 2], Path]]:
    """Folders of the groups that this process is in, as far as they are to be seen here."""
    found: list[tuple[Literal[1, 2], Path]] = []
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        mounts: list[tuple[Literal[1, 2], Path]] = []
        if "cpu" in controllers.split(","):
            mounts = [(1, base / controllers), (1, base / "cpu")]
        elif controllers == "":
            mounts = [(2, base)]
        for version, mount in mounts:
            here = mount / path.lstrip("/")
            limit = "cpu.cfs_quota_us" if version == 1 else "cgroup.controllers"
            if (mount / "cgroup.procs").exists() and ((here / limit).exists() or path == "/"):
                found.append((version, here))
                break
    return found
