"""Records of exact audits. With a record, a later audit checks only newer rows.

A record is a Parquet file of the auditor. It has the advances up to a checkpoint, merged, and the digest of the ledger rows that
they were made of. A later audit compares that digest with the ledger, and reads the merged rows in their place.
"""

import json
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

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
    "FROM consumption AS c WHERE kind = 'advance' AND seq > ? AND seq <= ?"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class AuditRecord:
    """Facts of the ledger that was audited."""

    run: str
    checkpoint_id: str
    """The head that was audited."""
    seq: int
    """Id of the head. The record answers for the advances up to it."""
    rows: int
    digest: str
    """Sum of DuckDB's hashes of the advances. Another version of DuckDB may hash otherwise: then everything is audited again."""
    uneven: tuple[str, ...]
    """Checkpoints whose shares are uneven for a good reason. Later rows may refute the reason, so they are checked again."""


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
        record = AuditRecord(**{**found, "uneven": tuple(found["uneven"])})
    except FileNotFoundError:
        return None
    except (OSError, pa.ArrowInvalid, KeyError, TypeError, ValueError) as err:
        raise SpecInvalid(
            f"expected the record of an audit, or no file, found {str(path)!r} ({type(err).__name__}): name another file"
        ) from err
    if record.run != run:
        raise SpecInvalid(
            f"expected a record of run {run!r}, found one of run {record.run!r} in {str(path)!r}: name another file"
        )
    return record


def read_merged(connection: duckdb.DuckDBPyConnection, *, path: Path, record: AuditRecord) -> bool:
    """Replace the advances that a record answers for, if the ledger still has them. Return whether it has."""
    ledger = rows_of(connection, _DIGEST, [0, record.seq])
    if ledger != [{"rows": record.rows, "digest": record.digest}]:
        return False
    connection.execute(
        "CREATE TABLE merged AS FROM consumption WHERE kind <> 'advance' "
        "UNION ALL BY NAME FROM consumption WHERE kind = 'advance' AND seq > $1 "
        "UNION ALL BY NAME FROM read_parquet($2)",
        [record.seq, str(path)],
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
    since = earlier or AuditRecord(run=run, checkpoint_id="", seq=0, rows=0, digest="0", uneven=())
    heads = rows_of(connection, "SELECT checkpoint_id, seq FROM lineage WHERE run = ? AND is_head", [run])
    if not heads:
        return
    new = rows_of(connection, _DIGEST, [since.seq, heads[0]["seq"]])[0]
    uneven = connection.execute("SELECT DISTINCT checkpoint_id FROM uneven_shares ORDER BY checkpoint_id").fetchall()
    record = AuditRecord(
        run=run,
        **heads[0],
        rows=since.rows + new["rows"],
        digest=str(int(since.digest) + int(new["digest"])),
        uneven=tuple(name for (name,) in uneven),
    )
    connection.execute(sql_script("merged_advances"))
    merged = connection.sql("FROM merged_advances").to_arrow_table()
    try:
        with temporary_beside(path) as temporary:
            pq.write_table(
                merged.replace_schema_metadata({_KEY: json.dumps(asdict(record))}), temporary, compression="zstd"
            )
            temporary.rename(path)
    except OSError as err:
        raise SpecInvalid(
            f"expected to record the audit of an exact run in {str(path)!r}, found {err}: name another file"
        ) from err
