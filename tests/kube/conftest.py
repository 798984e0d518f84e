"""One Kubernetes for all tests of a session; torn down in the end if the session started it."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from kube_nodes import MADE_BY, TestKube, run_script, story

_FAILED = pytest.StashKey[bool]()


@pytest.fixture(scope="session")
def kube() -> Iterator[TestKube]:
    """The cluster of KUBECONFIG, else one of POLLUX_KUBE's own."""
    folder = Path(tempfile.mkdtemp(prefix="pollux-kube-"))
    try:
        if given := os.environ.get("KUBECONFIG"):
            kube = TestKube(kubeconfig=Path(given), folder=folder, scripts=None, state=None)
            if left := kube.leftovers():
                pytest.exit(
                    f"KUBECONFIG: tests before these left {', '.join(left)}; wait until they are gone, or "
                    f"kubectl delete namespace -l {MADE_BY}",
                    returncode=4,
                )
            try:
                yield kube
            finally:
                kube.remove_made()
            return
        scripts = Path(os.environ["POLLUX_KUBE"])
        state = folder / "kube"
        try:
            kubeconfig = Path(run_script(scripts / "up.sh", state=state).splitlines()[-1])
            yield TestKube(kubeconfig=kubeconfig, folder=folder, scripts=scripts, state=state)
        finally:
            run_script(scripts / "down.sh", "--purge", state=state)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[pytest.TestReport]:
    report = yield
    if report.when == "call":
        item.stash[_FAILED] = report.failed
    return report


@pytest.fixture(autouse=True)
def tell_what_the_pods_did(request: pytest.FixtureRequest, kube: TestKube) -> Iterator[None]:
    """After a failure: the jobs' pods, and the ends of their drivers' logs."""
    yield
    if request.node.stash.get(_FAILED, False):
        print(story(kube.api))
