"""Export of a checkpoint's weights, and identification of a file: its digest names the checkpoint."""

import socket
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from dlac_pipeline.checkpoint.manifest import Manifest
from dlac_pipeline.checkpoint.restore.verified_copy import restore
from dlac_pipeline.checkpoint.store import Tiers, storing
from dlac_pipeline.lakehouse.durable_io import fsync_path, make_folder_durably
from dlac_pipeline.lakehouse.errors import NoSuchCheckpoint, SpecInvalid
from dlac_pipeline.lakehouse.iceberg.connect import Lakehouse
from dlac_pipeline.lakehouse.ledger.commits import keep_checkpoint, record_exports
from dlac_pipeline.lakehouse.ledger.ledger import Ledger
from dlac_pipeline.lakehouse.ledger.run_rows import checkpoint_rows
from dlac_pipeline.lakehouse.ledger.typed_rows import ExportRow
from dlac_pipeline.lakehouse.store_files import file_digest

if TYPE_CHECKING:
    from dlac_pipeline.checkpoint.engines.weights import Weights

_SHARD_BYTES = 5_000_000_000
"""Of one file of a folder, as Hugging Face's libraries divide a model."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Exported:
    """A file or a folder of weights, known to the ledger."""

    path: Path
    digest: str
    """BLAKE3 of the file. If a folder has several files of weights: of their index."""
    bytes: int
    """Of the files of weights."""
    tensors: int
    checkpoint_id: str
    step: int
    files: list[str]
    """Names of the files whose digests the ledger has."""


def export_weights(
    lakehouse: Lakehouse,
    tiers: Tiers,
    path: Path,
    *,
    step: int | None = None,
    part: str = "model",
    config: Path | None = None,
) -> Exported:
    """Write the weights of a step's checkpoint, or of the head, as safetensors, and the digests of the files to the ledger.

    With `config`, the folder of a model's `config.json`, `path` becomes a folder that `from_pretrained` loads, and else a file.

    Raises:
        SpecInvalid: `path` is unsuitable, `part` is blank, or `config` describes no model.
        NoSuchRun: the run does not exist.
        NoSuchCheckpoint: it has no restorable checkpoint of that step.
        CheckpointDamaged: its files differ from those committed. Nothing was written.
        StoreUnavailable: the file cannot be written.
    """
    from dlac_pipeline.checkpoint.engines.weights import weights_of  # with torch, which an identification does not need

    _check_target(path, part, config)
    ledger = Ledger(lakehouse)
    with (
        keep_checkpoint(ledger, tiers.run, _hold_of(path), step=step) as row,
        TemporaryDirectory(prefix="dlac-export-") as own,  # the run's local copies come and go
    ):
        found = restore(row, replace(tiers, local=Path(own)) if tiers.store is not None else tiers)
        manifest = found.manifest
        weights = weights_of(manifest.engine, found.folder, part=part)
        return _write_weights(ledger, manifest, weights, path, part, config)


def _check_target(path: Path, part: str, config: Path | None) -> None:
    try:
        target = path.expanduser()
        unusable = not path.name or path.name == ".." or "\0" in str(path) or not part.strip()
        unusable |= target.is_dir() and (config is None or any(target.iterdir()))
        unusable |= config is not None and target.exists() and not target.is_dir()
    except (OSError, RuntimeError) as err:  # a name that is too long, or a user's folder that there is not
        raise SpecInvalid(f"expected a file to write, found {str(path)!r} ({err}): name one") from err
    if unusable and config is None:
        raise SpecInvalid(
            f"expected a file to write and the name of a part, found {str(path)!r} and {part!r}: name them, such as "
            "weights.safetensors and --part model, or name the folder of the model's config.json with --config"
        )
    if unusable:
        raise SpecInvalid(
            f"expected a new or empty folder to write and the name of a part, found {str(path)!r} and {part!r}: name them, such "
            "as weights and --part model"
        )
    if config is not None and not (config / "config.json").is_file():
        raise SpecInvalid(
            f"expected a folder with the config.json of a model, found none in {str(config)!r}: write it with "
            "model.config.save_pretrained(folder)"
        )


def _hold_of(path: Path) -> str:
    """The name that keeps a checkpoint while it is exported to `path`: exporting there again takes over what was killed."""
    return f"export:{socket.gethostname()}:{path.resolve()}"


def _write_weights(
    ledger: Ledger, manifest: Manifest, weights: "Weights", path: Path, part: str, config: Path | None
) -> Exported:
    from dlac_pipeline.checkpoint.restore.weight_files import write_file, write_folder

    about = {
        "dlac.run": manifest.run,
        "dlac.checkpoint_id": manifest.checkpoint_id,
        "dlac.step": str(manifest.step),
        "dlac.model_digest": manifest.model_digest,
        "dlac.ledger_uuid": manifest.ledger_uuid,
    }
    with storing(path, "the file of weights"):
        make_folder_durably(path.parent)
        beside = TemporaryDirectory(prefix=f"{path.name[:100]}.tmp-", dir=path.parent)
    with beside as folder:
        made = Path(folder) / path.name
        with storing(path, "the file of weights"):
            if config is None:
                written = write_file(weights, made, about)
            else:
                written = write_folder(weights, made, about, config=config, shard_bytes=_SHARD_BYTES)
        # The ledger first: a file that is there is known.
        rows = [
            ExportRow(checkpoint_id=manifest.checkpoint_id, digest=digest, bytes=size, file=name, part=part)
            for name, (digest, size) in written.items()
        ]
        record_exports(ledger, manifest.run, rows)
        with storing(path, "the file of weights"):
            made.rename(path)
            fsync_path(path.parent)
    return Exported(
        path=path,
        digest=rows[-1].digest,
        bytes=sum(row.bytes for row in rows),
        tensors=len(weights),
        checkpoint_id=manifest.checkpoint_id,
        step=manifest.step,
        files=list(written),
    )


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
