"""An S3 server process, and a network to it that can be cut."""

import atexit
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pyarrow.fs as pafs
import requests

from dlac_pipeline.extensions.chaos.proxy import NetworkProxy
from dlac_pipeline.lakehouse.config import LakehouseConfig
from tests.conftest import wait_until
from tests.ports import own_port


@dataclass
class ObjectStore:
    """The server, and a log of its requests. The first bytes of the log come from earlier tests."""

    port: int
    log: Path
    skipped: int = 0

    @property
    def url(self) -> str:
        """Its address."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def files(self) -> pafs.S3FileSystem:
        """Its file system."""
        credentials = {"access_key": "key", "secret_key": "secret", "region": "us-east-1"}
        return pafs.S3FileSystem(endpoint_override=self.url, allow_bucket_creation=True, **credentials)

    def requests(self, method: str, part: str) -> int:
        """Return the number of requests of a method whose path contains `part`."""
        lines = self.log.read_bytes()[self.skipped :].decode().splitlines()
        return sum(f"{method} /" in line and part in line for line in lines)

    def properties(self, url: str | None = None) -> dict[str, str]:
        """Return pyiceberg's properties for it, or for `url`, which leads to it."""
        named = {"endpoint": url or self.url, "region": "us-east-1"}
        named |= {"access-key-id": "key", "secret-access-key": "secret"}
        return {f"s3.{name}": value for name, value in named.items()}

    def lakehouse(self, home: Path) -> LakehouseConfig:
        """Return a lakehouse with its warehouse in the store."""
        return LakehouseConfig(warehouse="s3://lake/warehouse", properties=self.properties()).at_home(home)

    def glue(self) -> LakehouseConfig:
        """Return a lakehouse in the AWS Glue catalog that the same server has."""
        properties = {name.replace("s3.", "glue."): value for name, value in self.properties().items()}
        return LakehouseConfig(
            type="glue", warehouse="s3://lake/warehouse", properties={**self.properties(), **properties}
        )


@contextmanager
def object_store() -> Iterator[ObjectStore]:
    """Yield the server of this process, with an empty bucket alone. It is in use once at a time."""
    server = _server()
    requests.post(f"{server.url}/moto-api/reset", timeout=60).raise_for_status()
    server.files.create_dir("lake")
    yield ObjectStore(server.port, server.log, server.log.stat().st_size)


@cache
def _server() -> ObjectStore:
    """Start a server that ends with this process."""
    made = ObjectStore(own_port(), Path(tempfile.mkdtemp()) / "requests.log")
    with made.log.open("wb") as log:
        command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(made.port)]
        server = subprocess.Popen(command, stdout=log, stderr=log)
    atexit.register(_stop, server, made.log.parent, os.getpid())
    wait_until(lambda: f"Running on {made.url}" in made.log.read_text(), what="the S3 server")
    return made


def _stop(server: subprocess.Popen[bytes], folder: Path, starter: int) -> None:
    if os.getpid() == starter:  # and not a process that it has forked
        server.kill()
        server.wait()
        shutil.rmtree(folder)


class Network(NetworkProxy):
    """The network to a server on this node."""

    def __init__(self, port: int) -> None:
        super().__init__("127.0.0.1", port)
        self.url = f"http://{self.address}"
