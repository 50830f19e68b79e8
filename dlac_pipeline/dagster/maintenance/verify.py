"""The job that verifies the newest checkpoint of every run."""

import time
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import dagster as dg
from pydantic import Field

from dlac_pipeline.dagster.metadata import table
from dlac_pipeline.dagster.resources import LakehouseResource
from dlac_pipeline.lakehouse import errors
from dlac_pipeline.spec.spec_problems import Section

if TYPE_CHECKING:
    from dlac_pipeline.checkpoint.listing import Verification
    from dlac_pipeline.lakehouse.iceberg.connect import Lakehouse
    from dlac_pipeline.lakehouse.store_files import StoreFiles


class VerifyConfig(Section, dg.Config):
    """Checkpoints to verify."""

    runs: list[str] = Field(default=[])
    """Training runs; empty: all of the lakehouse."""
    not_since_h: float = Field(default=20.0, ge=0, le=87_600)
    """Hours for which a verified checkpoint is not read again."""


@dg.op(
    description="Reads the newest checkpoint of each run again, compares its digests, and records the result in the ledger."
)
def newest_checkpoints_verified(
    context: dg.OpExecutionContext, config: VerifyConfig, lakehouse: LakehouseResource
) -> dg.Output[None]:
    """A table of what was found. Fails when a checkpoint is damaged or a named run does not exist, after all were read."""
    from dlac_pipeline.dagster.assets.head_verification import verify_head
    from dlac_pipeline.lakehouse.ledger.ledger import Ledger

    place = lakehouse.lakehouse()
    rows: list[dict[str, Any]] = []
    problems, known = [], Ledger(place).runs()
    problems += [f"{run}: there is no run of this name" for run in config.runs if run not in known]
    for run in [run for run in config.runs or known if run in known]:
        since = datetime.now(UTC) - timedelta(hours=config.not_since_h)
        if _held_since(place, run, since):
            context.log.info(f"{run}: its digests held within {config.not_since_h:g} hours")
            continue
        began = time.monotonic()
        try:
            verdict = verify_head(place, run, _files_of(place, run))
        except (errors.NoSuchCheckpoint, errors.NoSuchRun, errors.StoreUnavailable) as err:
            context.log.warning(f"{run}: {err}")
        except errors.NoRestorableCheckpoint as err:
            problems.append(str(err))
        else:
            if verdict is None:
                context.log.info(f"{run}: it has no checkpoint yet")
                continue
            rows.append({**_verdict_metadata(verdict), "took_s": time.monotonic() - began})
            problems += [f"{run}: {verdict.problem}"] if verdict.problem is not None else []
    metadata: dict[str, Any] = {"checkpoints": len(rows), **table("verified", rows)}
    if problems:
        raise dg.Failure(
            f"{len(rows)} newest checkpoints were read; a resume falls back to the parents of those that are damaged: "
            + "; ".join(problems),
            metadata=metadata,
            allow_retries=False,
        )
    return dg.Output(None, metadata=metadata)


def _verdict_metadata(verdict: "Verification") -> dict[str, Any]:
    names = ("run", "step", "checkpoint_id", "bytes")
    return {**{name: getattr(verdict.checkpoint, name) for name in names}, "problem": verdict.problem}


def _held_since(lakehouse: "Lakehouse", run: str, since: datetime) -> bool:
    """Return True if the digests of the run's head have been verified since."""
    from dlac_pipeline.checkpoint.listing import list_checkpoints

    heads = [each for each in list_checkpoints(lakehouse, run) if each.state == "head"]
    return bool(heads) and heads[0].verified_at is not None and heads[0].verified_at >= since


def _files_of(lakehouse: "Lakehouse", run: str) -> "StoreFiles | None":
    """Return the store's files, with the store's own settings where the run was launched here, else those of the lakehouse."""
    from dlac_pipeline.checkpoint.store import tiers_of
    from dlac_pipeline.supervise.claims import last_spec

    with suppress(errors.NoSuchJobSpec):
        return tiers_of(last_spec(lakehouse, run)).files
    return None


@dg.job(description="Reads the newest checkpoint of each run again during training. Damage fails the job.")
def verify_job() -> None:
    """The one op."""
    newest_checkpoints_verified()
