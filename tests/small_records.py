"""The smallest valid job spec, manifest, recovery and batch, for tests that need such a record and no lakehouse."""

from datetime import UTC, datetime
from typing import Any

import numpy as np
import torch

from dlac_pipeline.checkpoint.manifest import FileEntry, Manifest
from dlac_pipeline.lakehouse.ledger.recoveries import Recovery
from dlac_pipeline.read.batch import Batch
from dlac_pipeline.spec.job_spec import JobSpec, parse_spec


def raw_spec(**sections: Any) -> dict[str, Any]:
    """Return the smallest valid job spec, with further values in some of its sections."""
    raw: dict[str, Any] = {
        "run": "r",
        "source": {"table": "src.t", "columns": ["x"]},
        "order": {"batch_size": 32},
        "launch": {"script": "train.py"},
    }
    return {**raw, **{name: {**raw.get(name, {}), **values} for name, values in sections.items()}}


def small_spec(**sections: Any) -> JobSpec:
    """Parse the smallest valid job spec, with further values in some of its sections."""
    return parse_spec(raw_spec(**sections), origin="the test")


def small_manifest(*files: FileEntry, **changes: Any) -> Manifest:
    """Return the manifest of a first checkpoint with these files."""
    facts: dict[str, Any] = {
        **{"ledger_uuid": "u", "run": "r", "attempt": 1, "checkpoint_id": "c", "parent": None, "step": 1},
        **{"world_size": 1, "engine": "torch", "leg": 0, "reader_state": [], "libraries": {}, "ledger_rows": []},
    }
    return Manifest(**{**facts, "files": list(files), **changes})


def small_recovery(**changes: Any) -> Recovery:
    """Return the recovery of run "r" by attempt 2 from the death of attempt 1, without a checkpoint and in no time."""
    phases = ("detect_s", "stop_s", "claim_s", "verify_s", "load_s", "first_step_s", "total_s")
    facts: dict[str, Any] = {
        **{"run": "r", "seq": 3, "attempt": 2, "replaced_attempt": 1, "cause": "SIGKILL"},
        **{"noticed_by": "supervisor", "failed_at": datetime(2026, 1, 1, tzinfo=UTC), "resumed_from": None},
        **{"resumed_step": 0, "rows_replayed": 0, "outcome": "resumed"},
    }
    return Recovery(**{**dict.fromkeys(phases, 0.0), **facts, **changes})


def small_batch(**changes: Any) -> Batch:
    """Return a batch without samples, with some changed fields."""
    empty = {"valid": torch.zeros(0, dtype=torch.bool), "source": torch.zeros(0, dtype=torch.int64)}
    counts: dict[str, Any] = {"step": 1, "rows": 0, "tokens": 0, "readers": 1, "tensors": {}}
    return Batch(**{**empty, **counts, "cursors": np.zeros((0, 1, 4), dtype=np.int64), **changes})
