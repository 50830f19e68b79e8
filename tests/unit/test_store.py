"""The folders of a run in its store: proved before an attempt, and shared with other machines."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest

from catalog.durable_io import write_durably
from dlac_pipeline.checkpoint.files import StoreFiles
from dlac_pipeline.checkpoint.store import Tiers

AT_ONCE = 4


def tiers_in(folder: Path, *, apart: bool) -> Tiers:
    """Of the run "r" in one folder, or in two."""
    store = (folder / "far").as_uri() if apart else None
    return Tiers(run="r", local=folder / "near", store=store, files=StoreFiles(deadline_s=0.0))


@pytest.mark.parametrize("apart", [False, True], ids=["one place", "two places"])
def test_launches_with_one_process_id_prove_a_shared_store_at_once(tmp_path: Path, apart: bool) -> None:
    """Containers on several machines have the same small process ids: none renames another's file away."""
    together = Barrier(AT_ONCE, timeout=10.0)

    def prove(number: int) -> None:
        for _ in range(10):
            together.wait()
            tiers_in(tmp_path, apart=apart).check_writable()

    with ThreadPoolExecutor(AT_ONCE) as pool:
        list(pool.map(prove, range(AT_ONCE)))
    left = {path.name for path in tmp_path.rglob("*") if path.is_file()}
    assert left == ({".dlac"} if apart else set())


def test_a_write_that_fails_leaves_no_temporary_file(tmp_path: Path) -> None:
    """Names are never used again, so nothing would overwrite what is left."""
    (tmp_path / "taken" / "by-a-folder").mkdir(parents=True)
    with pytest.raises(OSError, match="taken"):
        write_durably(tmp_path / "taken", b"content")
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]
