"""What is asked of a launcher: a job, and how it takes the run over. It travels as JSON."""

from __future__ import annotations

from pydantic import Field

from dlac_pipeline.spec import JobSpec
from dlac_pipeline.spec_problems import LONGEST_WAIT_S, Section

OPERATOR = "operator"
"""Who notices, where no program did: a person who starts a run again."""


class Request(Section):
    """What an orchestrator asks."""

    spec: JobSpec
    """Resolved."""
    plan_ids: tuple[str, ...] = ()
    repin: bool = False
    replaces: int | None = Field(default=None, ge=0, lt=2**31)
    takeover: bool = False
    wait_s: float = Field(default=0.0, ge=0, le=LONGEST_WAIT_S)
    recovers: str = ""
    """The orchestrator's run that has ended, for which this one goes on: what it claims behind `replaces` is replaced as well."""
    noticed_by: str = OPERATOR
    noticed_at: float | None = Field(default=None, ge=0, le=1e11)
    """When the failure was noticed, in seconds since the epoch; unset: when this supervisor was started."""
    launched_by: str = ""
    """The orchestrator's run; empty: nobody's, and a takeover is noticed at the next commit only."""
    fence_look_s: float = Field(default=10.0, gt=0, le=LONGEST_WAIT_S)
    """Seconds between two looks whether another launch has taken the run over."""
