"""A real FTP server on loopback, in a thread, for tests of checkpoints behind a URL."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pyftpdlib.authorizers import DummyAuthorizer
from pyftpdlib.handlers import FTPHandler
from pyftpdlib.servers import FTPServer


@contextmanager
def ftp_server(folder: Path, *, rights: str = "elradfmwMT") -> Iterator[str]:
    """The URL of ``folder``, with a user name and a password in it."""
    authorizer = DummyAuthorizer()
    authorizer.add_user("trainer", "sesame", str(folder), perm=rights)

    class Handler(FTPHandler):
        pass

    Handler.authorizer = authorizer
    Handler.log_prefix = ""
    server = FTPServer(("127.0.0.1", 0), Handler)
    port = server.socket.getsockname()[1]
    stopping = threading.Event()

    def serve() -> None:
        while not stopping.is_set():
            server.serve_forever(timeout=0.05, blocking=False, handle_exit=False)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield f"ftp://trainer:sesame@127.0.0.1:{port}/checkpoints"
    finally:
        stopping.set()
        thread.join(30)
        server.close_all()
