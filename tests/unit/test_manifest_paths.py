"""Files of a checkpoint are in its folder, whatever paths its manifest and links contain."""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dlac_pipeline.checkpoint.manifest import FileEntry, content_digest, parse_manifest, verify_files
from dlac_pipeline.checkpoint.restore.verified_copy import restore
from dlac_pipeline.checkpoint.store import Tiers
from dlac_pipeline.extensions.exchange.foreign import foreign_checkpoint
from dlac_pipeline.lakehouse.errors import CheckpointDamaged, SpecInvalid
from dlac_pipeline.lakehouse.ledger.typed_rows import CheckpointRow
from dlac_pipeline.lakehouse.store_files import StoreFiles, file_digest
from tests.small_records import small_manifest

BAD_PATHS: list[Any] = [
    *("", ".", "..", "../x", "a/../../x", "a/..", "/etc/passwd", "//x", "a//b", "a/", "./a", "a\\b", "..\\x"),
    *("a\nb", "a\x00", "a\x1b[2J", "manifest.json", None, 7, ["a"]),
]


@pytest.mark.parametrize("path", BAD_PATHS)
def test_path_elsewhere_is_damage(path: Any) -> None:
    """A manifest that names a file outside its folder is refused before a read or write."""
    content = small_manifest(FileEntry(path=path, bytes=1, digest="d")).to_bytes()
    with pytest.raises(CheckpointDamaged, match="below the manifest's folder"):
        parse_manifest(content, origin="m")


@pytest.mark.parametrize("folder", ["..", "attempt-1", "attempt-1/step-1/x", "../step-1", "attempt-1/..", None, 7])
def test_folder_elsewhere_is_damage(folder: Any) -> None:
    """A file is in a checkpoint of the run. An older DLAC refuses a manifest that names one, and reads all others."""
    entries = [
        FileEntry(path="a", bytes=1, digest="d", folder=each) for each in ("", "attempt-0001/step-05-ab-0-cd", folder)
    ]
    plain, good, bad = (small_manifest(each).to_bytes() for each in entries)
    with pytest.raises(CheckpointDamaged, match="below the manifest's folder"):
        parse_manifest(bad, origin="m")
    assert [json.loads(each)["format_version"] for each in (plain, good)] == [1, 2]
    assert b"folder" not in plain
    assert parse_manifest(good, origin="m").files == [entries[1]]


@pytest.mark.parametrize("content", [b"", b"\xff", b"[]", b"null", b"{}", b'{"format_version": 1}'])
def test_other_content_is_damage(content: bytes) -> None:
    """Invalid content of a manifest is reported as damage. Two entries of one path would be written at the same time."""
    with pytest.raises(CheckpointDamaged):
        parse_manifest(content, origin="m")
    twice = [FileEntry(path="a", bytes=1, digest="d")] * 2
    with pytest.raises(CheckpointDamaged, match="distinct"):
        parse_manifest(small_manifest(*twice).to_bytes(), origin="m")


def test_paths_below_are_read() -> None:
    """Subfolders and odd characters are allowed."""
    entries = [FileEntry(path=path, bytes=1, digest="d") for path in ("a", "b/c.pt", "b/..d", "é e")]
    assert parse_manifest(small_manifest(*entries).to_bytes(), origin="m").files == entries


def checkpoint_in(folder: Path) -> tuple[CheckpointRow, FileEntry]:
    """Return the ledger row and the entry of a checkpoint of one file, in a store at `folder`."""
    at = folder / "r" / "attempt-0001" / "step-1"
    (at / "part").mkdir(parents=True)
    (at / "part" / "state").write_bytes(b"weights")
    entry = FileEntry(path="part/state", bytes=7, digest=file_digest(at / "part" / "state"))
    content = small_manifest(entry).to_bytes()
    (at / "manifest.json").write_bytes(content)
    return CheckpointRow(manifest_uri=(at / "manifest.json").as_uri(), manifest_digest=content_digest(content)), entry


@pytest.mark.parametrize("linked", ["part", "part/state"])
def test_link_out_is_damage(tmp_path: Path, linked: str) -> None:
    """A file outside the folder does not belong to the checkpoint, even with the same content."""
    row, entry = checkpoint_in(tmp_path / "store")
    folder = tmp_path / "store" / "r" / "attempt-0001" / "step-1"
    files = StoreFiles(deadline_s=0)
    verify_files(small_manifest(entry), str(folder), files)
    (tmp_path / "elsewhere").mkdir()
    (folder / linked).rename(tmp_path / "elsewhere" / "moved")
    (folder / linked).symlink_to(tmp_path / "elsewhere" / "moved")
    with pytest.raises(CheckpointDamaged, match="symbolic link"):
        verify_files(small_manifest(entry), folder.as_uri(), files)
    tiers = Tiers(run="r", local=tmp_path / "store", store=None, files=files)
    with pytest.raises(CheckpointDamaged, match="symbolic link"):
        restore(row, tiers)


@pytest.mark.parametrize("linked", ["part", "part/state"])
def test_linked_copy_is_mended(tmp_path: Path, linked: str) -> None:
    """A local copy with a link out is replaced from the store. Nothing is written to the target of the link."""
    row, _ = checkpoint_in(tmp_path / "store")
    tiers = Tiers(
        run="r", local=tmp_path / "local", store=(tmp_path / "store").as_uri(), files=StoreFiles(deadline_s=0)
    )
    copy = restore(row, tiers).folder
    outside = tmp_path / "outside"
    (copy / linked).rename(outside)
    kept = outside / "state" if linked == "part" else outside
    kept.write_bytes(b"theirs!")
    (copy / linked).symlink_to(outside)
    assert restore(row, tiers).fetched == ["part/state"]
    assert kept.read_bytes() == b"theirs!"
    assert not (copy / linked).is_symlink()
    assert (copy / "part" / "state").read_bytes() == b"weights"


@pytest.mark.parametrize("tag", ["../other", "/etc", "a/../../other"])
@pytest.mark.parametrize("latest", [True, False])
def test_tag_elsewhere_is_refused(tmp_path: Path, tag: str, latest: bool) -> None:
    """DeepSpeed's file `latest`, which is not under DLAC's control, may name no folder elsewhere."""
    for name in ("mine", "other"):
        (tmp_path / name).mkdir()
        torch.save({"module": {}}, tmp_path / name / "mp_rank_00_model_states.pt")
    (tmp_path / "mine" / "a").mkdir()
    (tmp_path / "mine" / "latest").write_text(tag if latest else "a")
    with pytest.raises(SpecInvalid, match="tag"):
        foreign_checkpoint(tmp_path / "mine", tag=None if latest else tag)


@pytest.mark.parametrize(
    "put",
    [Path.mkdir, lambda path: path.symlink_to("x" * 300), os.mkfifo],
    ids=["folder", "long link", "pipe"],
)
def test_no_file_is_damage(tmp_path: Path, put: Callable[[Path], None]) -> None:
    """Something else in place of a checkpoint's file is damage at once, no outage that is waited for."""
    folder = tmp_path / "attempt-0001" / "step-000000001-c"
    (folder / "parts").mkdir(parents=True)
    put(folder / "parts" / "state.pt")
    manifest = small_manifest(FileEntry(path="parts/state.pt", bytes=4, digest="0" * 64))
    began = time.monotonic()
    with pytest.raises(CheckpointDamaged, match=r"state\.pt"):
        verify_files(manifest, folder.as_uri(), StoreFiles(deadline_s=30.0))
    with pytest.raises(FileNotFoundError):
        StoreFiles(deadline_s=30.0).read((folder / "parts" / "state.pt").as_uri())
    assert time.monotonic() - began < 20
