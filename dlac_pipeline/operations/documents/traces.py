"""Erasure of what DLAC's own tables keep of forgotten rows: the digests of their keys, and the losses of their steps.

In: a request that is met. Out: the same tables without these values, and without the older files that had them. No other value
of a row changes, so every audit, fence and order stays as it is.
"""

from collections.abc import Callable, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyiceberg.expressions import AlwaysTrue, And, BooleanExpression
from pyiceberg.io.pyarrow import ArrowScan, _dataframe_to_data_files, schema_to_pyarrow

from dlac_pipeline.lakehouse.errors import SpecInvalid
from dlac_pipeline.lakehouse.iceberg.connect import NO_KEY, Lakehouse, among, equals
from dlac_pipeline.lakehouse.ledger.journal import Journal
from dlac_pipeline.lakehouse.ledger.ledger import Ledger
from dlac_pipeline.lakehouse.ledger.run_rows import checkpoint_rows
from dlac_pipeline.lakehouse.maintenance.expiry import UPKEEP_OF_SNAPSHOT, committing, expire
from dlac_pipeline.lakehouse.maintenance.upkeep import remove_orphans
from dlac_pipeline.lakehouse.retrying import retrying
from dlac_pipeline.operations.documents.forget import ForgetPlan, plan_forget


def erase_traces(lakehouse: Lakehouse, table: str, filters: Sequence[str]) -> list[str]:
    """Erase the traces of rows that are forgotten. Return the steps: none if there are no traces left.

    A repeated call finishes what a killed one began. Raises `SpecInvalid` for a request that is not met, or as `plan_forget`,
    and `CommitConflict` or `CatalogUnreachable` as `dlac upkeep`.
    """
    plan = plan_forget(lakehouse, table, filters)
    if plan["problems"]:
        raise SpecInvalid(
            "\n".join(["expected that the rows are forgotten, found otherwise: use --execute first", *plan["problems"]])
        )
    done = []
    if keys := _erase_keys(lakehouse, plan):
        done.append(f"{keys} keys of the rows are erased")
    for run in plan["runs"]:
        if ids := run["losses_of_checkpoints"]:
            _erase_losses(lakehouse, run["run"], ids)
            done.append(f"the losses of checkpoints {', '.join(ids)} of run {run['run']} are erased")
    for name in ("row_keys", "consumption"):  # also after a call that was killed before this
        expire(lakehouse, name, keep=1)
        remove_orphans(lakehouse, name)
    return done


def _erase_keys(lakehouse: Lakehouse, plan: ForgetPlan) -> int:
    """Remove the keys of the rows, and return their number."""
    import duckdb  # it takes 0.2 s

    with duckdb.connect() as connection:
        connection.execute(plan["rows"]["statement"])  # makes found_rows
        connection.register("keyed_files", lakehouse.read_own("row_keys", NO_KEY))
        connection.execute(
            "CREATE TABLE places AS SELECT DISTINCT file, found_rows.row FROM found_rows JOIN keyed_files USING (file_path)"
        )
        places = connection.execute("FROM places").fetchall()
        if not places:
            return 0
        files, rows = (sorted(set(values)) for values in zip(*places, strict=True))
        connection.register("keyed", lakehouse.read_own("row_keys", And(among("file", files), among("row", rows))))
        query = "SELECT DISTINCT key FROM keyed SEMI JOIN places USING (file, row) WHERE key IS NOT NULL"
        keys = [key for (key,) in connection.execute(query).fetchall()]

        def without(part: pa.Table) -> Any:
            connection.register("part", part)
            # the row that names a file has no `row`, and stays
            kept: Any = connection.sql("SELECT p.* FROM part AS p ANTI JOIN places USING (file, row)").to_arrow_table()
            return kept.cast(part.schema)

        if keys:
            _rewrite(lakehouse, "row_keys", among("key", keys), without)
    return len(keys)


def _erase_losses(lakehouse: Lakehouse, run: str, ids: Sequence[str]) -> None:
    """Empty the losses of checkpoints: in their rows, and in the entries of the journal."""
    known = checkpoint_rows(Ledger(lakehouse).rows(run))
    seqs = [known[each].seq for each in ids]

    def without(part: pa.Table) -> Any:
        losses = part["losses"]
        emptied = pc.if_else(
            pc.is_in(part["seq"], pa.array(seqs, part["seq"].type)), pa.scalar(None, losses.type), losses
        )
        return part.set_column(part.column_names.index("losses"), part.schema.field("losses"), emptied)

    journal = Journal.of(lakehouse.own("consumption"))
    entries = journal.entries(run).get(run, {})
    for seq in seqs:
        if path := entries.get(seq):
            journal.write(without(journal.read([path])), journal.ledger_uuid(path))
    _rewrite(lakehouse, "consumption", And(equals("run", run), among("seq", seqs)), without)


def _rewrite(
    lakehouse: Lakehouse, name: str, wanted: BooleanExpression, change: Callable[[pa.Table], pa.Table]
) -> None:
    """Replace the data files of an own table that may have wanted rows by files with changed rows, in one commit."""

    def once() -> None:
        table = lakehouse.own(name)
        schema: Any = schema_to_pyarrow(table.schema(), include_field_ids=False)
        scan = ArrowScan(table.metadata, table.io, table.schema(), AlwaysTrue())
        with (
            committing(lakehouse, table) as transaction,
            transaction.update_snapshot(snapshot_properties={UPKEEP_OF_SNAPSHOT: "erasure"}).overwrite() as overwrite,
        ):
            for task in table.scan(wanted).plan_files():
                rows = change(scan.to_table([task]).cast(schema))
                overwrite.delete_data_file(task.file)
                for file in _dataframe_to_data_files(table.metadata, rows, table.io):
                    overwrite.append_data_file(file)

    retrying()(once)
