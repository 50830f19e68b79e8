"""A scheduler that is at hand: TorchX's own for local processes, given the very job that Kubernetes would get."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

from dlac_pipeline.launchers.schedulers import Kubernetes
from torchx.schedulers.api import Stream
from torchx.specs import AppDef

from dlac_pipeline.request import Request
from dlac_pipeline.spec import JobSpec, parse_spec

GOOD: dict[str, Any] = {
    "run": "Web_text.v2",
    "source": {"table": "src.t", "columns": ["x"]},
    "order": {"batch_size": 32, "key_groups": 8},
    "launch": {"script": "/app/train.py", "nodes": "2:4", "deadline_s": 90},
    "checkpoint": {"store": "s3://bucket/checkpoints"},
    "lakehouse": {"uri": "postgresql+psycopg2://db/dlac", "warehouse": "s3://bucket/lake"},
}


def asked(on: str, cluster: dict[str, Any], **launch: Any) -> Request:
    """A request for a job on a scheduler."""
    return Request(
        spec=parse_spec(
            {**GOOD, "launch": {**GOOD["launch"], "on": on, **launch}, "cluster": cluster}, origin="the test"
        ),
        replaces=3,
        launched_by="dagster-run",
    )


class Processes(Kubernetes):
    """Each pod's command as a process here."""

    name: ClassVar[str] = "local_cwd"
    stream: ClassVar[Stream] = Stream.STDOUT

    def __init__(self, spec: JobSpec, logs: Path) -> None:
        super().__init__(spec)
        self._logs = logs

    def app(self, request: Request) -> AppDef:
        """The job; $REPLICA tells its processes apart."""
        app = super().app(request)
        app.roles[0].env["REPLICA"] = "${replica_id}"
        return app

    def options(self, request: Request, *, render: bool) -> dict[str, Any]:
        """Where its logs are."""
        return {"log_dir": str(self._logs)}
