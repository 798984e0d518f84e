"""A driver's output from a cursor: every line once, also where the kubelet answers by whole seconds."""

from datetime import datetime
from typing import Any

from fake_kube import FakeKube

from pollux.cluster.k8s.podlog import read
from pollux_agent.driver.kube.api import KubeError

POD: dict[str, Any] = {
    "metadata": {"name": "job", "namespace": "team", "uid": "u-1"},
    "spec": {"containers": [{"name": "base"}]},
}


class Kubelet(FakeKube):
    """Answers as a kubelet does: from the whole second of ``sinceTime`` on, and cut at ``limitBytes``."""

    def __init__(self, lines: list[tuple[str, str]], *, containers: int = 1) -> None:
        super().__init__()
        self.lines, self.containers = lines, containers

    def text(self, path: str, *, read_s: float | None = None, **query: Any) -> bytes:
        if self.containers > 1 and query["container"] != "base":
            raise KubeError(f"GET {path}: a container name must be specified", 400, "BadRequest")
        since = query["sinceTime"][:19]
        if since:
            datetime.fromisoformat(since)
        text = "".join(f"{when} {line}\n" for when, line in self.lines if when[:19] >= since)
        return text.encode()[: query["limitBytes"]]


def read_all(kubelet: Kubelet, pod: dict[str, Any] = POD) -> list[str]:
    """Everything, chunk by chunk, until nothing new comes."""
    lines, cursor = list[str](), ""
    for _ in range(1000):
        chunk = read(kubelet, pod, cursor)
        if not chunk.lines:
            return lines
        lines += chunk.lines
        cursor = chunk.cursor
    raise AssertionError("it never ends")


def printed(count: int, second: int, width: int = 100) -> list[tuple[str, str]]:
    """So many lines within one second."""
    return [
        (f"2026-01-01T00:00:{second:02d}.{number + 1:09d}Z", f"{second}/{number} ".ljust(width, "x"))
        for number in range(count)
    ]


def test_a_second_of_more_than_one_answer_is_read_to_its_end() -> None:
    lines = [*printed(10, 1), *printed(5_000, 2), *printed(10, 3)]
    assert read_all(Kubelet(lines)) == [line for _, line in lines]


def test_a_second_of_more_than_any_answer_does_not_stop_the_log() -> None:
    lines = [*printed(10, 1), *printed(5_000, 2, width=1_000), *printed(10, 3)]
    found = read_all(Kubelet(lines))
    assert found[-10:] == [line for _, line in lines[-10:]]
    assert "more was printed" in found[-11]
    assert found[:1_000] == [line for _, line in lines[:1_000]]


def test_of_several_containers_the_drivers_is_read() -> None:
    mesh = POD | {"spec": {"containers": [{"name": "mesh"}, {"name": "base"}]}}
    lines = printed(3, 1)
    assert read_all(Kubelet(lines, containers=2), mesh) == [line for _, line in lines]
