"""Passports of exported weights: whether a model was trained on a document, answered from one file, without the lakehouse.

A passport is a line of JSON and an xor filter over the keys of the rows that the checkpoint has seen, its ancestors in
other runs included. A seen document is always found. One in about 256 others is found, too.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open

from dlac_pipeline.audit.lakehouse_sql import open_audit, rows_of, sql_script
from dlac_pipeline.checkpoint.engines.weights import WEIGHTS_INDEX
from dlac_pipeline.checkpoint.restore.export import Exported
from dlac_pipeline.lakehouse.durable_io import write_durably
from dlac_pipeline.lakehouse.errors import SpecInvalid
from dlac_pipeline.lakehouse.iceberg.connect import Lakehouse
from dlac_pipeline.operations.documents.xor_filter import XorFilter

_FORMAT = 1
_SEEN = "SELECT DISTINCT k.key, f.salt, f.identity FROM keys_seen($1) AS k JOIN keyed_files AS f USING (identity)"


@dataclass(frozen=True, kw_only=True, slots=True)
class Passport:
    """What the first line of a passport says."""

    run: str
    checkpoint_id: str
    step: int
    digest: str
    """Of the exported file, as the ledger has it."""
    documents: int
    """Keys in the filter."""
    identities: tuple[tuple[str, str], ...]
    """Salt and identity of the keys: a JSON object of columns and their types."""
    incomplete: tuple[str, ...]
    """Why documents may be missing: tables with data files without keys, and training before an adopted checkpoint."""


def passport_of(export: Path) -> Path:
    """Return the place of the passport of a file or a folder of weights."""
    return export.with_name(f"{export.name}.passport")


def write_passport(lakehouse: Lakehouse, run: str, exported: Exported) -> Passport | None:
    """Write the passport of an export. None: no data file that it was trained on has keys, so there is none."""
    incomplete, query = sql_script("incomplete_keys"), _SEEN + " units plans checkpoints ancestors keyed_files"
    with open_audit(lakehouse, query=query + incomplete) as connection:
        found: Any = connection.sql(_SEEN, params=[exported.checkpoint_id]).to_arrow_table()
        if not len(found):
            return None
        reasons = [row["reason"] for row in rows_of(connection, incomplete, [exported.checkpoint_id])]
    keys = np.unique(found["key"].to_numpy().view(np.uint64))
    pairs = found.select(["salt", "identity"]).group_by(["salt", "identity"]).aggregate([]).to_pylist()
    passport = Passport(
        run=run,
        checkpoint_id=exported.checkpoint_id,
        step=exported.step,
        digest=exported.digest,
        documents=len(keys),
        identities=tuple(sorted((each["salt"], each["identity"]) for each in pairs)),
        incomplete=tuple(reasons),
    )
    made = XorFilter.of(keys)
    line = json.dumps({"format_version": _FORMAT, "seed": made.seed, "bytes": made.table.nbytes, **asdict(passport)})
    write_durably(passport_of(exported.path), line.encode() + b"\n" + made.table.tobytes())
    return passport


class OpenPassport:
    """A passport that answers. `facts` are those of its first line."""

    def __init__(self, export: Path) -> None:
        """Read the passport of an export. Raises `SpecInvalid` without one, or for one of another checkpoint."""
        path = passport_of(export)
        try:
            line, _, content = path.read_bytes().partition(b"\n")
            found = json.loads(line)
            seed = found.pop("seed")
            if found.pop("format_version") != _FORMAT or len(content) != found.pop("bytes"):
                raise ValueError("it is of another format, or cut short")
            identities, incomplete = tuple(map(tuple, found["identities"])), tuple(found["incomplete"])
            self.facts = Passport(**{**found, "identities": identities, "incomplete": incomplete})
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as err:
            raise SpecInvalid(
                f"expected a passport that `dlac export` wrote at {str(path)!r}, found {err!r}: export the checkpoint again, "
                "from a run whose sources have row_keys"
            ) from err
        about = _checkpoint_in(export)
        if about != self.facts.checkpoint_id:
            raise SpecInvalid(
                f"expected weights of checkpoint {self.facts.checkpoint_id!r}, as their passport says, found weights of "
                f"{about!r} in {str(export)!r}: use the passport that was written with them"
            )
        self._filter = XorFilter(seed, np.frombuffer(content, dtype=np.uint8))
        self._connection = duckdb.connect()
        self._connection.execute("CREATE TABLE keyed_files (salt VARCHAR, identity VARCHAR)")
        self._connection.executemany("INSERT INTO keyed_files VALUES (?, ?)", self.facts.identities)
        for name in ("row_key", "identity_text", "keys_of"):
            self._connection.execute(sql_script(name))

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

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


def _checkpoint_in(export: Path) -> str | None:
    """Return the checkpoint that the header of exported weights names."""
    index = export / WEIGHTS_INDEX
    try:
        if index.exists():
            return str(json.loads(index.read_text())["metadata"]["dlac.checkpoint_id"])
        file = next(iter(sorted(export.glob("*.safetensors")))) if export.is_dir() else export
        with safe_open(file, framework="numpy") as opened:
            return dict(opened.metadata() or {}).get("dlac.checkpoint_id")
    except (OSError, ValueError, KeyError, StopIteration, SafetensorError):
        return None
