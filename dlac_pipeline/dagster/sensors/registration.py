"""Parquet files that appear at the locations of registered tables: a sensor looks for them, and a job registers them."""

from dataclasses import asdict
from datetime import UTC, datetime

import dagster as dg
from blake3 import blake3

from dlac_pipeline.dagster.metadata import table
from dlac_pipeline.dagster.resources import LakehouseResource
from dlac_pipeline.lakehouse.errors import DlacError


@dg.op(
    description="Adds the new Parquet files at the location of each registered table to it, in one commit per table."
)
def new_files_registered(context: dg.OpExecutionContext, lakehouse: LakehouseResource) -> dg.Output[None]:
    """A table of what was done. Fails after all tables if a file was refused."""
    from dlac_pipeline.lakehouse.registration.register import register, registered_tables

    place = lakehouse.lakehouse()
    done, problems = [], []
    for name, location in registered_tables(place):
        try:
            done.append(register(place, name, location))
        except DlacError as err:
            problems.append(f"{name}: {err}")
    for each in done:
        if each.missing:
            context.log.warning(
                f"{each.table}: {len(each.missing)} registered files are gone, such as {each.missing[0]!r}"
            )
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
        from dlac_pipeline.lakehouse.registration.register import find_new_files, registered_tables

        place, found, reasons = lakehouse.lakehouse(), list[str](), list[str]()
        for name, location in registered_tables(place):
            try:
                new = find_new_files(place, name, location)
            except DlacError as err:
                reasons.append(f"{name}: {err}")
                continue
            reasons.append(f"{name}: {len(new)} new files")
            found += [f"{name} {file.address} {file.bytes}" for file in new]
        if found:
            digest = blake3("\n".join(found).encode()).hexdigest()
            return [dg.RunRequest(run_key=f"{digest} {datetime.now(UTC):%Y-%m-%d %H}")]
        return dg.SkipReason("; ".join(reasons) or "no table is registered")

    return registration_sensor
