"""A launcher of another distribution and its section of the job spec: it trains here, and marks each event."""

from collections.abc import Callable
from typing import Any

from pydantic import Field

from dlac_pipeline.lakehouse.errors import BadInput
from dlac_pipeline.launchers.protocol import Here
from dlac_pipeline.spec.launch_request import Request
from dlac_pipeline.spec.sections import ExtensionSection


class MarkSpec(ExtensionSection):
    """Marks of events."""

    text: str = "marked"
    """Text of the mark."""
    most: int = Field(default=9, ge=1, le=99)
    """Most marks."""
    token: str = ""
    """A secret."""

    def check_here(self) -> None:
        """Refuse a text that is not installed."""
        if self.text == "missing":
            raise BadInput("expected a mark that is installed, found 'missing'")


class Marked(Here):
    """The core's supervisor in this process. Its events carry the mark."""

    def __init__(self, request: Request, on_event: Callable[[dict[str, Any]], None]) -> None:
        mark = request.spec.section(MarkSpec).text
        super().__init__(request, on_event=lambda event: on_event({**event, "by": mark}))
        self._spec_to_show = request.spec

    def render(self) -> str:
        """Return the job as text."""
        return f"train {self._spec_to_show.model_dump_json()}"
