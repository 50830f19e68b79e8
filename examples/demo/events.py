"""Events of the demo's Dagster runs, as lines for a reader who is new to DLAC."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import dagster as dg

_Metadata = Mapping[str, Any]


class RunEvents:
    """The events of one Dagster run. Each is returned once."""

    def __init__(self, instance: dg.DagsterInstance, run_id: str) -> None:
        self._instance = instance
        self._run_id = run_id
        self._cursor: str | None = None

    def read_new(self) -> list[dg.EventLogEntry]:
        """Return the events that were stored since the last call."""
        page = self._instance.get_records_for_run(self._run_id, cursor=self._cursor)
        self._cursor = page.cursor
        return [record.event_log_entry for record in page.records]


def describe(entry: dg.EventLogEntry) -> str:
    """Return an event as a line, or an empty string for an event that the demo does not show."""
    if made := entry.asset_materialization:
        return _MATERIALIZED[made.asset_key.path[0]](_values(made.metadata))
    if seen := entry.asset_observation:
        return _checkpoint(_values(seen.metadata)) if "checkpoint_id" in seen.metadata else ""
    if entry.dagster_event_type == dg.DagsterEventType.ASSET_CHECK_EVALUATION:
        return _check(entry)
    return _supervisor_message(entry.user_message or "") if entry.dagster_event is None else ""


def rows_of_plan(entry: dg.EventLogEntry) -> int:
    """Return the rows of a plan that was made. 0: the event is another one."""
    made = entry.asset_materialization
    if made is None or made.asset_key.path[0] != "plans":
        return 0
    return int(_values(made.metadata)["dagster/row_count"])


def _corpus(found: _Metadata) -> str:
    size_mb = found["source_bytes"] / 1e6
    return f"{found['dagster/row_count']:,} Python files ({size_mb:.1f} MB) are in the Iceberg table {found['table']}"


def _tokens(found: _Metadata) -> str:
    return (
        f"{found['tokens']:,} tokens are in {found['table']}: "
        f"{found['dagster/row_count']:,} rows of {found['sequence_length']} tokens"
    )


def _plan(found: _Metadata) -> str:
    return (
        f"snapshot {found['snapshot_id']} of {found['table']} is pinned. Work plan {', '.join(found['plan_ids'])}: "
        f"{found['dagster/row_count']:,} rows in {found['work_units']:,} row groups, {found['bytes'] / 1e6:.1f} MB"
    )


def _model(found: _Metadata) -> str:
    return f"{found['state']} at step {found['step']} with loss {float(found['loss']):.4f}"


_MATERIALIZED: Mapping[str, Callable[[_Metadata], str]] = {
    "corpus": _corpus,
    "tokens": _tokens,
    "plans": _plan,
    "models": _model,
}


def _checkpoint(found: _Metadata) -> str:
    loss = float(found["loss"])
    return f"checkpoint of step {found['step']} and the {found['rows']:,} rows before it committed, loss {loss:.4f}"


def _check(entry: dg.EventLogEntry) -> str:
    evaluation = entry.get_dagster_event().asset_check_evaluation_data
    return f"check {evaluation.check_name} {'passed' if evaluation.passed else 'FAILED'}: {evaluation.description}"


def _supervisor_message(message: str) -> str:
    """Return a line for a failure, and for every attempt after the first one."""
    event, _, facts = message.partition(": ")
    if event == "failure":
        return f"the supervisor found a failure: {facts}"
    if event == "attempt" and not facts.startswith("attempt 1,"):
        return f"the supervisor starts the ranks again: {facts}"
    return ""


def _values(metadata: Mapping[str, dg.MetadataValue[Any]]) -> _Metadata:
    return {name: value.value for name, value in metadata.items()}
