"""OpenLineage: each attempt is a run, the tables are its inputs, and the checkpoints its outputs.

An event of type OTHER corrects an attempt whose checkpoints were abandoned or retired: its inputs have the rows that are left,
and these checkpoints are dropped.
"""

import logging
import os
import uuid
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from itertools import groupby
from operator import attrgetter
from typing import Any
from urllib.parse import urlsplit

import attrs
from openlineage.client import OpenLineageClient, event_v2, facet_v2

from dlac_pipeline.extensions.listeners import events
from dlac_pipeline.lakehouse.errors import DlacError
from dlac_pipeline.lakehouse.iceberg.connect import connect
from dlac_pipeline.lakehouse.masking import mask_secrets
from dlac_pipeline.lakehouse.source_names import split_identifier
from dlac_pipeline.spec.job_spec import JobSpec

_log = logging.getLogger(__name__)
_PRODUCER = "urn:dlac-pipeline"
_ENDS = {"finished": "COMPLETE", "caught_up": "COMPLETE", "failed": "FAIL"}
"""Ending of an attempt -> type of its last event. Of other endings: ABORT."""


class OpenLineageListener:
    """Emitter of lineage."""

    def __init__(self, spec: JobSpec, *, namespace: str) -> None:
        self._spec = spec
        event_v2.set_producer(_PRODUCER)
        self._client = OpenLineageClient()
        kind = facet_v2.job_type_job.JobTypeJobFacet(processingType="BATCH", integration="DLAC", jobType="TRAINING")
        self._job = event_v2.Job(namespace, spec.run, {"jobType": kind})
        self._run = event_v2.Run(str(uuid.UUID(int=0)))
        self._tables: dict[str, tuple[events.InputTable, event_v2.Dataset]] = {}
        self._rows: dict[str, int] = {}
        """Name of each source -> rows that the attempt has consumed, by its committed checkpoints."""
        self._outputs: list[event_v2.OutputDataset] = []
        """The last checkpoint of the attempt."""

    def on_event(self, event: events.RunEvent) -> None:
        """Emit the start or the end of an attempt, a checkpoint of it, or a correction."""
        if isinstance(event, events.AttemptStarted):
            self._start(event)
            self._emit("START", event)
        elif isinstance(event, events.CheckpointCommitted):
            for name, rows in event.rows_by_table.items():
                self._rows[name] += rows
            self._outputs = [_checkpoint(event)]
            self._emit("RUNNING", event)
        elif isinstance(event, events.AttemptEnded):
            if event.reason:
                failure = facet_v2.error_message_run.ErrorMessageRunFacet(event.reason, programmingLanguage="Python")
                self._run = event_v2.Run(self._run.runId, {**(self._run.facets or {}), "errorMessage": failure})
            self._emit(_ENDS.get(event.ending, "ABORT"), event)
        elif isinstance(event, events.WentBack):
            self._correct(event)
        elif isinstance(event, events.CheckpointsRetired):
            for attempt, gone in _by_attempt(event.checkpoints):
                outputs = [_changed(each, "DROP") for each in gone]
                self._send("OTHER", event.at, self._run_of(event.ledger, attempt), [], outputs)
        elif isinstance(event, events.RunBegun):
            self._begin(event)

    def close(self) -> None:
        """Send the rest."""
        self._client.close()

    def _start(self, event: events.AttemptStarted) -> None:
        self._tables = {table.name: (table, self._dataset(table)) for table in event.tables}
        self._rows = dict.fromkeys(self._tables, 0)
        self._outputs = []
        parent = _parent_of(event)
        self._run = self._run_of(event.ledger, event.attempt, {"parent": parent} if parent else {})

    def _run_of(self, ledger: str, attempt: int, facets: dict[str, Any] | None = None) -> event_v2.Run:
        name = f"dlac:{ledger}/{self._spec.run}/{attempt}"
        return event_v2.Run(str(uuid.uuid5(uuid.NAMESPACE_URL, name)), facets or {})

    def _emit(self, kind: str, event: events.RunEvent) -> None:
        inputs = [self._input(*self._tables[name], self._rows[name]) for name in self._tables]
        self._send(kind, event.at, self._run, inputs, self._outputs)

    def _send(
        self,
        kind: str,
        at: float,
        run: event_v2.Run,
        inputs: Sequence[event_v2.InputDataset],
        outputs: Sequence[event_v2.OutputDataset],
    ) -> None:
        lineage = event_v2.RunEvent(
            eventTime=datetime.fromtimestamp(at, UTC).isoformat(),
            run=run,
            job=self._job,
            eventType=event_v2.RunState(kind),
            inputs=list(inputs),
            outputs=list(outputs),
        )
        self._client.emit(lineage)

    def _correct(self, event: events.WentBack) -> None:
        """Emit the rest of each attempt whose checkpoints were abandoned, or are part of the run again."""
        dropped, again = dict(_by_attempt(event.abandoned)), dict(_by_attempt(event.restored))
        for each in event.attempts:
            outputs = [_changed(gone, "DROP") for gone in dropped.get(each.attempt, ())]
            outputs += [_changed(back, "CREATE") for back in again.get(each.attempt, ())]
            if each.checkpoint is not None and each.checkpoint not in event.restored:
                outputs.append(_output(each.checkpoint))
            inputs = [self._input(table, self._dataset(table), each.rows_by_table[table.name]) for table in each.tables]
            self._send("OTHER", event.at, self._run_of(event.ledger, each.attempt), inputs, outputs)

    def _begin(self, event: events.RunBegun) -> None:
        """Emit the attempt that forked or adopted the run: from the checkpoint that it was made from, to the first one."""
        version = facet_v2.dataset_version_dataset.DatasetVersionDatasetFacet(event.origin_id)
        origin = event_v2.InputDataset(*_place_of(event.origin), facets={"version": version} if event.origin_id else {})
        run = self._run_of(event.ledger, event.attempt)
        for kind in ("START", "COMPLETE"):
            self._send(kind, event.at, run, [origin], [_output(event.checkpoint)])

    def _input(self, table: events.InputTable, dataset: event_v2.Dataset, rows: int) -> event_v2.InputDataset:
        """Return a table with the rows of its plan, and with those that an attempt has consumed."""
        quality = facet_v2.data_quality_metrics_input_dataset
        planned = quality.DataQualityMetricsInputDatasetFacet({}, rowCount=table.rows)
        consumed = facet_v2.input_statistics_input_dataset.InputStatisticsInputDatasetFacet(rowCount=rows)
        return event_v2.InputDataset(
            dataset.namespace,
            dataset.name,
            facets=dataset.facets,
            inputFacets={"dataQualityMetrics": planned, "inputStatistics": consumed},
        )

    def _dataset(self, table: events.InputTable) -> event_v2.Dataset:
        """Return the dataset of a table: its location, and for an Iceberg table its name in the catalog as a symlink."""
        version = facet_v2.dataset_version_dataset.DatasetVersionDatasetFacet(str(table.snapshot_id))
        external = split_identifier(table.table)
        if external is not None:
            return event_v2.Dataset(*_place_of(external[1]), facets={"version": version})
        config = self._spec.lakehouse
        catalog = mask_secrets(config.uri) or config.catalog_name
        symlink = facet_v2.symlinks_dataset.Identifier(catalog, table.table, "TABLE")
        symlinks = facet_v2.symlinks_dataset.SymlinksDatasetFacet([symlink])
        try:
            location = _place_of(connect(config).load(table.table).location())
        except DlacError as err:
            _log.warning("the location of table %r is unknown, its name in the catalog is its dataset: %s", table, err)
            location = catalog, table.table
        return event_v2.Dataset(*location, facets={"version": version, "symlinks": symlinks})


def _output(checkpoint: events.Checkpoint | events.CheckpointCommitted) -> event_v2.OutputDataset:
    version = facet_v2.dataset_version_dataset.DatasetVersionDatasetFacet(checkpoint.checkpoint_id)
    return event_v2.OutputDataset(*_place_of(checkpoint.location), facets={"version": version})


def _checkpoint(event: events.CheckpointCommitted) -> event_v2.OutputDataset:
    size = facet_v2.output_statistics_output_dataset.OutputStatisticsOutputDatasetFacet(size=event.bytes)
    return attrs.evolve(_output(event), outputFacets={"outputStatistics": size})


def _changed(checkpoint: events.Checkpoint, change: str) -> event_v2.OutputDataset:
    """Return a checkpoint with a change of its life cycle."""
    life = facet_v2.lifecycle_state_change_dataset
    facet = life.LifecycleStateChangeDatasetFacet(life.LifecycleStateChange(change))
    output = _output(checkpoint)
    return attrs.evolve(output, facets={**(output.facets or {}), "lifecycleStateChange": facet})


def _by_attempt(checkpoints: Iterable[events.Checkpoint]) -> list[tuple[int, list[events.Checkpoint]]]:
    ordered = sorted(checkpoints, key=attrgetter("attempt"))
    return [(attempt, list(group)) for attempt, group in groupby(ordered, key=attrgetter("attempt"))]


def _place_of(location: str) -> tuple[str, str]:
    """Return namespace and name of a dataset at an address, as OpenLineage names them."""
    parts = urlsplit(location)
    if parts.scheme in ("", "file"):
        return "file", parts.path.rstrip("/")
    return f"{parts.scheme}://{parts.netloc}", parts.path.strip("/")


def _parent_of(event: events.AttemptStarted) -> facet_v2.parent_run.ParentRunFacet | None:
    """Return the run that started this one: of OPENLINEAGE_PARENT_ID, as namespace/job/run, or of Dagster."""
    named = os.environ.get("OPENLINEAGE_PARENT_ID", "")
    if named.count("/") >= 2:
        namespace, job, run = named.rsplit("/", 2)
    elif event.parent_run:
        namespace = os.environ.get("OPENLINEAGE_NAMESPACE", "default")
        job, run = os.environ.get("DAGSTER_RUN_JOB_NAME", "dagster"), event.parent_run
    else:
        return None
    parent = facet_v2.parent_run
    try:
        return parent.ParentRunFacet(parent.Run(run), parent.Job(namespace, job))
    except ValueError:
        _log.warning("expected a UUID as the run of the parent, found %r: events have no parent", run)
        return None
