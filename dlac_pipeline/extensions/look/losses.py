"""Losses of a run: of every optimizer step on its surviving lineage, from the checkpoint rows of the ledger."""

import struct
from dataclasses import dataclass
from typing import Any

import duckdb

from dlac_pipeline.audit.lakehouse_sql import rows_of, sql_script


@dataclass(frozen=True, kw_only=True, slots=True)
class LossCurve:
    """The losses of a run, and where it was checkpointed and recovered."""

    run: str
    losses: dict[int, float]
    """Optimizer step -> global loss."""
    checkpoint_steps: list[int]
    recoveries: list[dict[str, Any]]
    """The run's rows of `recoveries`, oldest first."""


def read_losses(connection: duckdb.DuckDBPyConnection, run: str) -> LossCurve:
    """The loss curve of a run, from an audit connection."""
    checkpoints = rows_of(connection, sql_script("losses"), [run])
    losses: dict[int, float] = {}
    for row in checkpoints:
        losses |= zip(range(row["from_step"] + 1, row["step"] + 1), row["losses"] or [], strict=False)
    return LossCurve(
        run=run,
        losses=losses,
        checkpoint_steps=[row["step"] for row in checkpoints],
        recoveries=rows_of(connection, "FROM recoveries WHERE run = ? ORDER BY seq", [run]),
    )


def differing_steps(one: LossCurve, other: LossCurve) -> list[int]:
    """Return the steps at which the losses of two runs differ, bit for bit. A step of only one run differs."""
    steps = sorted(one.losses.keys() | other.losses.keys())
    return [step for step in steps if _bits_of(one.losses.get(step)) != _bits_of(other.losses.get(step))]


def _bits_of(loss: float | None) -> bytes | None:
    """Return the bits of a loss. Bits of NaN are equal, too."""
    return None if loss is None else struct.pack("<d", loss)
