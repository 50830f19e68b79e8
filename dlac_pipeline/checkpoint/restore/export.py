"""Export of a checkpoint as a file of weights, and its identification: the file's digest names the checkpoint."""

import json
import socket
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from safetensors import SafetensorError

from dlac_pipeline.checkpoint.manifest import Manifest
from dlac_pipeline.checkpoint.restore.verified_copy import restore
from dlac_pipeline.checkpoint.store import Tiers, storing
from dlac_pipeline.lakehouse.durable_io import fsync_directory, make_folder_durably, temporary_beside
from dlac_pipeline.lakehouse.errors import NoSuchCheckpoint, SpecInvalid
from dlac_pipeline.lakehouse.iceberg.connect import Lakehouse
from dlac_pipeline.lakehouse.ledger.commits import keep_checkpoint, record_export
from dlac_pipeline.lakehouse.ledger.ledger import Ledger
from dlac_pipeline.lakehouse.ledger.run_rows import checkpoint_rows
from dlac_pipeline.lakehouse.ledger.typed_rows import ExportRow
from dlac_pipeline.lakehouse.store_files import file_digest, sync_file

if TYPE_CHECKING:
    from dlac_pipeline.checkpoint.engines.weights import Weights


@dataclass(frozen=True, kw_only=True, slots=True)
class Exported:
    """A file of weights, known to the ledger."""

    path: Path
    digest: str
    """BLAKE3 of the file."""
    bytes: int
    tensors: int
    checkpoint_id: str
    step: int


def export_weights(
    lakehouse: Lakehouse, tiers: Tiers, path: Path, *, step: int | None = None, part: str = "model"
) -> Exported:
    """Write the weights of a step's checkpoint, or of the head, as safetensors, and the file's digest to the ledger.

    Raises:
        SpecInvalid: `path` is no file's, or `part` is blank.
        NoSuchRun: the run does not exist.
        NoSuchCheckpoint: it has no restorable checkpoint of that step.
        CheckpointDamaged: its files differ from those committed. Nothing was written.
        StoreUnavailable: the file cannot be written.
    """
    from dlac_pipeline.checkpoint.engines.weights import weights_of  # with torch, which an identification does not need

    try:
        target = path.expanduser()
        unusable = not path.name or path.name == ".." or "\0" in str(path) or target.is_dir() or not part.strip()
    except (OSError, RuntimeError) as err:  # a name that is too long, or a user's folder that there is not
        raise SpecInvalid(f"expected a file to write, found {str(path)!r} ({err}): name one") from err
    if unusable:
        raise SpecInvalid(
            f"expected a file to write and the name of a part, found {str(path)!r} and {part!r}: name them, such as "
            "weights.safetensors and --part model"
        )
    ledger = Ledger(lakehouse)
    with (
        keep_checkpoint(ledger, tiers.run, _hold_of(path), step=step) as row,
        TemporaryDirectory(prefix="dlac-export-") as own,  # the run's local copies come and go
    ):
        found = restore(row, replace(tiers, local=Path(own)) if tiers.store is not None else tiers)
        manifest = found.manifest
        weights = weights_of(manifest.engine, found.folder, part=part)
        return _write_weights(ledger, manifest, weights, path, part)


def _hold_of(path: Path) -> str:
    """The name that keeps a checkpoint while it is exported to `path`: exporting there again takes over what was killed."""
    return f"export:{socket.gethostname()}:{path.resolve()}"


def _write_weights(ledger: Ledger, manifest: Manifest, weights: "Weights", path: Path, part: str) -> Exported:
    about = {
        "format": "pt",
        "dlac.run": manifest.run,
        "dlac.checkpoint_id": manifest.checkpoint_id,
        "dlac.step": str(manifest.step),
        "dlac.model_digest": manifest.model_digest,
        "dlac.ledger_uuid": manifest.ledger_uuid,
    }
    with temporary_beside(path) as temporary:
        with storing(path, "the file of weights"):
            make_folder_durably(path.parent)
            _save(weights, temporary, about)
            _order_header(temporary)
            sync_file(temporary)
            digest, size = file_digest(temporary), temporary.stat().st_size
        # The ledger first: a file that is there is known.
        row = ExportRow(checkpoint_id=manifest.checkpoint_id, digest=digest, bytes=size, file=path.name, part=part)
        record_export(ledger, manifest.run, row)
        with storing(path, "the file of weights"):
            temporary.rename(path)
            fsync_directory(path.parent)
    return Exported(
        path=path,
        digest=digest,
        bytes=size,
        tensors=len(weights),
        checkpoint_id=manifest.checkpoint_id,
        step=manifest.step,
    )


def _save(weights: "Weights", path: Path, about: dict[str, str]) -> None:
    """Write the file.

    Raises:
        OSError: it cannot be written. The library's own error is converted.
    """
    from safetensors.torch import save_file

    try:
        # Tensors that share memory are written separately, so that any program can load the file.
        save_file({name: tensor.clone() for name, tensor in sorted(weights.items())}, path, about)
    except SafetensorError as err:
        raise OSError(str(err)) from err


def _order_header(path: Path) -> None:
    """The library writes its header in an order of chance: with it in order, the same weights make the same file."""
    with path.open("r+b") as stream:
        length = int.from_bytes(stream.read(8), "little")
        header = json.loads(stream.read(length))
        content = json.dumps(header, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
        stream.seek(8)
        stream.write(content.ljust(length))


def checkpoint_of_file(lakehouse: Lakehouse, path: Path) -> dict[str, object]:
    """Return the checkpoint from which a file of weights was exported, by its content alone.

    Raises:
        NoSuchCheckpoint: this lakehouse knows none.
    """
    digest = file_digest(path)
    row = Ledger(lakehouse).export(digest)
    if row is None:
        raise NoSuchCheckpoint(
            f"expected {str(path)!r} to be an export that this lakehouse knows, found none with its digest {digest}"
        )
    rows = Ledger(lakehouse).head_rows(row.run)
    checkpoint = checkpoint_rows(rows)[row.checkpoint_id]
    return {
        "digest": digest,
        "run": row.run,
        "checkpoint_id": row.checkpoint_id,
        "step": checkpoint.step,
        "model_digest": checkpoint.model_digest,
        "exported_at": row.committed_at,
    }
