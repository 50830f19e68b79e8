"""Errors between processes: told by name, and raised again where they are heard, perhaps by another version of DLAC."""

from __future__ import annotations

import pytest

from dlac_pipeline.checkpoint.failures import failure_named
from dlac_pipeline.checkpoint.failures import name_failure as told
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
from dlac_pipeline.spec.job_spec import parse_spec
from dlac_pipeline.spec.launch_request import Request
from dlac_pipeline.supervise.follower_attempt import AttemptVerdict
from dlac_pipeline.supervise.supervisor import Supervisor

STRANGE = ["", "Lost", "annotations", "ClassVar", "name_of", "ValueError"]
"""Nothing, what another version may have, names of this module that are no error, and an error of Python's."""


@pytest.mark.parametrize("kind", STRANGE)
def test_foreign_error_has_no_class(kind: str) -> None:
    """What else a module holds is not found by it."""
    assert error_class(kind) is None
    assert error_class("NoProgress") is NoProgress


def test_what_was_told_is_raised_again() -> None:
    """An error that is not known here is the one that was asked for, and names it."""
    assert isinstance(error_from_kind("NoProgress", "three attempts", default=DlacError), NoProgress)
    strange = error_from_kind("NodeAsleep", "host-3", default=CheckpointError)
    assert (type(strange), str(strange)) == (CheckpointError, "NodeAsleep: host-3")


def test_error_kind_is_nearest_known_class() -> None:
    """A class of a part of DLAC is told as the public one that it is; others by their own name."""
    unreadable = UnitUnreadable("gone", path="a.parquet", row_group=3)
    assert (error_kind(unreadable), error_kind(ValueError())) == ("DataFileUnreadable", "ValueError")
    assert type(failure_named(told(unreadable, doing="reading"))) is DataFileUnreadable


@pytest.mark.parametrize("kind", STRANGE)
def test_foreign_verdict_ends_node_with_message(kind: str) -> None:
    """The machine that led has ended the run of an error that is not known here."""
    raw = {
        "run": "r",
        "source": {"table": "src.t", "columns": ["x"]},
        "order": {"batch_size": 32},
        "launch": {"script": "train.py"},
    }
    verdict = AttemptVerdict.from_message(AttemptVerdict(error=(kind, "it was host-3")).to_message())
    with pytest.raises(TrainingFailed, match="it was host-3"):
        Supervisor(Request(spec=parse_spec(raw, origin="the test")))._conclude(verdict)
