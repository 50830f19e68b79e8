"""Passports of exported weights: whether a model was trained on a document, answered from one file, without the lakehouse.

A passport is a line of JSON and an xor filter over the keys of the rows that the checkpoint has seen, its ancestors in
other runs included. A seen document is always found. One in about 256 others is found, too. The ledger has the digest of a
passport, as of the weights.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import numpy.typing as npt
from blake3 import blake3

import dlac_pipeline as dlac
from dlac_pipeline.audit.lakehouse_sql import open_audit, rows_of, sql_script
from dlac_pipeline.checkpoint.manifest import content_digest
from dlac_pipeline.extensions.erasure.xor_filter import XorFilter
from dlac_pipeline.lakehouse.durable_io import write_durably
from dlac_pipeline.lakehouse.errors import SpecInvalid
from dlac_pipeline.lakehouse.iceberg.connect import Lakehouse
from dlac_pipeline.lakehouse.ledger.ledger import Ledger
from dlac_pipeline.lakehouse.ledger.typed_rows import ExportRow
from dlac_pipeline.lakehouse.store_files import file_digest

_FORMAT = 1
_PART = "passport"
"""Part of the row of a passport among the exports."""
_SEEN = "SELECT DISTINCT k.key, f.salt, f.identity FROM keys_seen($1) AS k JOIN keyed_files AS f USING (identity)"


@dataclass(frozen=True, kw_only=True, slots=True)
class Passport:
    """Content of the first line of a passport."""

    run: str
    checkpoint_id: str
    step: int
    files: tuple[tuple[str, str], ...]
    """Names and digests of the exported files, as the ledger has them."""
    documents: int
    """Keys in the filter."""
    identities: tuple[tuple[str, str], ...]
    """Salt and identity of the keys: a JSON object of columns and their types."""
    incomplete: tuple[str, ...]
    """Why documents may be missing: tables with data files without keys, and training before an adopted checkpoint."""


def passport_of(export: Path) -> Path:
    """Return the place of the passport of a file or a folder of weights."""
    return export.with_name(f"{export.name}.passport")


def write_passport(lakehouse: Lakehouse, export: Path) -> Passport | None:
    """Write the passport of an exported file or folder, and its digest to the ledger.

    None: no data file that it was trained on has keys. The passport of an earlier export is removed.

    Raises:
        NoSuchCheckpoint: the lakehouse knows no export with the digest of a file.
        SpecInvalid: the files are of several checkpoints, or there is none.
    """
    files = _exported_files(lakehouse, export)
    about = next(iter(files.values()))
    incomplete, query = sql_script("incomplete_keys"), _SEEN + " units plans checkpoints ancestors keyed_files"
    with open_audit(lakehouse, query=query + incomplete) as connection:
        found: Any = connection.sql(_SEEN, params=[about["checkpoint_id"]]).to_arrow_table()
        if not len(found):
            passport_of(export).unlink(missing_ok=True)
            return None
        reasons = [row["reason"] for row in rows_of(connection, incomplete, [about["checkpoint_id"]])]
    keys = np.unique(found["key"].to_numpy().view(np.uint64))
    pairs = found.select(["salt", "identity"]).group_by(["salt", "identity"]).aggregate([]).to_pylist()
    passport = Passport(
        run=about["run"],
        checkpoint_id=about["checkpoint_id"],
        step=about["step"],
        files=tuple((name, each["digest"]) for name, each in files.items()),
        documents=len(keys),
        identities=tuple(sorted((each["salt"], each["identity"]) for each in pairs)),
        incomplete=tuple(reasons),
    )
    content = _content(passport, XorFilter.of(keys))
    path = passport_of(export)
    row = ExportRow(
        checkpoint_id=passport.checkpoint_id,
        digest=content_digest(content),
        bytes=len(content),
        file=path.name,
        part=_PART,
    )
    dlac.record_exports(Ledger(lakehouse), passport.run, [row])
    write_durably(path, content)
    return passport


def _exported_files(lakehouse: Lakehouse, export: Path) -> dict[str, dict[str, Any]]:
    """Return the ledger's facts of each file of weights of an export, by name. A folder has several, and an index."""
    paths = sorted(export.glob("*.safetensors*")) if export.is_dir() else [export]
    files = {path.name: dlac.checkpoint_of_file(lakehouse, path) for path in paths}
    found = sorted({each["checkpoint_id"] for each in files.values()})
    if len(found) != 1:
        raise SpecInvalid(
            f"expected the weights of one checkpoint in {str(export)!r}, found {found!r}: export one into a folder of its own"
        )
    return files


def _content(passport: Passport, made: XorFilter) -> bytes:
    facts = {"format_version": _FORMAT, "seed": made.seed, **asdict(passport)}
    table = made.table.tobytes()
    return json.dumps({**facts, "digest": digest_of_passport(facts, table)}).encode() + b"\n" + table


def digest_of_passport(facts: dict[str, Any], table: bytes) -> str:
    """Return the digest that binds the facts of a passport to its filter."""
    return blake3(json.dumps(facts, sort_keys=True).encode() + b"\n" + table).hexdigest()


class OpenPassport:
    """A passport that answers. `facts` are the facts of its first line."""

    def __init__(self, export: Path) -> None:
        """Read the passport of an export. Raises `SpecInvalid` without one, for a changed one, or for one of other weights."""
        path = passport_of(export)
        try:
            self._whole = path.read_bytes()
            line, _, content = self._whole.partition(b"\n")
            found = json.loads(line)
            if found["format_version"] != _FORMAT or found.pop("digest") != digest_of_passport(found, content):
                raise ValueError("it is of another format, was changed, or is cut short")
            del found["format_version"]
            seed = found.pop("seed")
            lists = {name: tuple(map(tuple, found[name])) for name in ("files", "identities")}
            self.facts = Passport(**{**found, **lists, "incomplete": tuple(found["incomplete"])})
            columns = [json.loads(identity) for _, identity in self.facts.identities]
            if not content or len(content) % 3 or not all(type(each) is dict for each in columns):
                raise ValueError("it has no filter, or no columns")
            is_list = type(found["incomplete"]) is list
            numbers = [seed, self.facts.step, self.facts.documents]
            texts = [self.facts.run, self.facts.checkpoint_id, *self.facts.incomplete]
            are_numbers = all(type(each) is int and each >= 0 for each in numbers)
            if not (is_list and are_numbers and all(type(each) is str for each in texts)):
                raise ValueError("it has facts of other types")
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as err:
            raise SpecInvalid(
                f"expected a passport that `dlac passport write` wrote at {str(path)!r}, found {err!r}: write it again, for "
                "weights of a run whose sources have row_keys"
            ) from err
        self._check_files(export)
        self._filter = XorFilter(seed, np.frombuffer(content, dtype=np.uint8))
        self._connection = duckdb.connect()
        self._connection.execute("CREATE TABLE keyed_files (salt VARCHAR, identity VARCHAR)")
        self._connection.executemany("INSERT INTO keyed_files VALUES (?, ?)", self.facts.identities)
        for name in ("row_key", "identity_text", "keys_of"):
            self._connection.execute(sql_script(name))

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def _check_files(self, export: Path) -> None:
        """Check the digests of the files of weights. The only file of an export may have another name."""
        files = {export / name if export.is_dir() else export: digest for name, digest in self.facts.files}
        try:
            others = [path.name for path, digest in files.items() if file_digest(path) != digest]
        except OSError as err:
            others = [str(err)]
        if others or (len(self.facts.files) > 1 and not export.is_dir()):
            raise SpecInvalid(
                f"expected the weights of checkpoint {self.facts.checkpoint_id!r}, as their passport says, found others in "
                f"{str(export)!r} ({', '.join(others)}): use the passport that was written with them"
            )

    def is_in_ledger(self, lakehouse: Lakehouse) -> bool:
        """Return whether a lakehouse knows the export. Raises `SpecInvalid` if it does, and not with this passport."""
        ledger = Ledger(lakehouse)
        if all(ledger.export(digest) is None for _, digest in self.facts.files):
            return False
        row = ledger.export(content_digest(self._whole))
        if row is None or (row.run, row.checkpoint_id) != (self.facts.run, self.facts.checkpoint_id):
            raise SpecInvalid(
                f"expected a passport of checkpoint {self.facts.checkpoint_id!r} that the ledger knows, found a changed one: "
                "write it again with `dlac passport write`"
            )
        return True

    def has(self, document: Sequence[str]) -> bool:
        """Return True if the checkpoint has seen a document, or with a chance of 1 in 256 if not. `document`: its key's values.

        Raises `SpecInvalid` if they do not fit the columns of any key.
        """
        keys = self._connection.execute("SELECT key FROM keys_of($1)", [list(document)]).fetchall()
        if not keys:
            columns = [identity for _, identity in self.facts.identities]
            raise SpecInvalid(f"expected the values of the columns {columns!r}, found {list(document)!r}: give these")
        return bool(self.has_keys(np.array(keys, dtype=np.int64)[:, 0]).any())

    def has_keys(self, keys: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Return the same for keys as the macro `row_key` computes them, bool [n]."""
        return self._filter.has(keys.view(np.uint64))
