"""Receivers of what listeners send, and listeners of another distribution, for tests."""

from __future__ import annotations

import gzip
import json
import struct
import threading
import urllib.request
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from dlac_pipeline.extensions.listeners.settings import ListenersSpec
from dlac_pipeline.spec.job_spec import JobSpec
from tests.conftest import PROGRAMS
from tests.installed import install_distribution

STRANGERS = {"records": "Records", "raises": "Raises", "holds_lock": "HoldsLock"}


def install_strangers(folder: Path) -> Path:
    """Make a folder for PYTHONPATH in which a distribution has listeners as entry points."""
    source = (PROGRAMS / "strange_listeners.py").read_text()
    points = [f"{name} = strange_listeners:{kind}" for name, kind in STRANGERS.items()]
    return install_distribution(folder, "strange-listeners", {"strange_listeners": source}, {"dlac.listeners": points})


def with_listeners(spec: JobSpec, **listeners: Any) -> JobSpec:
    """Return a spec with listeners."""
    return spec.model_copy(update={"listeners": ListenersSpec.model_validate(listeners)})


def use_libraries(monkeypatch: pytest.MonkeyPatch, receiver: Receiver, folder: Path) -> None:
    """Let the libraries send to the receiver, and write their files into a folder."""
    for name, value in {
        **{"OPENLINEAGE_URL": receiver.url, "OTEL_EXPORTER_OTLP_ENDPOINT": receiver.url, "WANDB_DIR": str(folder)},
        **{"OTEL_METRIC_EXPORT_INTERVAL": "1000", "WANDB_MODE": "offline", "MLFLOW_ALLOW_FILE_STORE": "true"},
        "MLFLOW_TRACKING_URI": (folder / "mlruns").as_uri(),
    }.items():
        monkeypatch.setenv(name, value)


def read_events(path: Path) -> list[dict[str, Any]]:
    """Return the events in a file of the recording listener."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def read_wandb_records(path: Path) -> Iterator[bytes]:
    """Yield the records of a file of W&B: a header, then LevelDB's log format in blocks of 32 KiB."""
    content, at, record = path.read_bytes(), 7, b""
    while at < len(content):
        left = 32_768 - at % 32_768
        if left < 7:
            at += left
            continue
        _, size, kind = struct.unpack_from("<IHB", content, at)
        record += content[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # a whole record, or the last part of one
            yield record
            record = b""


@dataclass(frozen=True, kw_only=True)
class WandbRun:
    """A run of W&B in a file."""

    run_id: str
    name: str
    losses: dict[int, list[float]]
    summary: dict[str, Any]


def read_wandb_run(path: Path) -> WandbRun:
    """Return the run in a file of W&B."""
    from wandb.proto import wandb_internal_pb2

    losses: dict[int, list[float]] = defaultdict(list)
    summary: dict[str, Any] = {}
    name = ""
    for data in read_wandb_records(path):
        record = wandb_internal_pb2.Record.FromString(data)
        name = record.run.display_name or name
        row = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
        if "loss" in row:
            losses[row["step"]].append(row["loss"])
        summary |= {item.key: json.loads(item.value_json) for item in record.summary.update}
    return WandbRun(run_id=path.stem.removeprefix("run-"), name=name, losses=dict(losses), summary=summary)


class Receiver:
    """An HTTP server that keeps the body of each request, by path."""

    def __init__(self, server: ThreadingHTTPServer, bodies: dict[str, list[bytes]]) -> None:
        self.url = f"http://127.0.0.1:{server.server_address[1]}"
        self.bodies = bodies

    def read_json(self, path: str) -> list[dict[str, Any]]:
        """Return the JSON documents that a path received."""
        return [json.loads(body) for body in self.bodies[path]]


@contextmanager
def running_receiver() -> Iterator[Receiver]:
    """Yield a running receiver."""
    bodies: dict[str, list[bytes]] = defaultdict(list)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            bodies[self.path].append(gzip.decompress(body) if self.headers["Content-Encoding"] == "gzip" else body)
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            """Log nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield Receiver(server, bodies)
        server.shutdown()


def scrape(port: int) -> str:
    """Return the text of an endpoint for Prometheus. Empty without an answer."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
            return str(answer.read().decode())
    except OSError:
        return ""
