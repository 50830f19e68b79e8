"""Appends of a run that its manifests in the store repeat, for a rebuild whose journal lacks them."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import pyarrow as pa

from dlac_pipeline.checkpoint.manifest import Manifest, content_digest, parse_manifest
from dlac_pipeline.lakehouse.errors import CheckpointDamaged
from dlac_pipeline.lakehouse.iceberg.connect import Lakehouse
from dlac_pipeline.lakehouse.ledger import arrow_rows, older_ledger, run_rows, typed_rows
from dlac_pipeline.lakehouse.ledger.ledger import recorded_rows
from dlac_pipeline.lakehouse.store_files import StoreFiles, is_local, path_at

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Stored:
    """A manifest in the store. It repeats the appends since its parent's, and its checkpoint's rows without a `seq`."""

    address: str
    content: bytes
    manifest: Manifest

    @cached_property
    def rows(self) -> list[typed_rows.LedgerRow]:
        """All rows that the manifest repeats."""
        return arrow_rows.parse_columns(self.manifest.ledger_rows)

    def own_rows(self) -> list[typed_rows.LedgerRow]:
        """Return the rows of the checkpoint's append, with the facts that only its commit had."""
        uri = path_at(self.address).resolve().as_uri() if is_local(self.address) else self.address
        facts: dict[str, Any] = {"manifest_uri": uri, "manifest_digest": content_digest(self.content)}
        facts["model_digest"] = self.manifest.model_digest
        facts["bytes"] = sum(entry.bytes for entry in self.manifest.files)
        own = [row for row in self.rows if not row.seq]
        return [replace(row, **facts) if isinstance(row, typed_rows.CheckpointRow) else row for row in own]

    def own_fence(self, seq: int) -> run_rows.Fence:
        """Return the fence of the checkpoint's append."""
        name = self.manifest.checkpoint_id
        nonce = name.removeprefix(f"{self.manifest.run}-").split("-")[1]  # the name of a writer may follow it
        return run_rows.Fence(attempt=self.manifest.attempt, nonce=nonce, seq=seq, head=name)


def stored_appends(
    lakehouse: Lakehouse, run: str, rows: Sequence[typed_rows.LedgerRow], uuid: str, files: StoreFiles
) -> dict[int, pa.Table]:
    """Return `seq` -> rows of the appends that the run's manifests prove and `rows` lack. `uuid` is the ledger's.

    Raises `StoreUnavailable`, or `SpecInvalid` for a store without credentials in the lakehouse.
    """
    manifests, committed = list[_Stored](), {row.head_after for row in rows}
    for folder in older_ledger.folders_of(rows):
        mark = older_ledger.commit_marked(folder, uuid, files)
        committed.add(None if mark is None or mark.run != run else mark.checkpoint_id)
        manifests += [each for each in _manifests(folder, files) if each.manifest.ledger_uuid == uuid]
    manifests = [each for each in manifests if each.manifest.run == run]
    committed.update(each.manifest.parent for each in manifests)
    known = {row.seq for row in rows}
    seq_of: dict[str | None, int] = {name: row.seq for name, row in run_rows.checkpoint_rows(rows).items()}
    found: dict[int, pa.Table] = {}
    for each in sorted(manifests, key=lambda each: (each.manifest.attempt, each.manifest.step)):
        repeated = _appends_in(each.rows)
        # retention has removed the parent's manifest, or the append itself is lost
        before = max(repeated, default=seq_of.get(each.manifest.parent))
        seq = None if before is None else before + 1
        for number in repeated.keys() - known - found.keys():
            first = repeated[number][0]
            # the advances of a checkpoint on an abandoned branch are in its own manifest only
            if not any(isinstance(row, typed_rows.CheckpointRow) for row in repeated[number]):
                fence = run_rows.Fence(attempt=first.attempt, nonce=first.nonce, seq=number, head=first.head_after)
                found[number] = recorded_rows(lakehouse, run, fence, repeated[number])
        if seq is not None and each.manifest.checkpoint_id in committed:
            seq_of.setdefault(each.manifest.checkpoint_id, seq)
            if seq not in known and seq not in found:
                found[seq] = recorded_rows(lakehouse, run, each.own_fence(seq), each.own_rows())
    return found


def _appends_in(rows: Sequence[typed_rows.LedgerRow]) -> Mapping[int, list[typed_rows.LedgerRow]]:
    appends: dict[int, list[typed_rows.LedgerRow]] = {}
    for row in rows:
        if row.seq:
            appends.setdefault(row.seq, []).append(row)
    return appends


def _manifests(folder: str, files: StoreFiles) -> Iterator[_Stored]:
    for address in older_ledger.unnamed_folders(folder, files, ()):
        place = f"{address}/manifest.json"
        try:
            content = files.read(place)
            yield _Stored(address=place, content=content, manifest=parse_manifest(content, origin=place))
        except FileNotFoundError:
            continue
        except CheckpointDamaged as err:
            _log.warning("%s", err)
