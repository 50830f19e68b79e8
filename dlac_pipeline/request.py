"""What is asked of a launcher: a job, and how it takes the run over. It travels as JSON."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from dlac_pipeline.spec import JobSpec

OPERATOR = "operator"
"""Who notices, where no program did: a person who starts a run again."""


class Request(BaseModel):
    """What an orchestrator asks."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    spec: JobSpec
    """Resolved."""
    plan_ids: tuple[str, ...] = ()
    repin: bool = False
    replaces: int | None = None
    takeover: bool = False
    wait_s: float = 0.0
    recovers: str = ""
    """The orchestrator's run that has ended, for which this one goes on: what it claims behind `replaces` is replaced as well."""
    noticed_by: str = OPERATOR
    noticed_at: float | None = None
    """When the failure was noticed, in seconds since the epoch; unset: when this supervisor was started."""
    launched_by: str = ""
    """The orchestrator's run; empty: nobody's, and a takeover is noticed at the next commit only."""
    fence_look_s: float = 10.0
    """Seconds between two looks whether another launch has taken the run over."""
