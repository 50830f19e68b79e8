"""Request to a launcher: a job, and how it takes the run over. It travels as JSON."""

import base64
import zlib
from collections.abc import Mapping
from pathlib import Path

from pydantic import Field, ValidationError

from dlac_pipeline.lakehouse.errors import SpecInvalid
from dlac_pipeline.spec.job_spec import JobSpec
from dlac_pipeline.spec.spec_problems import Section, Timeout, Wait

OPERATOR = "operator"
"""The one who notices a failure where no program did: a person who starts a run again."""
REQUEST_VARIABLE = "DLAC_REQUEST"
"""Environment variable that carries the request to the nodes of a cluster job."""
REQUEST_FILE_VARIABLE = "DLAC_REQUEST_FILE"
"""Environment variable that names a file with the request: on Kubernetes it is a secret."""


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
            raise SpecInvalid(f"expected a training script at launch.script = {script!r}, found no such file")
        for section in self.spec.sections.values():
            section.check_here()


def pack(request: Request) -> str:
    """Return a request as one word of letters, digits, '-', '_' and '='."""
    return base64.urlsafe_b64encode(zlib.compress(request.model_dump_json().encode())).decode()


def unpack(environment: Mapping[str, str]) -> Request:
    """Return the request in the environment of a node, or in a file that it names. Raise `SpecInvalid` without one."""
    try:
        file = environment.get(REQUEST_FILE_VARIABLE)
        word = Path(file).read_text() if file else environment[REQUEST_VARIABLE]
        return Request.model_validate_json(zlib.decompress(base64.urlsafe_b64decode(word)))
    except (KeyError, OSError, ValueError, zlib.error, ValidationError) as err:
        raise SpecInvalid(
            f"expected a request of this DLAC in ${REQUEST_VARIABLE} or ${REQUEST_FILE_VARIABLE}, found none: submit the job "
            f"with the version that its image has ({err})"
        ) from err
