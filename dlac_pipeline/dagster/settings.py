"""Settings of Dagster that are in no job spec: $DLAC_HOME/orchestration.toml, which each tick reads again."""

import logging
import tomllib
from pathlib import Path

from pydantic import Field

from dlac_pipeline.lakehouse.config import home_folder
from dlac_pipeline.lakehouse.errors import SpecInvalid
from dlac_pipeline.spec.bounds import LONGEST_S, LOST_AFTER_S
from dlac_pipeline.spec.spec_problems import Section, Timeout, Wait, validate

FILE = "orchestration.toml"


class RecoverySettings(Section):
    """Bounds of global recovery."""

    wait_for_old_launch_s: Wait = 30.0
    """Seconds that the earlier launch has to exit after a checkpoint, before a recovery fences it off."""
    gone_after_s: Wait = 5.0
    """Seconds for which the process of a run must have ended, on this node, before its run is failed."""
    outage_s: float = Field(default=86_400.0, ge=0, le=LONGEST_S)
    """Seconds in which recoveries that end because the catalog or the checkpoint store is unavailable do not count as recoveries
    without progress. They are requested until it is available."""
    lost_after_s: Timeout = LOST_AFTER_S
    """Seconds without a heartbeat after which a run is lost, if its process still exists or is on another node."""
    start_within_s: Timeout = 600.0
    """Seconds that a living process of a run on this node has until its first heartbeat."""


class AlertSettings(Section):
    """Receivers of alerts."""

    command: list[str] = Field(default_factory=list)
    """Program and arguments that receive each alert, as JSON on standard input. Empty: alerts are only logged."""
    timeout_s: float = Field(default=30.0, gt=0, le=50)
    """Seconds that the program may take. At most 50, because a tick of Dagster may take 60."""


class Settings(Section):
    """All settings of the file."""

    recovery: RecoverySettings = RecoverySettings()
    """Bounds of global recovery."""
    alerts: AlertSettings = AlertSettings()
    """Receivers of alerts."""


def settings_or_defaults(log: logging.Logger) -> Settings:
    """Return the settings, or the defaults with a note in the log: a recovery does not wait until a file is corrected."""
    try:
        return read_settings()
    except SpecInvalid as err:
        log.error(f"using defaults: {err}")
        return Settings()


def read_settings(home: Path | None = None) -> Settings:
    """Return the settings in the home folder, or the defaults without a file. Raise `SpecInvalid` if one is wrong."""
    path = (home or home_folder()) / FILE
    try:
        return validate(Settings, tomllib.loads(path.read_text()), invalid=f"{str(path)!r} is not valid")
    except FileNotFoundError:
        return Settings()
    except (OSError, ValueError) as err:  # of a number of thousands of digits as well
        raise SpecInvalid(f"cannot read the settings {str(path)!r}: {err}") from err
