"""Page of the model for a training run: plots, its last checkpoints, its incidents, and SQL for further questions."""

import logging
import math
from collections.abc import Callable
from dataclasses import asdict, fields
from typing import Any

from dlac_pipeline.audit import audit, lakehouse_sql
from dlac_pipeline.dagster.metadata import picture, sql_metadata, table
from dlac_pipeline.extensions.kept_checkpoints.listing import list_checkpoints
from dlac_pipeline.extensions.look import goodput, losses, plots
from dlac_pipeline.extensions.look.run_state import run_status
from dlac_pipeline.lakehouse.iceberg.connect import Lakehouse
from dlac_pipeline.lakehouse.ledger.ledger import Ledger
from dlac_pipeline.lakehouse.ledger.recoveries import Recovery
from dlac_pipeline.lakehouse.ledger.typed_rows import MembershipRow

_log = logging.getLogger(__name__)
_SHOWN = 10
_CHECKPOINT = ("step", "checkpoint_id", "committed_at", "attempt", "bytes", "state", "verified_at", "names")
_INCIDENT = (
    *(each.name for each in fields(Recovery) if each.name not in ("run", "seq", "format_version")),
    *("down_s", "recovered_s"),  # the operator's time, and that of the recovery
)


def _drawn(title: str, draw: Callable[..., bytes], *content: Any) -> Any:
    """Return a picture, or the reason why there is none: the run was trained, whatever its pictures are."""
    try:
        return picture(title, draw(*content))
    except Exception as err:
        _log.warning("%r is not drawn: %s: %s", title, type(err).__name__, err)
        return f"not drawn: {type(err).__name__}: {err}"


def model_page(lakehouse: Lakehouse, run: str) -> dict[str, Any]:
    """Return metadata of the model as `run` left it. Raise `NoSuchRun` if the ledger has no row of it."""
    status = run_status(lakehouse, run)
    loss = status["loss"]
    if loss is not None and not math.isfinite(loss):
        loss = str(loss)  # Dagster stores metadata as JSON
    with audit.open_run(lakehouse, run) as connection:
        newest = "FROM recoveries WHERE run = ? ORDER BY seq DESC LIMIT ?"
        found = lakehouse_sql.rows_of(connection, newest, [run, _SHOWN])
        curves = [losses.read_losses(connection, run)]
        pictures = {
            "loss_curve": _drawn("Loss on the surviving lineage; recoveries are marked", plots.draw_losses, curves),
            "coverage": _drawn("Coverage of files and row groups", plots.draw_coverage, connection, run),
            "checkpoint_cost": _drawn("Cost of each checkpoint", plots.draw_costs, connection, run),
            "time": _drawn("Time of each attempt by cause", plots.draw_goodput, connection, run),
        }
        times = goodput.read_attempt_times(connection, run)[-_SHOWN:]
    ettr = (status["goodput"] or {}).get("ettr")
    incidents = [Recovery(**row) for row in found]
    checkpoints = [asdict(each) for each in reversed(list_checkpoints(lakehouse, run)[-_SHOWN:])]
    changes = Ledger(lakehouse).rows(run, kinds=(MembershipRow,))[: -_SHOWN - 1 : -1]
    memberships = [
        {"first_step": row.first_step, "attempt": row.attempt, "groups": ", ".join(map(str, row.groups))}
        for row in changes
    ]
    return {
        "run": run,
        "step": status["step"],
        **({} if loss is None else {"loss": loss}),
        "state": status["state"],
        "attempts": status["attempt"],
        "head_checkpoint": status["head_checkpoint"] or "(none)",
        "recoveries": status["recoveries"],
        **({} if ettr is None else {"effective_training_time_ratio": ettr}),
        **pictures,
        **table("last_checkpoints", [{name: row[name] for name in _CHECKPOINT} for row in checkpoints]),
        **table("last_attempts", times[::-1]),
        **table("replica_groups", memberships),
        **table("incidents", [{name: getattr(each, name) for name in _INCIDENT} for each in incidents]),
        "sql": sql_metadata(f"SELECT checkpoint_id, step FROM lineage WHERE run = '{run}' ORDER BY step"),
    }
