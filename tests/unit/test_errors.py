"""Errors between processes: sent by name, and raised again in the receiver, which may have another version of DLAC."""

from __future__ import annotations

from dataclasses import asdict

import pytest

from dlac_pipeline.checkpoint.collectives import failure_named
from dlac_pipeline.checkpoint.collectives import name_failure as failure_message
from dlac_pipeline.lakehouse.errors import (
    CheckpointError,
    DataFileUnreadable,
    DlacError,
    NoProgress,
    TrainingFailed,
    error_class,
    error_from_kind,
    error_kind,
)
from dlac_pipeline.read.blocks import UnitUnreadable
from dlac_pipeline.spec.launch_request import Request
from dlac_pipeline.supervise.follower_attempt import AttemptVerdict
from dlac_pipeline.supervise.supervisor import Supervisor
from tests.small_records import small_spec

STRANGE = ["", "Lost", "annotations", "ClassVar", "name_of", "ValueError"]
"""Empty, names of another version, names in this module that are no error, and a Python error."""


@pytest.mark.parametrize("kind", STRANGE)
def test_foreign_error_has_no_class(kind: str) -> None:
    """Other names of the module are not found."""
    assert error_class(kind) is None
    assert error_class("NoProgress") is NoProgress


def test_received_error_is_raised() -> None:
    """An unknown error is raised as the fallback class, and the message has its name."""
    assert isinstance(error_from_kind("NoProgress", "three attempts", default=DlacError), NoProgress)
    strange = error_from_kind("NodeAsleep", "host-3", default=CheckpointError)
    assert (type(strange), str(strange)) == (CheckpointError, "NodeAsleep: host-3")


def test_error_kind_is_nearest_known_class() -> None:
    """An internal error class is sent as its nearest public base class, other classes by their own name."""
    unreadable = UnitUnreadable("gone", path="a.parquet", row_group=3)
    assert (error_kind(unreadable), error_kind(ValueError())) == ("DataFileUnreadable", "ValueError")
    assert type(failure_named(failure_message(unreadable, doing="reading"))) is DataFileUnreadable


@pytest.mark.parametrize("kind", STRANGE)
def test_foreign_verdict_ends_node_with_message(kind: str) -> None:
    """The leading node has ended the run with an error class that is unknown here."""
    verdict = AttemptVerdict.from_message(asdict(AttemptVerdict(error=(kind, "it was host-3"))))
    with pytest.raises(TrainingFailed, match="it was host-3"):
        Supervisor(Request(spec=small_spec()))._conclude(verdict)
