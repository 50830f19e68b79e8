from __future__ import annotations

from pathlib import Path

from dlac_pipeline.progress import Phase, ProgressWriter, progress_file, read_progress


def test_the_last_sign_of_life_is_read_back(tmp_path: Path) -> None:
    """A reader sees the last record, whole."""
    writer = ProgressWriter(tmp_path, 3)
    writer.write(1, Phase.TRAINING)
    writer.write(7, Phase.CHECKPOINT, loss_step=6, loss=0.25)
    writer.close()
    found = read_progress(tmp_path, 3)
    assert found is not None
    assert (found.step, found.phase, found.loss_step, found.loss) == (7, Phase.CHECKPOINT, 6, 0.25)


def test_a_rank_that_never_wrote_has_no_sign_of_life(tmp_path: Path) -> None:
    """A missing file and one that is not yet written are no record."""
    assert read_progress(tmp_path, 0) is None
    progress_file(tmp_path, 0).touch()
    assert read_progress(tmp_path, 0) is None


def test_without_a_launch_folder_nothing_is_written() -> None:
    """Under another launcher there is nobody to tell."""
    writer = ProgressWriter(None, 0)
    writer.write(1, Phase.TRAINING)
    writer.close()
