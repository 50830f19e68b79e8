"""Request to a launcher: a job, and how it takes the run over. It travels as JSON."""

from pathlib import Path

from pydantic import Field

from dlac_pipeline.lakehouse.errors import SpecInvalid
from dlac_pipeline.spec.job_spec import JobSpec
from dlac_pipeline.spec.spec_problems import Section, Timeout, Wait

OPERATOR = "operator"
"""The one who notices a failure where no program did: a person who starts a run again."""


class LaunchChoices(Section):
    """Takeover of a run by a launch. The defaults start a run, or resume one that no launch is training."""

    replaces: int | None = Field(default=None, ge=0, lt=2**31)
    """Failed attempt to recover. Unset: the current one."""
    recovers: str = ""
    """Ended run of the orchestrator that this one resumes. An attempt that it claims late is replaced as well."""
    takeover: bool = False
    """Fence off a launch that is still alive. False: be refused."""
    wait_s: Wait = 0.0
    """Seconds to wait for another launch to exit."""
    noticed_by: str = OPERATOR
    """Finder of the failure: an operator, or the sensor that requested this run."""
    noticed_at: float | None = Field(default=None, ge=0, le=1e11)
    """Time of that, in seconds since the epoch. Unset: the launch's begin."""


class Request(LaunchChoices):
    """Request of an orchestrator."""

    spec: JobSpec
    """Resolved."""
    plan_ids: tuple[str, ...] = ()
    repin: bool = False
    launched_by: str = ""
    """The orchestrator's run. Empty: none, and a takeover is noticed at the next commit only."""
    fence_look_s: Timeout = 10.0
    """Seconds between two looks whether another launch has taken the run over."""

    def check_here(self) -> None:
        """Raise `SpecInvalid` if the script is missing on this machine, or `BadInput` for something that a section names."""
        script = self.spec.launch.script
        if not Path(script).is_file():
            raise SpecInvalid(
                f"expected a training script at launch.script = {script!r}, found no such file: correct launch.script, which is "
                "relative to the folder of the job spec"
            )
        for section in self.spec.sections.values():
            section.check_here()
