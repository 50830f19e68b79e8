"""Lakehouses on SeaweedFS's REST catalog or PostgreSQL, with S3: `python -m tests.served_lakehouses` runs the demo."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dlac_pipeline.lakehouse.config import LakehouseConfig
from tests.postgres_server import postgres
from tests.seaweedfs import SeaweedFS, seaweedfs

KINDS = ("seaweedfs", "postgres")


@dataclass(frozen=True, kw_only=True, slots=True)
class ServedLakehouse:
    """A lakehouse without files on this node, and the server that has them."""

    config: LakehouseConfig
    server: SeaweedFS

    @property
    def store(self) -> dict[str, Any]:
        """The settings of `checkpoint` that lead to its store."""
        return {"store": "s3://store/checkpoints", "store_properties": self.server.properties}

    def variables(self, name: str) -> Mapping[str, str]:
        """Return the environment by which PyIceberg finds its catalog under a name."""
        settings = {"uri": self.config.uri, "warehouse": self.config.warehouse, **self.config.properties}
        return {_variable(name, key): value for key, value in settings.items()}


@contextmanager
def served_lakehouse(kind: str, folder: Path) -> Iterator[ServedLakehouse]:
    """Start the servers of one of `KINDS`, with their files in a folder."""
    with ExitStack() as stack:
        server = stack.enter_context(seaweedfs(folder))
        config = server.lakehouse("dlac")
        if kind == "postgres":
            uri = stack.enter_context(postgres())
            config = LakehouseConfig(uri=uri, warehouse="s3://store/warehouse", properties=server.properties)
        yield ServedLakehouse(config=config, server=server)


def _variable(name: str, key: str) -> str:
    """Return the variable of PyIceberg that has the property `key` of a catalog: s3.access-key-id is S3__ACCESS_KEY_ID."""
    return f"PYICEBERG_CATALOG__{name}__{key.replace('.', '__').replace('-', '_')}".upper()


def _run_demo(kind: str, *options: str) -> int:
    with tempfile.TemporaryDirectory(prefix="dlac-served-") as folder, served_lakehouse(kind, Path(folder)) as served:
        environment = {**os.environ, **served.variables("demo")}
        command = [sys.executable, "-m", "examples.demo.main_job", "--catalog", "demo"]
        command += ["--store", served.store["store"], *options]
        return subprocess.run(command, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(_run_demo(*sys.argv[1:]))
