"""Try an image's recipe without a container engine: its steps run in a fresh Debian of that release.

``python docker/try.py airflow FOLDER`` (root, and Debian's debootstrap) makes each stage's root file system
under FOLDER, runs every COPY and RUN in it, and in the end the command behind ``--`` as the image's user.
This machine's package sources, certificates and pip settings are lent to the stages and taken out again, in
a mount namespace of its own; POLLUX_TRY_LENT names more folders to lend, with colons between them. With
docker, podman or buildah at hand build the image instead.
"""

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

TOP = Path(__file__).resolve().parents[1]
RELEASES = {"12": "bookworm"}
LENT = ("etc/apt", "etc/pip.conf", "etc/resolv.conf", "etc/hosts", "etc/ssl/certs", "usr/share/keyrings")
_APART = "POLLUX_TRY_APART"
SKIPPED_BY_COPY = shutil.ignore_patterns("__pycache__", "*.egg-info", "build")


@dataclass
class Stage:
    """A root file system, and what the instructions so far set for those that follow."""

    root: Path
    environ: dict[str, str] = field(default_factory=lambda: {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"})
    shell: tuple[str, ...] = ("/bin/sh", "-c")
    workdir: str = "/"
    user: str = "0:0"

    def run(self, command: tuple[str, ...], *, user: str = "0:0") -> None:
        """Run a command inside; ends the whole try if it fails."""
        inside = f"cd {shlex.quote(self.workdir)} && exec {shlex.join(command)}"
        outside = (
            shutil.which("chroot") or "chroot",
            f"--userspec={user}",
            str(self.root),
            "/bin/sh",
            "-c",
            inside,
        )
        lent = {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
        done = subprocess.run(outside, env={"HOME": "/root", **lent, **self.environ})
        if done.returncode:
            sys.exit(f"{inside}: ended with {done.returncode}")

    def path(self, inside: str) -> Path:
        return self.root / (Path(self.workdir) / inside).as_posix().lstrip("/")


def instructions(recipe: Path) -> Iterator[tuple[str, str]]:
    """(instruction, its text), continued lines joined and comments left out."""
    lines = [line for line in recipe.read_text().splitlines() if not line.lstrip().startswith("#")]
    for line in re.sub(r"\\\n\s*", "", "\n".join(lines)).splitlines():
        word, _, text = line.partition(" ")
        if word:
            yield word, text.strip()


def new_root(base: Path, root: Path) -> None:
    """A copy of the minimal system that debootstrap made."""
    subprocess.run(("cp", "--archive", "--reflink=auto", f"{base}/.", str(root)), check=True)


@contextmanager
def lent_files(root: Path) -> Iterator[None]:
    """What package managers need of this machine, for the time of the block."""
    before = root.with_name(f"{root.name}-own")
    more = [name.strip("/") for name in os.environ.get("POLLUX_TRY_LENT", "").split(":") if name]
    taken = [name for name in (*LENT, *more) if Path("/", name).exists()]
    for name in taken:
        own, theirs = root / name, Path("/", name)
        if own.exists() or own.is_symlink():
            (before / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.move(own, before / name)
        own.parent.mkdir(parents=True, exist_ok=True)
        if theirs.is_dir():
            shutil.copytree(theirs, own, symlinks=False, ignore_dangling_symlinks=True)
        else:
            shutil.copy(theirs, own)
    subprocess.run(("mount", "--rbind", "/dev", str(root / "dev")), check=True)
    subprocess.run(("mount", "-t", "proc", "proc", str(root / "proc")), check=True)
    try:
        yield
    finally:
        subprocess.run(("umount", str(root / "proc")), check=True)
        subprocess.run(("umount", "--lazy", "--recursive", str(root / "dev")), check=True)
        for name in taken:
            own = root / name
            shutil.rmtree(own) if own.is_dir() else own.unlink()
            if (before / name).exists() or (before / name).is_symlink():
                shutil.move(before / name, own)


def build(recipe: Path, folder: Path) -> Stage:
    """Run all stages; the last one."""
    stages: dict[str, Stage] = {}
    stage: Stage | None = None
    for word, text in instructions(recipe):
        if word == "FROM":
            image, _, name = text.partition(" AS ")
            release = RELEASES[image.partition(":")[2].partition(".")[0]]
            base = folder / release
            if not base.exists():
                subprocess.run(("debootstrap", "--variant=minbase", release, str(base)), check=True)
            stage = Stage(folder / f"{recipe.stem}-{name or 'final'}")
            stages[name] = stage
            stage.root.mkdir()
            new_root(base, stage.root)
            continue
        assert stage is not None
        print(f"--- {word} {text[:120]}", flush=True)
        if word == "RUN":
            with lent_files(stage.root):
                stage.run((*stage.shell, text))
        elif word == "COPY":
            copy(stage, stages, text)
        elif word == "ENV":
            stage.environ |= dict(re.findall(r"(\w+)=(\S+)", text))
        elif word == "WORKDIR":
            stage.workdir = text
            stage.path(".").mkdir(parents=True, exist_ok=True)
        elif word == "USER":
            stage.user = text
        elif word == "SHELL":
            stage.shell = tuple(re.findall(r'"([^"]*)"', text))
    assert stage is not None
    return stage


def copy(stage: Stage, stages: dict[str, Stage], text: str) -> None:
    *options, source, target = text.split()
    origin = TOP / source
    for option in options:
        if option.startswith("--from="):
            origin = stages[option.removeprefix("--from=")].root / source.lstrip("/")
    into = stage.path(target)
    if origin.is_dir():
        symlinks = "--from=" in text
        ignore = None if symlinks else SKIPPED_BY_COPY
        shutil.copytree(origin, into, symlinks=symlinks, ignore=ignore, dirs_exist_ok=True)
    else:
        target_file = into / origin.name if target.endswith("/") else into
        target_file.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(origin, target_file)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("image", choices=["airflow", "training"])
    parser.add_argument("folder", type=Path, help="an empty or new folder; several GB")
    parser.add_argument("command", nargs="*", help="run in the end as the image's user")
    given = parser.parse_args()
    if os.geteuid() or not shutil.which("debootstrap"):
        sys.exit("docker/try.py needs root and debootstrap (Debian: apt-get install debootstrap)")
    if os.environ.get(_APART) is None:  # private mounts: none of ours reaches the machine, nor the other way
        command = ("unshare", "--mount", "--propagation", "private", sys.executable, *sys.argv)
        os.execvpe(command[0], command, {**os.environ, _APART: "1"})
    given.folder.mkdir(parents=True, exist_ok=True)
    stage = build(TOP / "docker" / f"{given.image}.Dockerfile", given.folder)
    size = subprocess.run(("du", "-sm", str(stage.root)), capture_output=True, text=True).stdout.split()[0]
    print(f"{stage.root}: {size} MB")
    if given.command:
        stage.run(tuple(given.command), user=stage.user)


if __name__ == "__main__":
    main()
