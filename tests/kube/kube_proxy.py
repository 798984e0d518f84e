"""A way to a real API server on which answers go wrong: refused, late, or cut off in the middle."""

import json
import ssl
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
import urllib3
from kube_nodes import TestKube

from pollux_agent.driver.kube.api import KubeApi, open_api

FOR_EVER = 1_000_000
_ACCOUNT = "through-the-proxy"
_REASONS = {403: "Forbidden", 409: "Conflict", 410: "Expired", 429: "TooManyRequests"}
_PASSED_ON = ("Authorization", "Accept", "Content-Type")


@dataclass(slots=True)
class Fault:
    """The next ``left`` requests of a verb, in paths that hold ``part``, are answered with ``status``."""

    verb: str
    status: int
    left: int = 1
    part: str = ""


@dataclass(slots=True)
class FaultyServer:
    """All requests wait for ``slow_s``; a watch ends in the middle of a line after ``watch_s``."""

    port: int
    upstream: str
    certificate: str
    faults: list[Fault] = field(default_factory=list)
    slow_s: float = 0.0
    watch_s: float = FOR_EVER
    counts: Counter[str] = field(default_factory=Counter)
    refused: Counter[tuple[str, int]] = field(default_factory=Counter)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def take(self, verb: str, path: str) -> int:
        """The status to refuse a request with, 0 if it may pass."""
        with self._lock:
            self.counts[verb] += 1
            for fault in self.faults:
                if fault.verb == verb and fault.left > 0 and fault.part in path:
                    fault.left -= 1
                    self.refused[verb, fault.status] += 1
                    return fault.status
        return 0

    def heal(self) -> None:
        """No more faults."""
        self.faults.clear()
        self.slow_s, self.watch_s = 0.0, FOR_EVER

    def api(self, kube: TestKube) -> KubeApi:
        """An administrator's API through here, by token: a client certificate would end here."""
        api = kube.api
        accounts = "/api/v1/namespaces/default/serviceaccounts"
        bindings = "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings"
        if not any(item["metadata"]["name"] == _ACCOUNT for item in api.items(accounts)):
            api.create(accounts, {"metadata": {"name": _ACCOUNT}})
            subject = {"kind": "ServiceAccount", "name": _ACCOUNT, "namespace": "default"}
            role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "cluster-admin"}
            api.create(bindings, {"metadata": {"name": _ACCOUNT}, "subjects": [subject], "roleRef": role})
        body = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}}
        token = api.create(f"{accounts}/{_ACCOUNT}/token", body)["status"]["token"]
        through = open_api(kube.kubeconfig)
        configuration = through.client.configuration
        configuration.host = f"https://127.0.0.1:{self.port}"
        configuration.api_key["authorization"] = f"Bearer {token}"
        return through


@contextmanager
def faulty_server(kube: TestKube) -> Iterator[FaultyServer]:
    """Before the API server that the tests started, with a certificate that its clients trust."""
    if kube.state is None:
        pytest.skip("needs kube: only before an API server that the tests started can answers be changed")
    pki = kube.state / "pki"
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.daemon_threads = True
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pki / "apiserver.crt", pki / "apiserver.key")
    server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    host = kube.api.client.configuration.host
    faulty = FaultyServer(port=server.server_address[1], upstream=host, certificate=str(pki / "ca.crt"))
    server.faulty = faulty  # type: ignore[attr-defined]
    server.pool = urllib3.PoolManager(ca_certs=faulty.certificate, maxsize=16)  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield faulty
    finally:
        server.shutdown()
        server.server_close()


def verb_of(method: str, path: str, query: str) -> str:
    """As RBAC calls it."""
    if "watch" in parse_qs(query):
        return "watch"
    if method == "GET":
        return "list" if path.rpartition("/")[2] in ("pods", "nodes", "resourcequotas") else "get"
    return {"POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}[method]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def _answer(self) -> None:
        self.close_connection = True
        faulty: FaultyServer = self.server.faulty  # type: ignore[attr-defined]
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        parts = urlsplit(self.path)
        verb = verb_of(self.command, parts.path, parts.query)
        if status := faulty.take(verb, self.path):
            self._refuse(status, verb)
            return
        time.sleep(faulty.slow_s)
        kept = {name: self.headers[name] for name in _PASSED_ON if name in self.headers}
        answer = self.server.pool.request(  # type: ignore[attr-defined]
            self.command,
            faulty.upstream + self.path,
            body=body or None,
            headers=kept,
            preload_content=False,
            retries=False,
            timeout=urllib3.Timeout(connect=5, read=None),
        )
        try:
            self._pass_on(answer, until_s=time.monotonic() + faulty.watch_s if verb == "watch" else None)
        except OSError:
            return  # the client has gone
        finally:
            answer.close()

    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = _answer

    def _refuse(self, status: int, verb: str) -> None:
        message = f"{verb} is refused on purpose"
        refusal = {"kind": "Status", "code": status, "reason": _REASONS[status], "message": message}
        body = json.dumps(refusal).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(body)

    def _pass_on(self, answer: urllib3.BaseHTTPResponse, until_s: float | None) -> None:
        """Chunk by chunk as it comes, the status and the type of the content kept."""
        self.send_response_only(answer.status)
        for name in ("Content-Type", "Date"):
            if name in answer.headers:
                self.send_header(name, answer.headers[name])
        self.send_header("Transfer-Encoding", "chunked")
        self.send_header("Connection", "close")
        self.end_headers()
        for chunk in answer.stream(65_536):
            self._chunk(chunk)
            if until_s is not None and time.monotonic() >= until_s:
                self._chunk(b'{"type":"MODIFIED","obj')
                return
        self.wfile.write(b"0\r\n\r\n")

    def _chunk(self, data: bytes) -> None:
        if data:
            self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
            self.wfile.flush()

    def log_message(self, *_: Any) -> None:
        """Tests read the counts."""
