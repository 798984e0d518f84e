"""The images' install steps, and the wheels of both packages, in an environment that has nothing else."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from test_images import TOP, instructions

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def environ(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """pip's own settings and nothing of this environment."""
    kept = {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
    home = str(tmp_path_factory.mktemp("home"))
    cache = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return {**kept, "PATH": os.defpath, "HOME": home, "PIP_CACHE_DIR": f"{cache}/pip"}


@pytest.fixture(scope="module")
def installed(environ: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment made by the Airflow image's own step; its bin folder."""
    context = tmp_path_factory.mktemp("src")
    for name in ("agent", "plugins"):
        shutil.copytree(
            TOP / name, context / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info", "build")
        )
    shutil.copy(TOP / "constraints.txt", context)
    target = tmp_path_factory.mktemp("opt") / "pollux"
    (step,) = (
        text for word, text in instructions(TOP / "docker" / "airflow.Dockerfile")
        if word == "RUN" and "pip install" in text
    )  # fmt: skip
    step = step.replace("/opt/pollux", str(target)).replace("python3 ", f"{sys.executable} ", 1)
    step = step.replace(" --no-cache-dir", " --no-compile")
    done = subprocess.run(
        ["/bin/bash", "-euo", "pipefail", "-c", step],
        cwd=context,
        env=environ,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return target / "bin"


def run(bin_folder: Path, environ: dict[str, str], *command: str) -> str:
    done = subprocess.run(
        [str(bin_folder / command[0]), *command[1:]], env=environ, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, f"{command}: {done.stdout}\n{done.stderr}"
    return done.stdout


def test_the_scheduler_works_without_torch_and_airflow_finds_it(
    installed: Path, environ: dict[str, str]
) -> None:
    assert "doctor" in run(installed, environ, "pollux", "--help")
    assert "launch" in run(installed, environ, "pollux-agent", "--help")
    script = """
import importlib.metadata, importlib.util
(plugin,) = importlib.metadata.entry_points(group="airflow.plugins", name="pollux")
assert plugin.load().name == "pollux"
from pollux.operators.training import PolluxTrainingOperator
import psycopg2, asyncpg, kubernetes
assert importlib.util.find_spec("torch") is None
print("works")
"""
    assert "works" in run(installed, environ, "python", "-c", script)
    listed = (installed.parent / "packages.txt").read_text()
    assert re.search(r"^pollux-agent==", listed, re.MULTILINE)
    assert re.search(r"^apache-airflow==", listed, re.MULTILINE)


def test_wheels_hold_the_packages_alone_and_work(
    installed: Path, environ: dict[str, str], tmp_path: Path
) -> None:
    for name in ("agent", "plugins"):
        shutil.copytree(TOP / name, tmp_path / name, ignore=shutil.ignore_patterns("*.egg-info", "build"))
    sources = (str(tmp_path / "agent"), str(tmp_path / "plugins"))
    run(
        installed,
        environ,
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--wheel-dir",
        str(tmp_path / "dist"),
        *sources,
    )
    wheels = sorted((tmp_path / "dist").glob("*.whl"))
    assert [wheel.name.split("-")[0] for wheel in wheels] == ["airflow_provider_pollux", "pollux_agent"]
    for wheel in wheels:
        names = run(installed, environ, "python", "-m", "zipfile", "-l", str(wheel))
        tops = {line.split("/")[0] for line in names.splitlines()[1:] if "/" in line}
        assert {top for top in tops if not top.endswith(".dist-info")} <= {"pollux", "pollux_agent"}
        assert "py.typed" in names
    reinstall = ("pip", "install", "--quiet", "--no-deps", "--force-reinstall", *map(str, wheels))
    run(installed, environ, *reinstall)
    run(installed, environ, "pip", "check")
    where = run(installed, environ, "python", "-c", "import pollux, pollux_agent; print(pollux.__file__)")
    assert str(installed.parent) in where
    assert "snapshot" in run(installed, environ, "pollux", "solve", "--help").lower()
