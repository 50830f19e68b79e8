"""An Iceberg REST catalog over HTTP, on an SQLite catalog of pyiceberg: `rest_catalog.py PORT FOLDER`.

It has only the endpoints that DLAC uses. pyiceberg's own SQL catalog checks requirements and writes metadata. If FOLDER has a
file `drop-answer`, a commit succeeds, and its client gets no answer.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from pyiceberg.catalog.rest import CreateTableRequest
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.exceptions import (
    CommitFailedException,
    NamespaceAlreadyExistsError,
    NoSuchNamespaceError,
    NoSuchTableError,
    TableAlreadyExistsError,
)
from pyiceberg.partitioning import UNPARTITIONED_PARTITION_SPEC
from pyiceberg.table import CommitTableRequest, Table

_STATUS = {
    CommitFailedException: 409,
    NamespaceAlreadyExistsError: 409,
    TableAlreadyExistsError: 409,
    NoSuchNamespaceError: 404,
    NoSuchTableError: 404,
}


class Server(ThreadingHTTPServer):
    """A server of the tables of a folder."""

    def __init__(self, port: int, folder: Path) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.folder = folder
        self.catalog = SqlCatalog(
            "served", uri=f"sqlite:///{folder}/served.db?timeout=30", warehouse=f"file://{folder}/warehouse"
        )


class Handler(BaseHTTPRequestHandler):
    """A handler of one request."""

    server: Server
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        """Return the configuration, or a table."""
        if self._path == ["config"]:
            self._answer(200, {"defaults": {}, "overrides": {}})
        else:
            self._try(lambda: _answer_of(self.server.catalog.load_table(self._table)))

    def do_POST(self) -> None:
        """Make a namespace or a table, or commit to a table."""
        request = self.rfile.read(int(self.headers["Content-Length"]))
        if self._path == ["namespaces"]:
            self._try(lambda: self._make_namespace(json.loads(request)))
        elif self._path[2:] == ["tables"]:
            defaults = dict.fromkeys(("location", "partition-spec", "write-order"))
            self._try(lambda: self._make_table(CreateTableRequest.model_validate({**defaults, **json.loads(request)})))
        else:
            self._try(lambda: self._commit(CommitTableRequest.model_validate_json(request)))

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""

    @property
    def _path(self) -> list[str]:
        return self.path.partition("?")[0].split("/")[2:]

    @property
    def _table(self) -> tuple[str, str]:
        return self._path[1], self._path[3]

    def _make_namespace(self, request: dict[str, Any]) -> dict[str, Any]:
        self.server.catalog.create_namespace(tuple(request["namespace"]))
        return request

    def _make_table(self, request: CreateTableRequest) -> dict[str, Any]:
        made = self.server.catalog.create_table(
            (self._path[1], request.name),
            request.table_schema,
            partition_spec=request.partition_spec or UNPARTITIONED_PARTITION_SPEC,
            properties=request.properties,
        )
        return _answer_of(made)

    def _commit(self, request: CommitTableRequest) -> dict[str, Any]:
        table = self.server.catalog.load_table(self._table)
        landed = self.server.catalog.commit_table(table, request.requirements, request.updates)
        return json.loads(landed.model_dump_json())  # type: ignore[no-any-return]  # an object

    def _try(self, work: Callable[[], dict[str, Any]]) -> None:
        try:
            found = work()
        except tuple(_STATUS) as err:
            status = _STATUS[type(err)]
            self._answer(status, {"error": {"message": str(err), "type": type(err).__name__, "code": status}})
            return
        drops = self.server.folder / "drop-answer"
        if self.command == "POST" and drops.exists():
            drops.unlink()
            self.close_connection = True
            self.connection.close()
        else:
            self._answer(200, found)

    def _answer(self, status: int, answer: dict[str, Any]) -> None:
        content = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


def _answer_of(table: Table) -> dict[str, Any]:
    metadata = json.loads(table.metadata.model_dump_json())
    return {"metadata-location": table.metadata_location, "metadata": metadata, "config": {}}


if __name__ == "__main__":
    Server(int(sys.argv[1]), Path(sys.argv[2])).serve_forever()
