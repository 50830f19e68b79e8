"""Errors between processes: sent by name, and raised again in the receiver, which may have another version of DLAC."""

from dlac_pipeline.checkpoint.collectives import failure_named
from dlac_pipeline.checkpoint.collectives import name_failure as failure_message
from dlac_pipeline.lakehouse.errors import (
    CheckpointError,
    DataFileUnreadable,
    DlacError,
    NoProgress,
    NoSuchColumn,
    error_from_kind,
    error_kind,
)
from dlac_pipeline.read.blocks import UnitUnreadable


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


def test_wide_table_is_named_in_part() -> None:
    """A message names twenty of a thousand columns, and the one that was meant."""
    message = str(NoSuchColumn.of("columns", "c_998a", [f"c_{number}" for number in range(1000)]))
    assert "'c_19'], and 980 more, in columns" in message
    assert "did you mean 'c_998'?" in message
