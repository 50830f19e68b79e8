"""Who has seen a document: by the key of its row, from DLAC's own tables alone, also after its data files are gone."""

from collections.abc import Sequence
from typing import Any

from dlac_pipeline.audit.lakehouse_sql import open_audit, rows_of, sql_script
from dlac_pipeline.lakehouse.errors import SpecInvalid
from dlac_pipeline.lakehouse.iceberg.connect import NO_KEY, Lakehouse, among
from dlac_pipeline.lakehouse.ledger.ledger import Ledger
from dlac_pipeline.lakehouse.ledger.run_rows import no_such_run


def who_has_seen(
    lakehouse: Lakehouse, values: Sequence[str], *, table: str | None = None, run: str | None = None
) -> dict[str, list[Any]]:
    """Return who has seen the document with these values of its identity columns, as texts.

    `seen_by` are rows of that macro, `places` the rows with the key, consumed or not, and `notes` sentences: that no checkpoint
    has seen it, and limits of the answer. Raises `NoSuchRun`, or `SpecInvalid` for other values than the keyed rows have.
    """
    # what `seen_by` uses but `row_keys`: of those only the rows with the key are read
    names = "consumption slices plans units cut_plans lineage ancestor_branches checkpoints lost_appends"
    with open_audit(lakehouse, query=names) as connection:
        tables = "SELECT source_table, list(DISTINCT table_uuid) FROM plans GROUP BY source_table"
        uuids = dict(connection.execute(tables).fetchall())
        if table not in (None, *uuids):
            raise SpecInvalid(f"expected a table that a plan names, found {table!r}: name one of {sorted(uuids)!r}")
        if (
            run is not None
            and not connection.execute("SELECT 1 FROM consumption WHERE run = ? LIMIT 1", [run]).fetchall()
        ):
            raise no_such_run(run, Ledger(lakehouse).runs())
        about = {"uuids": uuids[table] if table else [each for listed in uuids.values() for each in listed], "run": run}
        connection.register("files", lakehouse.read_own("row_keys", NO_KEY))
        connection.execute("CREATE TABLE row_keys AS FROM files WHERE list_contains($1, table_uuid)", [about["uuids"]])
        for name in ("row_key", "identity_text", "keyed_files", "keys_of", "seen_by"):
            connection.execute(sql_script(name))
        keys = dict(connection.execute("SELECT key, identity FROM keys_of($1)", [list(values)]).fetchall())
        if not keys:
            known = [each["identity"] for each in rows_of(connection, "SELECT DISTINCT identity FROM keyed_files")]
            expected = (
                f"the value of each identity column, as in {' or '.join(known)}"
                if known
                else "data files with row keys"
            )
            raise SpecInvalid(
                f"expected {expected}, found {list(values) if known else 'none'}: "
                "correct the values, or set row_keys = true in [source] and run `dlac plan SPEC`"
            )
        connection.register("keyed", lakehouse.read_own("row_keys", among("key", sorted(keys))))
        connection.execute("INSERT INTO row_keys FROM keyed")
        found = [each for key in keys for each in rows_of(connection, sql_script("seen_in"), {**about, "key": key})]
        places = rows_of(connection, sql_script("key_places"))
        limits = rows_of(connection, sql_script("seen_limits"), {**about, "identities": list(keys.values())})
    notes = [each["note"] for each in limits]
    if not found:
        rows = ", ".join(f"row {each['row']} of {each['file_path']}" for each in places)
        why = f"it is {rows}, which was not consumed" if places else "the key is in no keyed data file, or was erased"
        notes.insert(0, f"no checkpoint {'' if run is None else f'of run {run} '}has seen it: {why}")
    return {"seen_by": found, "places": places, "notes": notes}
