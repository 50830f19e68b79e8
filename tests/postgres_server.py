"""A real PostgreSQL server for tests, on a socket in a private folder."""

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.conftest import wait_until

needs_postgres = [
    pytest.mark.skipif(find_spec("psycopg2") is None, reason="needs psycopg2: pip install dlac-pipeline[postgres]"),
    pytest.mark.skipif(shutil.which("initdb") is None, reason="needs PostgreSQL's initdb and postgres on the PATH"),
]
"""Marks of tests that start a server."""


@contextmanager
def postgres(*, listens: str = "", under: Sequence[str] = (), connections: int = 100) -> Iterator[str]:
    """Start a PostgreSQL server on a socket in its own folder, and yield its address in SQLAlchemy's form.

    `listens` is an IP address whose network is admitted too. `under` is a command that runs another one.
    `connections` is the maximum number of clients.
    """
    user = (
        pwd.getpwnam("nobody") if os.getuid() == 0 else pwd.getpwuid(os.getuid())
    )  # PostgreSQL refuses to run as root
    folder = Path(tempfile.mkdtemp(prefix="dlac-postgres-"))
    try:
        os.chown(folder, user.pw_uid, user.pw_gid)
        who = {"user": user.pw_uid, "group": user.pw_gid, "cwd": folder} if os.getuid() == 0 else {"cwd": folder}
        data = str(folder / "data")
        command = ["initdb", "-D", data, "-A", "trust", "-U", "dagster", "--no-sync"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, **who)
        if listens:
            with (folder / "data" / "pg_hba.conf").open("a") as stream:
                stream.write(f"host all all {listens}/24 trust\n")
            under = [*under, "setpriv", f"--reuid={user.pw_uid}", f"--regid={user.pw_gid}", "--clear-groups"]
        settings = ["-k", str(folder), "-c", f"listen_addresses={listens}", "-c", "fsync=off"]
        settings += ["-c", f"max_connections={connections}"]
        # A node that is lost with its network leaves connections.
        keepalive = {"idle": 5, "interval": 5, "count": 2}
        settings += [part for name, value in keepalive.items() for part in ("-c", f"tcp_keepalives_{name}={value}")]
        command = [*under, "postgres", "-D", data, *settings]
        with subprocess.Popen(command, stderr=subprocess.DEVNULL, **{"cwd": folder} if under else who) as server:
            try:
                ready = ["psql", "-h", str(folder), "-U", "dagster", "-c", "SELECT 1", "postgres"]
                wait_until(
                    lambda: subprocess.run(ready, capture_output=True, check=False).returncode == 0,
                    what="the server",
                    within_s=30,
                )
                yield f"postgresql+psycopg2://dagster@/postgres?host={folder}"
            finally:
                server.send_signal(signal.SIGINT)  # SIGTERM would wait for its clients
    finally:
        shutil.rmtree(folder, ignore_errors=True)
