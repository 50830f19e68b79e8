"""Who has seen a document: by the key of its row, from DLAC's own tables alone, also after its data files are gone."""

from collections.abc import Sequence
from typing import Any

import duckdb
from pyiceberg.expressions import Or

from dlac_pipeline.audit.lakehouse_sql import open_audit, rows_of, sql_script
from dlac_pipeline.lakehouse.errors import SpecInvalid
from dlac_pipeline.lakehouse.iceberg.connect import NO_KEY, Lakehouse, among
from dlac_pipeline.lakehouse.ledger.ledger import Ledger
from dlac_pipeline.lakehouse.ledger.run_rows import no_such_run


def who_has_seen(
    lakehouse: Lakehouse, values: Sequence[str], *, table: str | None = None, run: str | None = None
) -> dict[str, list[Any]]:
    """Return who has seen the document with these values of its identity columns, as texts.

    - `seen_by`: rows of the macro `seen_by`.
    - `places`: rows of keyed data files that have the key, consumed or not.
    - `notes`: sentences. The first one says so if no checkpoint has seen it. The others limit the answer.

    Raises `SpecInvalid` for values that no keyed row can have or a table that no plan names, or `NoSuchRun`.
    """
    plans = lakehouse.read_own("plans", columns=("source_table", "table_uuid")).to_pylist()
    uuids = sorted({plan["table_uuid"] for plan in plans if table in (None, plan["source_table"])})
    if table and not uuids:
        known = sorted({plan["source_table"] for plan in plans})
        raise SpecInvalid(f"expected a table that a plan names, found {table!r}: name one of {known!r}")
    keys = _keys_of(lakehouse, uuids, values)
    query = "seen_by keyed_files units checkpoints"
    with open_audit(lakehouse, query=query, keys=Or(NO_KEY, among("key", sorted(keys)))) as connection:
        if run and not connection.execute("SELECT 1 FROM consumption WHERE run = ? LIMIT 1", [run]).fetchall():
            raise no_such_run(run, Ledger(lakehouse).runs())
        about = {"uuids": uuids, "run": run}
        found = [each for key in keys for each in rows_of(connection, sql_script("seen_in"), {**about, "key": key})]
        places = rows_of(connection, sql_script("key_places"), {"uuids": uuids, "keys": list(keys)})
        limits = rows_of(connection, sql_script("seen_limits"), {**about, "identities": list(keys.values())})
    notes = [each["note"] for each in limits]
    if not found:
        rows = ", ".join(f"row {each['row']} of {each['file_path']}" for each in places)
        why = f"it is {rows}, which was not consumed" if places else "the key is in no keyed data file"
        notes.insert(0, f"no checkpoint {f'of run {run} ' if run else ''}has seen it: {why}")
    return {"seen_by": found, "places": places, "notes": notes}


def _keys_of(lakehouse: Lakehouse, uuids: Sequence[str], values: Sequence[str]) -> dict[int, str]:
    """Return the keys that the values have in these tables -> their identity."""
    files = lakehouse.read_own("row_keys", NO_KEY)
    with duckdb.connect() as connection:
        connection.register("files", files)
        connection.execute("CREATE TABLE row_keys AS FROM files WHERE list_contains($1, table_uuid)", [uuids])
        for name in ("row_key", "identity_text", "keyed_files", "keys_of"):
            connection.execute(sql_script(name))
        keys = dict(connection.execute("SELECT key, identity FROM keys_of($1)", [list(values)]).fetchall())
        identities = [
            identity for (identity,) in connection.execute("SELECT DISTINCT identity FROM row_keys").fetchall()
        ]
    if keys:
        return keys
    if identities:
        raise SpecInvalid(
            f"expected the value of each identity column, found {list(values)!r}: rows are identified by {' or '.join(identities)}"
        )
    raise SpecInvalid(
        "expected data files with keys of rows, found none: set row_keys = true in [source], then run `dlac plan SPEC`"
    )
