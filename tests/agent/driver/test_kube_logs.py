"""What workers print reaches the driver's own output, whatever becomes of the job's folder."""

import errno
import io
import logging
from pathlib import Path
from typing import Any

import pytest
import urllib3
from fake_kube import FakeKube

from pollux_agent.driver.kube.logs import LogFollower


class Kubelet(FakeKube):
    """A pod that printed some lines and ended; counts how often it is asked."""

    asked = 0

    def stream(self, path: str, *, read_s: float, **query: Any) -> urllib3.BaseHTTPResponse:
        self.asked += 1
        lines = [f"2026-01-01T00:00:{second:02d}Z line {second}\n" for second in range(20)]
        return urllib3.HTTPResponse(body=io.BytesIO("".join(lines).encode()), preload_content=False)


def test_a_folder_that_is_full_keeps_no_line_from_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, caplog: pytest.LogCaptureFixture
) -> None:
    def full(path: Path, mode: str = "r") -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    kubelet = Kubelet()
    follower = LogFollower(kubelet, "team", "job-1-0", tmp_path / "log", "1/node-0")
    monkeypatch.setattr(Path, "open", full)
    with caplog.at_level(logging.WARNING):
        follower.start()
        follower.close(30)
    assert [line for line in capsys.readouterr().out.splitlines() if "line" in line] == [
        f"[1/node-0] line {second}" for second in range(20)
    ]
    assert caplog.text.count("is not written for now") == 1
    assert kubelet.asked <= 2
