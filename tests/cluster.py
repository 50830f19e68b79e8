"""A scheduler that is at hand: TorchX's own for local processes, given the very job that Kubernetes would get."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

from torchx.schedulers.api import Stream

from dlac_pipeline.launchers.schedulers import Kubernetes
from dlac_pipeline.request import Request
from dlac_pipeline.spec import JobSpec


class Processes(Kubernetes):
    """Each pod's command as a process here."""

    name: ClassVar[str] = "local_cwd"
    stream: ClassVar[Stream] = Stream.STDOUT

    def __init__(self, spec: JobSpec, logs: Path) -> None:
        super().__init__(spec)
        self._logs = logs

    def options(self, request: Request, *, render: bool) -> dict[str, Any]:
        """Where its logs are."""
        return {"log_dir": str(self._logs)}
