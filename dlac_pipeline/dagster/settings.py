"""Settings of Dagster besides the job specs: $DLAC_HOME/orchestration.toml, which each tick reads again."""

from __future__ import annotations

import logging
import tomllib
from pathlib import Path

from pydantic import Field, ValidationError

from dlac_pipeline.lakehouse.errors import SpecInvalid
from dlac_pipeline.spec.job_spec import home_folder
from dlac_pipeline.spec.spec_problems import LONGEST_S, LONGEST_WAIT_S, Section, place_said, problem_said
from dlac_pipeline.supervise.retry_policy import LOST_AFTER_S

FILE = "orchestration.toml"


class RecoverySettings(Section):
    """Bounds of global recovery."""

    wait_for_old_launch_s: float = Field(
        default=30.0,
        description="Seconds that a recovery gives the launch before it to leave, behind a checkpoint; then it is fenced off.",
        ge=0,
        le=LONGEST_WAIT_S,
    )
    gone_after_s: float = Field(
        default=5.0,
        description="Seconds for which a run's process must be seen to be gone, on this machine, before its run is failed.",
        ge=0,
        le=LONGEST_WAIT_S,
    )
    outage_s: float = Field(
        default=86_400.0,
        description="Seconds for which recoveries that end because the catalog or the checkpoint store is away are not counted "
        "as recoveries without progress: one is requested after another until it is back.",
        ge=0,
        le=LONGEST_S,
    )
    lost_after_s: float = Field(
        default=LOST_AFTER_S,
        description="Seconds without a heartbeat after which a run is lost, although its process is there, or is elsewhere.",
        gt=0,
        le=LONGEST_WAIT_S,
    )
    start_within_s: float = Field(
        default=600.0,
        description="Seconds that a run's process on this machine gets for its first heartbeat, as long as it is there.",
        gt=0,
        le=LONGEST_WAIT_S,
    )


class AlertSettings(Section):
    """Receivers of alerts."""

    command: list[str] = Field(
        default_factory=list,
        description="Program and arguments that are given each alert, as JSON on standard input; empty: alerts are only logged.",
    )
    timeout_s: float = Field(
        default=30.0,
        description="Seconds that it may take; 50 at most, as a tick of Dagster's may take 60.",
        gt=0,
        le=50,
    )


class Settings(Section):
    """All of it."""

    recovery: RecoverySettings = Field(default=RecoverySettings(), description="Bounds of global recovery.")
    alerts: AlertSettings = Field(default=AlertSettings(), description="Who is told.")


def settings_or_defaults(log: logging.Logger) -> Settings:
    """Return the settings, or the defaults with a note in the log: a recovery does not wait until a file is corrected."""
    try:
        return read_settings()
    except SpecInvalid as err:
        log.error(f"using defaults: {err}")
        return Settings()


def read_settings(home: Path | None = None) -> Settings:
    """Return the settings in the home folder, or the defaults without a file.

    Raises:
        SpecInvalid: the file cannot be read, or a field is wrong.
    """
    path = (home or home_folder()) / FILE
    try:
        return Settings.model_validate(tomllib.loads(path.read_text()))
    except FileNotFoundError:
        return Settings()
    except ValidationError as err:
        lines = [
            f"  {place_said(problem['loc'], Settings)}: {problem_said(problem, Settings)}" for problem in err.errors()
        ]
        raise SpecInvalid(f"{str(path)!r} is not valid:\n" + "\n".join(lines)) from err
    except (OSError, ValueError) as err:  # of a number of thousands of digits as well
        raise SpecInvalid(f"cannot read the settings {str(path)!r}: {err}") from err
