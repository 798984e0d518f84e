"""The client of the Kubernetes API, over real HTTP."""

from collections.abc import Iterator
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

import pytest
from kubernetes import client as kube_client

from pollux_agent.driver.kube.api import KubeApi, KubeError

SERVER_UNIX_S = 1_700_000_000.0


class _Answers(BaseHTTPRequestHandler):
    """Answers ``/STATUS`` with that status, and tells the time as an API server does."""

    def do_GET(self) -> None:
        self.send_response_only(int(self.path.removeprefix("/")))
        self.send_header("Date", formatdate(SERVER_UNIX_S, usegmt=True))
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, *_: object) -> None:
        """Not to the test's output."""


@pytest.fixture
def api() -> Iterator[KubeApi]:
    server = HTTPServer(("127.0.0.1", 0), _Answers)
    Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    configuration = kube_client.Configuration()
    configuration.host = f"http://127.0.0.1:{server.server_address[1]}"
    configuration.retries = 0
    yield KubeApi(kube_client.ApiClient(configuration))
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("status", [200, 403, 404, 409])
def test_every_answer_tells_the_servers_time_a_refusal_too(api: KubeApi, status: int) -> None:
    assert api.server_unix_s == 0.0
    try:
        api.get(f"/{status}")
    except KubeError as error:
        assert error.status == status
    assert api.server_unix_s == SERVER_UNIX_S
