"""Maintenance of the lakehouse during training, as jobs: upkeep of DLAC's own tables, verification and rehearsal of runs.

No job changes a source table, but for the registration of new Parquet files, which a sensor looks for.
"""

import re
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import dagster as dg
from blake3 import blake3
from pydantic import Field

from dlac_pipeline.dagster.assets.checks import facts_of, rehearse_model, verify_head
from dlac_pipeline.dagster.metadata import table
from dlac_pipeline.dagster.resources import LakehouseResource
from dlac_pipeline.lakehouse import errors
from dlac_pipeline.lakehouse.config import KEEP_SNAPSHOTS, MOST_SNAPSHOTS
from dlac_pipeline.spec import bounds, spec_problems

if TYPE_CHECKING:
    from dlac_pipeline.lakehouse.iceberg.connect import Lakehouse
    from dlac_pipeline.lakehouse.store_files import StoreFiles

POOL = "rehearsals"
"""Pool whose limit is the number of simultaneous rehearsals. Each takes as many ranks as the run was trained on."""


class UpkeepConfig(spec_problems.Section, dg.Config):
    """Limits of upkeep."""

    keep_snapshots: int = Field(default=KEEP_SNAPSHOTS, ge=1, le=MOST_SNAPSHOTS)
    """Snapshots to keep of each of DLAC's own tables."""


@dg.op(description="Merges small files, expires snapshots and removes unneeded files of DLAC's own tables.")
def own_tables_in_order(
    context: dg.OpExecutionContext, config: UpkeepConfig, lakehouse: LakehouseResource
) -> dg.Output[None]:
    """A table of the work done, one row per table of DLAC's."""
    from dlac_pipeline.extensions.upkeep.upkeep import run_upkeep

    done = run_upkeep(lakehouse.lakehouse(), keep=config.keep_snapshots)
    for each in done:
        if each.busy:
            context.log.warning(f"table {each.table} was too busy to be maintained; the next upkeep continues")
    records = [dg.TableRecord(asdict(each)) for each in done]
    return dg.Output(None, metadata={"done": dg.MetadataValue.table(records)})


@dg.job(description="Upkeep of DLAC's own tables, also during training. It never changes source tables.")
def upkeep_job() -> None:
    """The one op."""
    own_tables_in_order()


class VerifyConfig(spec_problems.Section, dg.Config):
    """Checkpoints to verify."""

    runs: list[str] = Field(default=[])
    """Training runs; empty: all of the lakehouse."""
    not_since_h: float = Field(default=20.0, ge=0, le=87_600)
    """Hours for which a verified checkpoint is not read again."""


@dg.op(description="Reads the newest checkpoint of each run again, and records in the ledger if its digests match.")
def newest_checkpoints_verified(
    context: dg.OpExecutionContext, config: VerifyConfig, lakehouse: LakehouseResource
) -> dg.Output[None]:
    """A table of the findings. Fails when a checkpoint is damaged or a named run does not exist, after all were read."""
    from dlac_pipeline.lakehouse.ledger.ledger import Ledger

    place = lakehouse.lakehouse()
    known, not_since = Ledger(place).runs(), datetime.now(UTC) - timedelta(hours=config.not_since_h)
    rows: list[dict[str, Any]] = []
    problems = [f"{run}: there is no run of this name" for run in config.runs if run not in known]
    for run in [run for run in config.runs or known if run in known]:
        began = time.monotonic()
        try:
            verdict = verify_head(place, run, _files_of(place, run), not_since=not_since)
        except (errors.NoSuchCheckpoint, errors.NoSuchRun, errors.StoreUnavailable) as err:
            context.log.warning(f"{run}: {err}")
        except errors.NoRestorableCheckpoint as err:
            problems.append(str(err))
        else:
            if verdict is None:
                context.log.info(f"{run}: no checkpoint, or its digests held within {config.not_since_h:g} hours")
                continue
            rows.append({**facts_of(verdict, began), "problem": verdict.problem})
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


def _files_of(lakehouse: "Lakehouse", run: str) -> "StoreFiles | None":
    """Return the store's files: with its own settings where the run was launched here, else with the lakehouse's."""
    from dlac_pipeline.checkpoint.store import tiers_of
    from dlac_pipeline.supervise.claims import last_spec

    with suppress(errors.NoSuchJobSpec):
        return tiers_of(last_spec(lakehouse, run)).files
    return None


@dg.job(description="Reads the newest checkpoint of each run again during training. Damage fails the job.")
def verify_job() -> None:
    """The one op."""
    newest_checkpoints_verified()


class RehearseConfig(spec_problems.Section, dg.Config):
    """Runs to rehearse, and for how many steps."""

    runs: list[str] = Field(default=[])
    """Training runs. Empty: all that have committed a checkpoint within committed_within_h."""
    committed_within_h: float = Field(default=26.0, gt=0, le=87_600)
    """Hours within which a run must have committed a checkpoint to be rehearsed, if `runs` is empty."""
    steps: int | None = Field(default=None, ge=1, le=bounds.MOST_STEPS)
    """Steps to repeat. Unset: all up to the next checkpoint, at most 20."""
    sandbox: str = ""
    """Folder for the sandbox with a copy of the checkpoint. Empty: temporary."""


@dg.op(out=dg.DynamicOut(dict), description="Runs to rehearse: the named ones, or those that trained recently.")
def runs_to_rehearse(
    context: dg.OpExecutionContext, config: RehearseConfig, lakehouse: LakehouseResource
) -> Iterator[dg.DynamicOutput[dict[str, Any]]]:
    """Arguments of `rehearse_model`, one output per run."""
    since = datetime.now(UTC) - timedelta(hours=config.committed_within_h)
    runs = config.runs or _trained_since(lakehouse.lakehouse(), since)
    if not runs:
        context.log.info(f"no run has committed a checkpoint within {config.committed_within_h:g} hours")
    sandbox_folder = Path(config.sandbox) if config.sandbox else None
    for index, run in enumerate(runs):
        arguments = {"run": run, "steps": config.steps, "sandbox_folder": sandbox_folder}
        yield dg.DynamicOutput(arguments, mapping_key=f"{re.sub(r'[^A-Za-z0-9_]', '_', run)}_{index}")


@dg.op(
    pool=POOL,
    out=dg.Out(dg.Nothing),
    description="Restores a run's checkpoint in a sandbox, repeats the steps after it, compares the losses, and records the "
    "result as the asset check rehearsal_identical of the run's model.",
)
def rehearsal(
    context: dg.OpExecutionContext, arguments: dict[str, Any], lakehouse: LakehouseResource
) -> Iterator[dg.AssetCheckEvaluation | dg.Output[None]]:
    """Evaluate the check, unless the run cannot be rehearsed. One that differs does not stop the rehearsals of others."""
    result = rehearse_model(lakehouse.lakehouse(), **arguments)
    (context.log.info if result.passed else context.log.error)(f"{arguments['run']}: {result.description}")
    if result.passed or result.severity == dg.AssetCheckSeverity.ERROR:
        names = ("asset_key", "check_name", "passed", "severity", "description", "metadata")
        yield dg.AssetCheckEvaluation(**{name: getattr(result, name) for name in names})
    yield dg.Output(None)


def _trained_since(lakehouse: "Lakehouse", since: datetime) -> list[str]:
    from dlac_pipeline.lakehouse.ledger.ledger import Ledger
    from dlac_pipeline.lakehouse.ledger.typed_rows import CheckpointRow

    ledger = Ledger(lakehouse)
    newest = {run: ledger.rows(run, kinds=(CheckpointRow,))[-1:] for run in ledger.runs()}
    return [run for run, rows in newest.items() if rows and rows[0].committed_at >= since]


@dg.job(description="Rehearses runs in a sandbox during training. Losses that are not bit-identical fail the check.")
def rehearse_job() -> None:
    """An op per training run."""
    runs_to_rehearse().map(rehearsal)


@dg.op(description="Adds the new Parquet files at the location of each registered table, in one commit per table.")
def new_files_registered(context: dg.OpExecutionContext, lakehouse: LakehouseResource) -> dg.Output[None]:
    """A table of the work that was done. Fails after all tables if a file was refused."""
    from dlac_pipeline.extensions.registration.register import register, registered_tables

    place = lakehouse.lakehouse()
    done, problems = [], []
    for name, location in registered_tables(place):
        try:
            done.append(register(place, name, location))
        except errors.DlacError as err:
            problems.append(f"{name}: {err}")
    for each in done:
        if each.missing:
            gone = f"{len(each.missing)} registered files are gone, such as {each.missing[0]!r}"
            context.log.warning(f"{each.table}: {gone}")
    metadata = table("registered", [{**asdict(each), "missing": len(each.missing)} for each in done])
    if problems:
        raise dg.Failure("; ".join(problems), metadata=metadata, allow_retries=False)
    return dg.Output(None, metadata=metadata)


@dg.job(description="Adds new Parquet files to registered tables. It copies nothing.")
def register_job() -> None:
    """The one op."""
    new_files_registered()


def build_registration_sensor(lakehouse: LakehouseResource) -> dg.SensorDefinition:
    """Return the sensor that requests a Dagster run for each set of new files, and again every hour if the set was refused."""

    @dg.sensor(
        job_name=register_job.name,
        minimum_interval_seconds=60,
        default_status=dg.DefaultSensorStatus.STOPPED,
        description="Registers Parquet files that appear at the locations of registered tables. Off until you turn it on.",
    )
    def registration_sensor() -> list[dg.RunRequest] | dg.SkipReason:
        from dlac_pipeline.extensions.registration.register import find_new_files, registered_tables

        place, found, reasons = lakehouse.lakehouse(), list[str](), list[str]()
        for name, location in registered_tables(place):
            try:
                new = find_new_files(place, name, location)
            except errors.DlacError as err:
                reasons.append(f"{name}: {err}")
                continue
            reasons.append(f"{name}: {len(new)} new files")
            found += [f"{name} {file.address} {file.bytes}" for file in new]
        if found:
            digest = blake3("\n".join(found).encode()).hexdigest()
            return [dg.RunRequest(run_key=f"{digest} {datetime.now(UTC):%Y-%m-%d %H}")]
        return dg.SkipReason("; ".join(reasons) or "no table is registered")

    return registration_sensor
