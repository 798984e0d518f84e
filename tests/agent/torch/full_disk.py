"""A disk of a few megabytes that tests can fill: a tmpfs where this process may mount one.

Elsewhere it is a folder of which a process can be denied large files, as a quota would: no file above a limit
can be written, small ones can.
"""

import resource
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_CHUNK = b"x" * 65_536
_DENIED_BYTES = 100_000


class SmallDisk:
    def __init__(self, folder: Path, *, mounted: bool) -> None:
        self.folder, self.mounted = folder, mounted

    def fill(self, pid: int) -> None:
        """To the last byte; without a mount ``pid`` can write no large file any more."""
        if not self.mounted:
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (_DENIED_BYTES, resource.RLIM_INFINITY))
            return
        with (self.folder / "filling").open("wb", buffering=0) as file:
            for size in (len(_CHUNK), 1):
                try:
                    while file.write(_CHUNK[:size]) == size:
                        pass
                except OSError:
                    continue

    def free(self, pid: int | None = None) -> None:
        (self.folder / "filling").unlink(missing_ok=True)
        if not self.mounted and pid is not None:
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


@contextmanager
def small_disk(folder: Path, *, megabytes: int) -> Iterator[SmallDisk]:
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "pollux-test", str(folder)]
    try:
        mounted = subprocess.run(command, check=False, capture_output=True).returncode == 0
    except OSError:
        mounted = False
    try:
        yield SmallDisk(folder, mounted=mounted)
    finally:
        if mounted:
            subprocess.run(["umount", "--lazy", str(folder)], check=False)
