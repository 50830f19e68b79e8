"""The asset check of a rehearsal: which outcomes fail it, and its description."""

from __future__ import annotations

from typing import Any

import dagster as dg
import pytest

from dlac_pipeline.dagster.assets.checks import rehearse_model
from dlac_pipeline.dagster.training_runs import model_key
from dlac_pipeline.lakehouse.config import LakehouseConfig
from dlac_pipeline.lakehouse.errors import DlacError, NoRestorableCheckpoint, NothingToRehearse
from dlac_pipeline.lakehouse.iceberg.connect import connect

ERROR, WARN = dg.AssetCheckSeverity.ERROR, dg.AssetCheckSeverity.WARN


@pytest.mark.parametrize(
    ("error", "severity", "description"),
    [
        (NothingToRehearse("expected a checkpoint that has a successor"), WARN, "expected a checkpoint"),
        (NoRestorableCheckpoint("all are damaged"), ERROR, "NoRestorableCheckpoint: all are damaged"),
    ],
)
def test_impossible_rehearsal_is_warning(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any, error: DlacError, severity: dg.AssetCheckSeverity, description: str
) -> None:
    """A run that cannot be rehearsed proves nothing about its checkpoints. Every other error is one of the run."""

    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("dlac_pipeline.extensions.replay.rehearse.rehearse_run", fail)
    result = rehearse_model(connect(LakehouseConfig().at_home(tmp_path)), "r")
    assert (result.passed, result.severity, result.asset_key) == (False, severity, model_key("r"))
    assert (result.description or "").startswith(description)
