"""Export of a checkpoint's weights, and identification of a file: its digest names the checkpoint."""

import json
import socket
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from dlac_pipeline.checkpoint.restore.verified_copy import Restored, restore
from dlac_pipeline.checkpoint.store import Tiers, storing
from dlac_pipeline.lakehouse.durable_io import fsync_path, make_folder_durably
from dlac_pipeline.lakehouse.errors import NoSuchCheckpoint, SpecInvalid
from dlac_pipeline.lakehouse.iceberg.connect import Lakehouse
from dlac_pipeline.lakehouse.ledger.commits import keep_checkpoint, record_exports
from dlac_pipeline.lakehouse.ledger.ledger import Ledger
from dlac_pipeline.lakehouse.ledger.run_rows import checkpoint_rows
from dlac_pipeline.lakehouse.ledger.typed_rows import ExportRow
from dlac_pipeline.lakehouse.store_files import file_digest

if TYPE_CHECKING:  # an identification does not need torch
    from dlac_pipeline.checkpoint.engines.weights import Weights
    from dlac_pipeline.checkpoint.restore.weight_files import WrittenFiles

_Read = Callable[[Restored, Path], "Weights"]
"""Reads the tensors of a checkpoint, with a folder for temporary files."""
_Write = Callable[["Weights", Path, dict[str, str]], "WrittenFiles"]
"""Writes tensors to a path, with texts about them."""
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
    from dlac_pipeline.checkpoint.engines.weights import weights_of
    from dlac_pipeline.checkpoint.restore.weight_files import write_file, write_folder

    if not part.strip():
        raise SpecInvalid(f"expected the name of a part, found {part!r}: name one, such as --part model")
    path = _target(path, is_folder=config is not None)
    write: _Write = write_file
    if config is not None:
        _check_config(config)
        write = partial(write_folder, config=config, shard_bytes=_SHARD_BYTES)

    def read(found: Restored, scratch: Path) -> "Weights":
        return weights_of(found.manifest.engine, found.folder, part=part)

    return _export(lakehouse, tiers, path, step, part, read, write)


def export_tensors(lakehouse: Lakehouse, tiers: Tiers, path: Path, *, step: int | None = None) -> Exported:
    """Write the tensors of model and optimizer into a new folder that torch.distributed.checkpoint loads.

    Raises as `export_weights`.
    """
    from dlac_pipeline.checkpoint.engines.weights import state_of
    from dlac_pipeline.checkpoint.restore.weight_files import write_state_folder

    def read(found: Restored, scratch: Path) -> "Weights":
        with storing(scratch, "the folder of the conversion"):
            return state_of(found.manifest.engine, found.folder, scratch=scratch)

    path = _target(path, is_folder=True)
    return _export(lakehouse, tiers, path, step, "state", read, write_state_folder)


def _target(path: Path, *, is_folder: bool) -> Path:
    """Return the place that a finished file or folder can be renamed to."""
    try:
        unusable = not path.name or path.name == ".." or "\0" in str(path)
        target = path if unusable else path.expanduser().resolve()
        if is_folder:
            unusable |= target.is_mount() or (target.exists() and (not target.is_dir() or any(target.iterdir())))
        else:
            unusable |= target.is_dir()
    except (OSError, RuntimeError) as err:  # a name that is too long, or a user's folder that there is not
        raise SpecInvalid(f"expected a file or folder to write, found {str(path)!r} ({err}): name one") from err
    if unusable:
        wanted, example = ("a new or empty folder", "my-model") if is_folder else ("a file", "weights.safetensors")
        raise SpecInvalid(
            f"expected {wanted} to write, no mount point, found {str(path)!r}: name one, such as {example}"
        )
    return target


def _check_config(config: Path) -> None:
    try:
        found = json.loads((config / "config.json").read_text())
    except (OSError, ValueError) as err:
        raise SpecInvalid(
            f"expected a folder with the config.json of a model, found none in {str(config)!r} ({err}): write it with "
            "model.config.save_pretrained(folder)"
        ) from err
    if not isinstance(found, dict) or "quantization_config" in found:
        raise SpecInvalid(
            f"expected the config.json of a model without quantization_config in {str(config)!r}, as the exported weights are "
            "not quantized: remove that entry"
        )


def _hold_of(path: Path) -> str:
    """The name that keeps a checkpoint while it is exported to `path`: exporting there again takes over what was killed."""
    return f"export:{socket.gethostname()}:{path}"


def _export(
    lakehouse: Lakehouse, tiers: Tiers, path: Path, step: int | None, part: str, read: _Read, write: _Write
) -> Exported:
    """Verify the checkpoint, make `path` of it, and record the written files as those of `part`."""
    ledger = Ledger(lakehouse)
    with (
        keep_checkpoint(ledger, tiers.run, _hold_of(path), step=step) as row,
        TemporaryDirectory(prefix="dlac-export-") as own,  # the run's local copies come and go
    ):
        found = restore(row, replace(tiers, local=Path(own)) if tiers.store is not None else tiers)
        with storing(path, "the file of weights"):
            make_folder_durably(path.parent)
            beside = TemporaryDirectory(prefix=f"{path.name[:100]}.tmp-", dir=path.parent)
        with beside as folder:
            (finished := Path(folder) / "finished").mkdir()  # a folder of its own: `read` makes others
            made = finished / path.name
            tensors = read(found, Path(folder))
            with storing(path, "the file of weights"):
                written = write(tensors, made, _about(found))
            files = [
                ExportRow(checkpoint_id=row.checkpoint_id, digest=each.digest, bytes=each.bytes, file=name, part=part)
                for name, each in written.items()
            ]
            record_exports(ledger, tiers.run, files)  # the ledger first: a file that is there is known
            with storing(path, "the file of weights"):
                made.rename(path)
                fsync_path(path.parent)
    return Exported(
        path=path,
        digest=files[-1].digest,
        bytes=sum(each.bytes for each in files),
        tensors=len(tensors),
        checkpoint_id=row.checkpoint_id,
        step=row.step,
        files=[each.file for each in files],
    )


def _about(found: Restored) -> dict[str, str]:
    manifest = found.manifest
    return {
        "dlac.run": manifest.run,
        "dlac.checkpoint_id": manifest.checkpoint_id,
        "dlac.step": str(manifest.step),
        "dlac.model_digest": manifest.model_digest,
        "dlac.ledger_uuid": manifest.ledger_uuid,
    }


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
