"""A tracking server on loopback that speaks the few MLflow calls which the reporter makes, and can misbehave.

It stands for a server on another machine: it takes next to no CPU time from what is measured beside it.
"""

import json
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal, cast

Mood = Literal["well", "slow", "busy", "broken", "silent"]
"""slow: answers after seconds; busy: 429; broken: 500; silent: takes the call and never answers."""

SLOW_S, SILENT_S = 3.0, 60.0


@dataclass(slots=True)
class Tracking:
    """What arrived: metric points (name, step, value), tags, and files; ``mood`` may change at any time."""

    mood: Mood = "well"
    url: str = ""
    points: list[tuple[str, int, float]] = field(default_factory=list)
    tags: dict[str, str] = field(default_factory=dict)
    num_calls: int = 0
    num_reports: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def take(self, call: str, body: dict[str, Any]) -> dict[str, Any]:
        """Do what an MLflow REST call asks for; its answer."""
        with self.lock:
            if call == "runs/log-batch":
                for metric in body.get("metrics", []):
                    self.points.append((metric["key"], int(metric["step"]), float(metric["value"])))
                for tag in body.get("tags", []):
                    self.tags[tag["key"]] = tag["value"]
                    self.num_reports += 1
            elif call == "runs/set-tag":
                self.tags[body["key"]] = body["value"]
            tags = [{"key": key, "value": value} for key, value in self.tags.items()]
        info = {
            "run_id": "r",
            "run_uuid": "r",
            "experiment_id": "0",
            "status": "RUNNING",
            "artifact_uri": "mlflow-artifacts:/r",
            "lifecycle_stage": "active",
        }
        run = {"info": info, "data": {"tags": tags}}
        return {"run": run, "run_info": info} if call in ("runs/get", "runs/update") else {}


@contextmanager
def tracking_server() -> Iterator[Tracking]:
    """A server for one run, on a free port of loopback, until the end of the block."""
    tracking = Tracking()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def handle_any(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            tracking.num_calls += 1
            status, answer = 200, b"{}"
            if tracking.mood in ("slow", "silent"):
                time.sleep(SLOW_S if tracking.mood == "slow" else SILENT_S)
            if tracking.mood == "silent":
                self.close_connection = True
                return
            if tracking.mood in ("busy", "broken"):
                status = 429 if tracking.mood == "busy" else 500
            elif "mlflow-artifacts" not in self.path:
                call = self.path.partition("?")[0].rpartition("mlflow/")[2]
                answer = json.dumps(tracking.take(call, json.loads(body or b"{}"))).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        do_GET = do_POST = do_PUT = do_PATCH = handle_any

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class names it
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    tracking.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield tracking
    finally:
        server.shutdown()
        server.server_close()


def main(mood: Mood) -> None:
    """Serve on standard input and output: ``well`` changes the mood, ``points`` lists what arrived."""
    with tracking_server() as tracking:
        tracking.mood = mood
        print(tracking.url, flush=True)  # noqa: T201 - the protocol
        for line in sys.stdin:
            if line.strip() == "points":
                lines = [f"{name} {step}\n" for name, step, _ in tracking.points]
                print("".join(lines), flush=True)  # noqa: T201 - the protocol; an empty line is the end
            else:
                tracking.mood = "well"
                print("well", flush=True)  # noqa: T201 - the protocol


if __name__ == "__main__":
    main(cast(Mood, sys.argv[1]))
