"""A PostgreSQL server for tests: Debian's, on loopback, with a password, gone with the block."""

import os
import secrets
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psycopg2
import pytest

from pollux.local.ports import free_port

USER = "pollux"


@dataclass(frozen=True, slots=True)
class PostgresServer:
    """A running server with the databases ``airflow`` and ``mlflow``."""

    port: int
    password: str

    def url(self, database: str) -> str:
        return f"postgresql+psycopg2://{USER}:{self.password}@127.0.0.1:{self.port}/{database}"

    def query(self, database: str, statement: str) -> list[tuple[object, ...]]:
        """The rows of one statement, in a transaction of its own unless it makes a database."""
        connection = psycopg2.connect(
            host="127.0.0.1", port=self.port, user=USER, password=self.password, dbname=database
        )
        connection.autocommit = True
        try:
            with connection.cursor() as cursor:
                cursor.execute(statement)
                return list(cursor.fetchall()) if cursor.description else []
        finally:
            connection.close()


def programs() -> Path | None:
    """The folder of PostgreSQL's newest server programs, which Debian keeps out of the PATH."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda path: int(path.parts[4]))
    return found[-1].parent if found else None


@contextmanager
def postgres_server() -> Iterator[PostgresServer]:
    """Start one; skips the test where PostgreSQL is not installed."""
    bin_folder = programs()
    if bin_folder is None:
        pytest.skip("needs postgresql: no /usr/lib/postgresql/*/bin (Debian: apt-get install postgresql)")
    folder = Path(tempfile.mkdtemp(prefix="pollux-pg-", dir="/tmp"))
    server = PostgresServer(free_port(), secrets.token_hex(12))
    as_owner: tuple[str, ...] = ()
    try:
        (folder / "password").write_text(server.password)
        if os.geteuid() == 0:
            as_owner = ("setpriv", "--reuid=postgres", "--regid=postgres", "--clear-groups")
            shutil.chown(folder, "postgres", "postgres")
            shutil.chown(folder / "password", "postgres", "postgres")
        init = (bin_folder / "initdb", "--pgdata", folder / "data", "--username", USER, "--no-sync")
        auth = ("--auth", "scram-sha-256", "--pwfile", folder / "password", "--encoding", "UTF8")
        subprocess.run((*as_owner, *init, *auth), check=True, capture_output=True, cwd=folder)
        options = f"-p {server.port} -k {folder} -c listen_addresses=127.0.0.1 -c fsync=off"
        control = (*as_owner, bin_folder / "pg_ctl", "--pgdata", folder / "data")
        start = ("--wait", "--timeout", "60", "--log", folder / "log", "--options", options, "start")
        subprocess.run((*control, *start), check=True, stdout=subprocess.DEVNULL, cwd=folder)
        try:
            for name in ("airflow", "mlflow"):
                server.query("postgres", f"CREATE DATABASE {name}")
            yield server
        finally:
            stop = ("--wait", "--mode", "immediate", "stop")
            subprocess.run((*control, *stop), check=True, stdout=subprocess.DEVNULL, cwd=folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
