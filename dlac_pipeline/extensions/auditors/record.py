"""Records of exact audits. With a record, a later audit checks only newer rows.

A record is a Parquet file of the auditor. It has the advances up to a checkpoint, merged, and the digest of the ledger rows that
they were made of. A later audit compares that digest with the ledger, and reads the merged rows in their place. A file whose
content has changed is refused, or is not used.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq

from dlac_pipeline.audit.audit import AUDITED, AuditReport, audit_open_run, open_run
from dlac_pipeline.audit.lakehouse_sql import rows_of, sql_script
from dlac_pipeline.lakehouse.durable_io import temporary_beside
from dlac_pipeline.lakehouse.errors import SpecInvalid
from dlac_pipeline.lakehouse.iceberg.connect import Lakehouse

_KEY = b"dlac.audit"
_DIGEST = (
    "SELECT count(*) AS rows, coalesce(sum(hash(c)::HUGEINT), 0)::VARCHAR AS digest "
    "FROM consumption AS c WHERE kind IN ('advance', 'replay') AND seq > ? AND seq <= ?"
)
_CONTENT = "SELECT coalesce(sum(hash(c)::HUGEINT), 0)::VARCHAR AS digest FROM recorded AS c"


@dataclass(frozen=True, kw_only=True, slots=True)
class AuditRecord:
    """Facts of the ledger that was audited."""

    run: str
    checkpoint_id: str
    """The head that was audited."""
    seq: int
    """Id of the head. The record answers for the advances and replays up to it."""
    rows: int
    digest: str
    """Sum of DuckDB's hashes of these rows. Another version of DuckDB may hash otherwise: then everything is audited again."""
    uneven: tuple[str, ...]
    """Checkpoints whose shares are uneven for a good reason. Later rows may refute the reason, so they are checked again."""
    content: str
    """Sum of DuckDB's hashes of the merged rows, and the names of columns, which the hashes do not cover."""


def audit_since(lakehouse: Lakehouse, run: str, checkpoint: str | None = None, *, record: Path) -> AuditReport:
    """Audit a run as `audit_run` does, since the earlier audit that a file of the auditor records, if that is possible.

    Everything is audited if that is not exact, or the ledger has other rows or another lineage than then. An exact audit
    is recorded. Raises `SpecInvalid` for a file that is no record of the run, or cannot be written.
    """
    earlier = read_audit_record(record, run)
    if earlier is not None:
        merge = partial(read_merged, path=record, record=earlier)
        with open_run(lakehouse, run, checkpoint, query=AUDITED, merge=merge) as connection:
            if is_continued(connection, earlier) and (report := audit_open_run(lakehouse, connection, run)).exact:
                write_audit_record(connection, record, run, earlier)
                return replace(report, recorded_checkpoint=earlier.checkpoint_id)
    with open_run(lakehouse, run, checkpoint, query=AUDITED) as connection:
        report = audit_open_run(lakehouse, connection, run)
        if report.exact:
            write_audit_record(connection, record, run)
        return report


def read_audit_record(path: Path, run: str) -> AuditRecord | None:
    """Return the record in a file, or None if there is no file yet. Raises `SpecInvalid` for another file, or another run's."""
    if not path.parent.is_dir():
        raise SpecInvalid(f"expected a folder for the record of the audit, found none at {str(path.parent)!r}: make it")
    try:
        metadata = pq.read_schema(path).metadata or {}
        found = json.loads(metadata[_KEY])
        if found.pop("facts") != _digest_of(found):
            raise ValueError("other facts than were written")
        record = AuditRecord(**{**found, "uneven": tuple(found["uneven"])})
    except FileNotFoundError:
        return None
    except (OSError, pa.ArrowException, KeyError, TypeError, ValueError, AttributeError) as err:
        raise _no_record(path, err) from err
    if record.run != run:
        raise SpecInvalid(
            f"expected a record of run {run!r}, found one of run {record.run!r} in {str(path)!r}: name another file"
        )
    return record


def _no_record(path: Path, err: Exception) -> SpecInvalid:
    found = f"found {str(path)!r} ({type(err).__name__})"
    return SpecInvalid(f"expected the record of an audit, or no file, {found}: name another file")


def _digest_of(facts: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _content_of(connection: duckdb.DuckDBPyConnection, table: pa.Table) -> str:
    """Register a table of merged rows as `recorded`, and return the digest of its content."""
    connection.register("recorded", table)
    return f"{rows_of(connection, _CONTENT)[0]['digest']} {','.join(table.column_names)}"


def read_merged(connection: duckdb.DuckDBPyConnection, *, path: Path, record: AuditRecord) -> bool:
    """Replace the advances that a record answers for, if it and the ledger still have them. Return whether they have.

    Raise `SpecInvalid` if the rows of the record cannot be read.
    """
    ledger = rows_of(connection, _DIGEST, [0, record.seq])
    if ledger != [{"rows": record.rows, "digest": record.digest}]:
        return False
    try:
        recorded = pq.read_table(path)
    except (OSError, pa.ArrowException, ValueError) as err:
        raise _no_record(path, err) from err
    if _content_of(connection, recorded) != record.content:
        return False
    connection.execute(
        "CREATE TABLE merged AS FROM consumption WHERE kind <> 'advance' "
        "UNION ALL BY NAME FROM consumption WHERE kind = 'advance' AND seq > $1 "
        "UNION ALL BY NAME FROM recorded",
        [record.seq],
    )
    is_view = connection.execute("FROM duckdb_views() WHERE view_name = 'consumption'").fetchall()
    connection.execute(f"DROP {'VIEW' if is_view else 'TABLE'} consumption")
    connection.execute("ALTER TABLE merged RENAME TO consumption")
    connection.execute(
        "CREATE TABLE audited AS SELECT checkpoint_id FROM consumption "
        "WHERE kind = 'checkpoint' AND seq <= $1 AND NOT list_contains($2::VARCHAR[], checkpoint_id)",
        [record.seq, list(record.uneven)],
    )
    return True


def is_continued(connection: duckdb.DuckDBPyConnection, record: AuditRecord) -> bool:
    """Return whether a connection has the rows of a record, and the present head is the record's head or continues it."""
    merged = connection.execute("FROM duckdb_tables() WHERE table_name = 'audited'").fetchall()
    return bool(
        merged and connection.execute("FROM lineage WHERE checkpoint_id = ?", [record.checkpoint_id]).fetchall()
    )


def write_audit_record(
    connection: duckdb.DuckDBPyConnection, path: Path, run: str, earlier: AuditRecord | None = None
) -> None:
    """Write the record of an exact audit. `earlier` is the one whose rows the connection has."""
    since = earlier or AuditRecord(run=run, checkpoint_id="", seq=0, rows=0, digest="0", uneven=(), content="")
    heads = rows_of(connection, "SELECT checkpoint_id, seq FROM lineage WHERE run = ? AND is_head", [run])
    if not heads:
        return
    new = rows_of(connection, _DIGEST, [since.seq, heads[0]["seq"]])[0]
    uneven = connection.execute("SELECT DISTINCT checkpoint_id FROM uneven_shares ORDER BY checkpoint_id").fetchall()
    connection.execute(sql_script("merged_advances"))
    merged = connection.sql("FROM merged_advances").to_arrow_table()
    record = AuditRecord(
        run=run,
        **heads[0],
        rows=since.rows + new["rows"],
        digest=str(int(since.digest) + int(new["digest"])),
        uneven=tuple(name for (name,) in uneven),
        content=_content_of(connection, merged),
    )
    facts = asdict(record)
    written = json.dumps({**facts, "facts": _digest_of(facts)})
    try:
        with temporary_beside(path) as temporary:
            pq.write_table(merged.replace_schema_metadata({_KEY: written}), temporary, compression="zstd")
            temporary.rename(path)
    except OSError as err:
        raise SpecInvalid(
            f"expected to record the audit of an exact run in {str(path)!r}, found {err}: name another file"
        ) from err
