"""What all tests share: an Airflow home of their own, resources by name, and the check for silent skips."""

import json
import logging
import os
import shutil
import signal
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # a second thread makes arrays as small as the tests' slower

pytest_plugins = ("airflow_rim",)

TOP = Path(__file__).resolve().parents[1]
RESOURCES = {"traces": "POLLUX_TRACES", "kube": "POLLUX_KUBE"}
"""Folders that not every machine has, and the variable that names each; KUBECONFIG serves for kube too."""

_HOME = pytest.StashKey[Path]()
_PASSED = pytest.StashKey[Counter[str]]()
_SKIPPED = pytest.StashKey[list[str]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--complete",
        action="store_true",
        help="fail if a test was skipped without needs(...), or if a folder of tests passed none",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "needs(resource): runs only where the resource's folder is set: " + ", ".join(RESOURCES)
    )
    if (
        signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    ):  # a shell's background job, whose children ignore it too
        signal.signal(signal.SIGINT, signal.default_int_handler)
    home = Path(tempfile.mkdtemp(prefix="pollux-tests-"))
    config.stash[_HOME] = home
    config.stash[_PASSED] = Counter()
    config.stash[_SKIPPED] = []
    for name in [name for name in os.environ if name.startswith(("AIRFLOW", "MLFLOW_"))]:
        del os.environ[name]
    (home / "plugins").mkdir()
    (home / "login.json").write_text(json.dumps({"admin": "only-for-tests"}))
    os.environ |= {
        "AIRFLOW_HOME": str(home),
        "AIRFLOW__CORE__UNIT_TEST_MODE": "True",
        "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
        "AIRFLOW__CORE__DAGS_FOLDER": str(TOP / "dags"),
        "AIRFLOW__CORE__PLUGINS_FOLDER": str(home / "plugins"),
        "AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_USERS": "admin:admin",
        "AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_PASSWORDS_FILE": str(home / "login.json"),
        "AIRFLOW__API_AUTH__JWT_SECRET": "only-for-tests-" + "x" * 49,
        "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN": f"sqlite:///{home / 'airflow.db'}",
        "MLFLOW_DISABLE_TELEMETRY": "true",
    }


def pytest_unconfigure(config: pytest.Config) -> None:
    logging.raiseExceptions = False  # a job that a test left behind speaks at exit, to a stream closed by now
    shutil.rmtree(config.stash[_HOME], ignore_errors=True)


@pytest.fixture(autouse=True)
def the_runs_own_signal_handlers() -> Iterator[None]:
    """A command that runs inside a test leaves its handlers behind: Ctrl-C has to end the tests, not it."""
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.getsignal(each) for each in signals]
    yield
    for each, handler in zip(signals, before, strict=True):
        if signal.getsignal(each) is not handler:
            signal.signal(each, handler)


@pytest.fixture(autouse=True)
def the_level_of_a_process_that_configured_no_logging() -> Iterator[None]:
    """Airflow, once imported, has all loggers at INFO: what caplog sees would hang on the order of tests."""
    root = logging.getLogger()
    before = root.level
    root.setLevel(logging.WARNING)
    yield
    root.setLevel(before)


@pytest.fixture(scope="session")
def airflow_db() -> Iterator[None]:
    """An initialised, empty Airflow database in the tests' own home; seconds, for tests that run DAGs."""
    from airflow.utils import db

    db.initdb()
    yield


def pytest_runtest_setup(item: pytest.Item) -> None:
    for mark in item.iter_markers("needs"):
        (resource,) = mark.args
        variable = RESOURCES[resource]
        folder = os.environ.get(variable)
        if resource == "kube" and os.environ.get("KUBECONFIG"):
            continue
        if not folder:
            pytest.skip(f"needs {resource}: {variable} is not set")
        if not Path(folder).is_dir():
            pytest.fail(f"{variable}: {folder} is no folder; correct it or unset it")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The tests through the real stack go last, so that a broken unit is told first.

    Those on Kubernetes come behind all others, and those on the shared stack behind those with one of their
    own: what a fixture keeps running for the rest of a session takes time from every test behind it.
    """
    items.sort(key=_place)


def _place(item: pytest.Item) -> tuple[bool, bool, bool]:
    shares_stack = "stack" in getattr(item, "fixturenames", ())
    return (
        TOP / "tests" / "kube" in item.path.parents,
        item.get_closest_marker("e2e") is not None,
        shares_stack,
    )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    report = yield
    suite = item.path.relative_to(TOP / "tests").parts[0]
    if report.when == "call" and report.passed:
        item.config.stash[_PASSED][suite] += 1
    elif report.skipped and not hasattr(report, "wasxfail"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        if not reason.removeprefix("Skipped: ").startswith("needs "):
            item.config.stash[_SKIPPED].append(f"{item.nodeid}: {reason}")
    return report


def _incomplete(config: pytest.Config) -> list[str]:
    """What a complete session would not show."""
    folders = (path for path in (TOP / "tests").iterdir() if any(path.rglob("test_*.py")))
    empty = [f"tests/{path.name}: no test passed" for path in folders if not config.stash[_PASSED][path.name]]
    return empty + [f"skipped: {skipped}" for skipped in config.stash[_SKIPPED]]


def pytest_sessionfinish(session: pytest.Session) -> None:
    if session.config.getoption("--complete") and session.exitstatus == 0 and _incomplete(session.config):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if config.getoption("--complete") and (missing := _incomplete(config)):
        terminalreporter.section("not complete", red=True, bold=True)
        for line in missing:
            terminalreporter.line(line)
