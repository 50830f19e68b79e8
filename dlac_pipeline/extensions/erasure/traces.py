"""Erasure of traces of forgotten rows in DLAC's own tables: the digests of their keys, and the losses of their steps.

In: a request that is met. Out: the same tables without these values, and without the older files that had them. No other value
of a row changes, so every audit, fence and order stays as it is.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyiceberg.expressions import AlwaysTrue, And, BooleanExpression
from pyiceberg.io.pyarrow import ArrowScan, _dataframe_to_data_files, schema_to_pyarrow
from pyiceberg.manifest import DataFile

import dlac_pipeline as dlac
from dlac_pipeline.extensions.erasure.certificate import contradictions
from dlac_pipeline.extensions.erasure.forget import ForgetPlan, SpecOf, plan_forget
from dlac_pipeline.lakehouse.errors import SpecInvalid
from dlac_pipeline.lakehouse.iceberg.connect import NO_KEY, Lakehouse, equals
from dlac_pipeline.lakehouse.ledger.journal import Journal
from dlac_pipeline.lakehouse.ledger.ledger import Ledger
from dlac_pipeline.lakehouse.ledger.typed_rows import CheckpointRow
from dlac_pipeline.lakehouse.maintenance.expiry import UPKEEP_OF_SNAPSHOT, committing, expire
from dlac_pipeline.lakehouse.retrying import retrying

_FILES = 64
"""Data files that one commit replaces: less work has more luck beside busy committers."""


def erase_traces(lakehouse: Lakehouse, table: str, filters: Sequence[str], spec_of: SpecOf) -> list[str]:
    """Erase the traces of rows that are forgotten. Return the steps: none if there are no traces left.

    A repeated call completes a killed one. Raises `SpecInvalid` for a request that is not met, or as `plan_forget`,
    and `CommitConflict` or `CatalogUnreachable` as `dlac ledger upkeep`.
    """
    plan = plan_forget(lakehouse, table, filters)
    problems = contradictions(lakehouse, plan, spec_of)
    for name in ("row_keys", "consumption"):
        named = sorted(set(lakehouse.own(name).metadata.refs) - {"main"})
        problems += [
            f"expected no named snapshot of table {name}, found {each!r}: remove it, it keeps files" for each in named
        ]
    if problems:
        raise SpecInvalid("\n".join(["expected that the rows are forgotten, found otherwise:", *problems]))
    keys = _erase_keys(lakehouse, plan)
    _remove_older(lakehouse, "row_keys")
    done = [f"{keys} keys of the rows are erased"] if keys else []
    erased = {run["run"]: _erase_losses(lakehouse, run) for run in plan["runs"] if run["affected"]}
    done += [
        f"the losses of checkpoints {', '.join(ids)} of run {run} are erased" for run, ids in erased.items() if ids
    ]
    _remove_older(lakehouse, "consumption")
    return done


def _remove_older(lakehouse: Lakehouse, name: str) -> None:
    """Delete the files of older snapshots, and files that an earlier, killed call left."""
    expire(lakehouse, name, keep=1)
    dlac.remove_orphans(lakehouse, name)


def _erase_keys(lakehouse: Lakehouse, plan: ForgetPlan) -> int:
    """Remove the keys of the rows, and return their number."""
    import duckdb  # it takes 0.2 s

    with duckdb.connect() as connection:
        connection.execute(plan["rows"]["statement"])  # makes found_rows
        connection.register(
            "named", lakehouse.read_own("row_keys", And(equals("table_uuid", plan["table_uuid"]), NO_KEY))
        )
        connection.execute(
            "CREATE TABLE places AS SELECT DISTINCT file, found_rows.row FROM found_rows JOIN named USING (file_path)"
        )

        def without(part: pa.Table) -> Any:
            connection.register("part", part)
            # the row that names a file has no `row`, and stays
            kept = "SELECT p.* FROM part AS p ANTI JOIN places USING (file, row) ORDER BY p.key NULLS FIRST"
            found: Any = connection.sql(kept).to_arrow_table()
            return found.cast(part.schema)

        return _rewrite(lakehouse, "row_keys", AlwaysTrue(), without)


def _erase_losses(lakehouse: Lakehouse, run: dict[str, Any]) -> list[str]:
    """Empty the losses of checkpoints that have read the rows, then in the journal. Return the ids of these checkpoints."""
    name, ids = run["run"], run["losses_of_checkpoints"] or []
    kinds, columns = (CheckpointRow,), ("seq", "kind", "checkpoint_id", "losses")
    known = Ledger(lakehouse).rows(name, kinds=kinds, columns=columns)
    seqs = [row.seq for row in known if row.checkpoint_id in ids]
    if seqs:
        _rewrite(lakehouse, "consumption", equals("run", name), partial(_without_losses, seqs))
    # an entry may have been written after an earlier erasure, from rows that were read before it
    empty = [row.seq for row in known if row.checkpoint_id in run["affected"] and (not row.losses or row.seq in seqs)]
    journal = Journal.of(lakehouse.own("consumption"))
    entries = journal.entries(name).get(name, {})
    for path in (entries[seq] for seq in empty if seq in entries):
        before = journal.read([path])
        after = _without_losses(empty, before)
        if not after.equals(before):
            journal.write(after, journal.ledger_uuid(path))
    return list(ids)


def _without_losses(seqs: Sequence[int], part: pa.Table) -> Any:
    losses = part["losses"]
    kept = pc.if_else(pc.is_in(part["seq"], pa.array(seqs, part["seq"].type)), pa.scalar(None, losses.type), losses)
    return part.set_column(part.column_names.index("losses"), part.schema.field("losses"), kept)


def _rewrite(lakehouse: Lakehouse, name: str, wanted: BooleanExpression, change: Callable[[pa.Table], pa.Table]) -> int:
    """Replace the data files of an own table whose rows change, some per commit. Return the number of rows that they lose."""
    done: set[str] = set()
    lost = 0

    def once() -> tuple[set[str], int]:
        table = lakehouse.own(name)
        schema: Any = schema_to_pyarrow(table.schema(), include_field_ids=False)
        scan = ArrowScan(table.metadata, table.io, table.schema(), AlwaysTrue())
        seen, changed, less = set(), list[tuple[DataFile, pa.Table]](), 0
        for task in table.scan(wanted).plan_files():
            if task.file.file_path in done:
                continue
            if len(changed) == _FILES:
                break
            seen.add(task.file.file_path)
            before = scan.to_table([task]).cast(schema)
            after = change(before)
            if not after.equals(before):
                changed.append((task.file, after))
                less += before.num_rows - after.num_rows
        if changed:
            with (
                committing(lakehouse, table) as transaction,
                transaction.update_snapshot(
                    snapshot_properties={UPKEEP_OF_SNAPSHOT: "erasure"}
                ).overwrite() as overwrite,
            ):
                for file, rows in changed:
                    overwrite.delete_data_file(file)
                    for new in _dataframe_to_data_files(table.metadata, rows, table.io) if rows.num_rows else ():
                        overwrite.append_data_file(new)
        return seen, less

    while (step := retrying()(once))[0]:
        done, lost = done | step[0], lost + step[1]
    return lost
