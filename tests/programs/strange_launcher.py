"""A launcher of another distribution: it trains here, and marks each event."""

from collections.abc import Callable
from typing import Any

from dlac_pipeline.launchers.protocol import Here
from dlac_pipeline.spec.launch_request import Request


class Marked(Here):
    """The core's supervisor in this process. Its events carry the launcher's name."""

    def __init__(self, request: Request, on_event: Callable[[dict[str, Any]], None]) -> None:
        super().__init__(request, on_event=lambda event: on_event({**event, "by": "marked"}))
        self._request_to_show = request

    def render(self) -> str:
        """Return the job as text."""
        return f"train {self._request_to_show.spec.model_dump_json()}"
