from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
import torch
import yaml

from dlac_pipeline import training_run
from dlac_pipeline.checkpoint.manifest import content_digest, read_manifest, verify_files
from dlac_pipeline.checkpoint.store import MANIFEST, folder_of
from dlac_pipeline.extensions.branches.rewind import rewind_run
from dlac_pipeline.lakehouse.errors import (
    CheckpointDamaged,
    CursorMismatch,
    FormatTooNew,
    NoRestorableCheckpoint,
    ResumeMismatch,
    RunFinished,
    ScriptInvalid,
    SpecInvalid,
    StoreUnavailable,
    TableReplaced,
)
from dlac_pipeline.lakehouse.ledger.typed_rows import CheckpointRow, ClaimRow, QuarantinedCheckpointRow
from dlac_pipeline.lakehouse.store_files import StoreFiles
from dlac_pipeline.plan.plan import Plans
from dlac_pipeline.plan.planner import make_plan
from dlac_pipeline.spec.job_spec import JobSpec
from dlac_pipeline.supervise.start.request import ClaimRequest, ResumeOptions
from dlac_pipeline.supervise.start.start_attempt import start_attempt
from tests.conftest import source_rows

if TYPE_CHECKING:
    from tests.conftest import Arena


@pytest.fixture
def spec(arena: Arena) -> JobSpec:
    """A run of 15 steps with a checkpoint every 5, trained in this process."""
    arena.table(appends=(70, 50), row_group_rows=20)
    return arena.spec("r1", world_size=1, batch_size=16, key_groups=4, every_steps=5)


def newest(arena: Arena, back: int = 0) -> CheckpointRow:
    """The newest checkpoint's row, or one `back` before it."""
    return arena.lineage("r1")[-1 - back]


def files(row: CheckpointRow) -> list[Path]:
    """The files of a checkpoint, largest first, without its manifest."""
    folder = folder_of(row.manifest_uri)
    found = [path for path in folder.iterdir() if path.name != "manifest.json"]
    return sorted(found, key=lambda path: -path.stat().st_size)


def damage(row: CheckpointRow, how: str) -> Path:
    """Damage one file of a checkpoint; returns its path."""
    first, second = files(row)[:2]
    content = bytearray(first.read_bytes())
    if how == "flipped bit":
        content[len(content) // 2] ^= 1
        first.write_bytes(content)
    elif how == "truncated":
        first.write_bytes(content[:-1])
    elif how == "missing":
        first.unlink()
    elif how == "swapped":
        content = bytearray(second.read_bytes())
        second.write_bytes(first.read_bytes())
        first.write_bytes(content)
    elif how == "manifest altered":
        first = first.with_name("manifest.json")
        first.write_text(first.read_text().replace('"attempt":1', '"attempt":2'))
    elif how == "manifest missing":
        first = first.with_name("manifest.json")
        first.unlink()
    return first


DAMAGES = ["flipped bit", "truncated", "missing", "swapped", "manifest altered", "manifest missing"]


def test_damage_is_detected_and_named(arena: Arena, spec: JobSpec, tmp_path: Path) -> None:
    """A checkpoint with a damaged file or manifest does not verify, and the error names a damaged file."""
    arena.train(spec, until=8)
    row = newest(arena)
    folder = folder_of(row.manifest_uri)
    shutil.copytree(folder, tmp_path / "undamaged")
    for how in DAMAGES:
        verify_files(read_manifest(row.manifest_uri, row.manifest_digest, StoreFiles()), str(folder), StoreFiles())
        path = damage(row, how)
        with pytest.raises(CheckpointDamaged) as caught:
            verify_files(read_manifest(row.manifest_uri, row.manifest_digest, StoreFiles()), str(folder), StoreFiles())
        named = [path.name] if how != "swapped" else [found.name for found in files(row)]
        assert any(name in str(caught.value) for name in named), how
        shutil.copytree(tmp_path / "undamaged", folder, dirs_exist_ok=True)


@pytest.mark.parametrize("how", ["flipped bit", pytest.param("manifest missing", marks=pytest.mark.soak)])
def test_damaged_head_falls_back_to_parent(arena: Arena, spec: JobSpec, how: str) -> None:
    """The data cursor steps back with the model: rows after the parent are read again, and the lineage is exact."""
    whole = arena.train(spec, until=13)
    bad, good = newest(arena), newest(arena, back=1)
    damage(bad, how)
    resumed = arena.train(spec)
    assert min(resumed) == good.step + 1 == 6
    assert {step: resumed[step] for step in range(6, 13)} == {step: whole[step] for step in range(6, 13)}
    (row,) = arena.rows("r1", QuarantinedCheckpointRow)
    assert (row.checkpoint_id, row.head_after) == (bad.checkpoint_id, good.checkpoint_id)
    assert files(bad)[0].name in row.reason or how == "manifest missing"
    consumed = [row_id for step in range(1, 6) for row_id in whole[step]] + [i for ids in resumed.values() for i in ids]
    assert sorted(consumed) == sorted(2 * list(range(120)))
    assert bad.checkpoint_id not in {row.checkpoint_id for row in arena.lineage("r1")}


def test_nothing_left_to_restore_stops_for_good(arena: Arena, spec: JobSpec) -> None:
    """With every checkpoint damaged the run stops with one status, and trying again does not silently start it over."""
    arena.train(spec, until=13)
    for row in arena.lineage("r1"):
        damage(row, "truncated")
    for _ in range(2):
        with pytest.raises(NoRestorableCheckpoint, match="another name"):
            arena.train(spec)


def test_a_store_that_is_away_is_not_damage(arena: Arena, spec: JobSpec) -> None:
    """A store that is not mounted is reported, and nothing is quarantined. Once it is mounted the run resumes."""
    arena.train(spec, until=8)
    store = Path(spec.checkpoint.store)
    store.rename(store.with_name("elsewhere"))
    for _ in range(2):  # with no folder at all, and with the empty folder of a mount point
        with pytest.raises(StoreUnavailable, match="mount"):
            arena.train(spec)
        (store / "r1").mkdir(parents=True, exist_ok=True)
    shutil.rmtree(store / "r1")
    store.rmdir()
    store.with_name("elsewhere").rename(store)
    assert arena.rows("r1", QuarantinedCheckpointRow) == []
    assert min(arena.train(spec)) == 6


CHANGES: list[tuple[dict[str, Any], str]] = [
    ({"seed": 4}, "seed: committed 3, asked for 4"),
    ({"row_filter": "even = true"}, "row_filter: committed '', asked for 'even = true'"),
    ({"batch_size": 32}, "batch_size: committed 16, asked for 32"),
    ({"key_groups": 8}, "key_groups: committed 4, asked for 8"),
    ({"columns": ["row_id", "x", "even"]}, r"columns: committed \('row_id', 'x'\)"),
    ({"shuffle": False}, "shuffle: committed True, asked for False"),
    ({"block_slices": 1}, "block_slices: committed 4, asked for 1"),
    ({"version": 1}, r"snapshot_id: committed \d+, asked for 1"),
    ({"table": "src.other"}, r"table_uuid: committed '.*', asked for '\(no table src\.other\)'"),
]


def test_resuming_something_else_is_refused_by_name(arena: Arena, spec: JobSpec) -> None:
    """Another seed, filter, batch size or column list is named with both values; nothing is claimed, nothing changes."""
    arena.train(spec, until=8)
    before = arena.rows("r1")
    for changes, message in CHANGES:
        settings = {"world_size": 1, "batch_size": 16, "key_groups": 4, "every_steps": 5, **changes}
        with pytest.raises(ResumeMismatch, match=message):
            arena.train(arena.spec("r1", **settings))
    assert arena.rows("r1") == before
    assert min(arena.train(spec)) == 6


def test_appends_do_not_disturb_run(arena: Arena, spec: JobSpec) -> None:
    """A run resumes on the snapshot that it pinned, whatever was appended since."""
    whole = arena.train(arena.spec("whole", world_size=1, batch_size=16, key_groups=4, every_steps=5))
    arena.train(spec, until=8)
    table = arena.lakehouse.load("src.t")
    table.append(table.scan(limit=10).to_arrow())
    resumed = arena.train(spec)
    assert resumed == {step: ids for step, ids in whole.items() if step > 5}


def test_early_recovery_keeps_plan(arena: Arena) -> None:
    """After the source has grown, the run resumes on the snapshot that its first attempt was claimed for."""
    arena.table(appends=(100, 100))
    spec = arena.spec("early", world_size=1)
    first = start_attempt(Plans(arena.lakehouse), spec, ClaimRequest())
    arena.lakehouse.load("src.t").append(source_rows(200, 100))
    second = start_attempt(Plans(arena.lakehouse), spec, ClaimRequest(replaces=first.attempt))
    assert second.leg == first.leg
    afresh = start_attempt(Plans(arena.lakehouse), spec, ClaimRequest())
    assert json.loads(afresh.leg)["sources"] != json.loads(first.leg)["sources"]


def test_a_replaced_table_is_refused_on_resume(arena: Arena, spec: JobSpec) -> None:
    """A table dropped and created again is not resumed from; nothing is claimed."""
    arena.train(spec, until=8)
    before = arena.rows("r1")
    arena.lakehouse.catalog.drop_table("src.t")
    arena.table(appends=(70, 50), row_group_rows=20)
    with pytest.raises(TableReplaced):
        arena.train(spec)
    assert arena.rows("r1") == before


def test_a_finished_run_takes_no_more_attempts(arena: Arena, spec: JobSpec) -> None:
    """Training a finished run again is refused, and its rows stay as they are."""
    arena.train(spec)
    before = arena.rows("r1")
    with pytest.raises(RunFinished):
        arena.train(spec)
    assert arena.rows("r1") == before


def test_a_manifest_of_a_newer_format_is_refused(arena: Arena, spec: JobSpec) -> None:
    """A manifest that a newer version committed is neither guessed at nor taken for damage."""
    arena.train(spec, until=8)
    row = newest(arena)
    manifest = read_manifest(row.manifest_uri, row.manifest_digest, StoreFiles())
    folder = folder_of(row.manifest_uri)
    raw = json.loads((folder / "manifest.json").read_text())
    newer = type(manifest)(**{**raw, "files": manifest.files, "format_version": 99})
    (folder / MANIFEST).write_bytes(newer.to_bytes())
    with pytest.raises(FormatTooNew, match="format version 99"):
        read_manifest(row.manifest_uri, content_digest(newer.to_bytes()), StoreFiles())


def test_unwrapped_model_is_explained(arena: Arena, spec: JobSpec) -> None:
    """`run.restore(model)` names what to write instead."""
    with (
        arena.training_run(spec) as run,
        pytest.raises(ScriptInvalid, match=r"'Linear'.*dlac_pipeline\.TorchState\(model=model"),
    ):
        run.restore(torch.nn.Linear(4, 1))


@pytest.mark.parametrize("store", ["a regular file", "below a regular file"])
def test_a_store_that_cannot_be_written_is_named(arena: Arena, spec: JobSpec, store: str) -> None:
    """The first checkpoint ends the attempt with the store's path; nothing is committed."""
    path = arena.home / "file"
    path.touch()
    bad = path if store == "a regular file" else path / "store"
    with pytest.raises(StoreUnavailable, match=str(path)):
        arena.train(arena.spec("r1", world_size=1, store=str(bad)))
    assert arena.rows("r1", CheckpointRow) == []


class Unloadable(torch.nn.Linear):
    """A model whose state has something that loading refuses."""

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]  # torch overloads it
        """Return the state with a plain object in it."""
        return {**super().state_dict(*args, **kwargs), "extra": object()}


def test_failed_vote_prevents_commit(spec: JobSpec, arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that cannot save its state votes no, and the checkpoint is not committed without it."""
    monkeypatch.setattr(torch.nn, "Linear", Unloadable)
    with pytest.raises(SpecInvalid, match="extra"):
        arena.train(spec)
    assert arena.rows("r1", CheckpointRow) == []


def test_missing_step_done_is_named(arena: Arena, spec: JobSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch that is never reported as done stops the run before the next batch, so that nothing is recorded unnoticed."""
    monkeypatch.setattr("dlac_pipeline.train.training_run.TrainingRun.step_done", lambda self, loss: None)
    with pytest.raises(ScriptInvalid, match="step 1"):
        arena.train(spec)
    assert arena.rows("r1", CheckpointRow) == []


def test_no_temporary_file_is_left(arena: Arena, spec: JobSpec) -> None:
    """A finished run leaves its checkpoints' files and nothing half-written."""
    arena.train(spec)
    names = [name for _, _, found in os.walk(spec.checkpoint.store) for name in found]
    assert {name for name in names if "tmp" in name or "probe" in name} == set()


def test_other_source_count_is_refused_early(arena: Arena, spec: JobSpec) -> None:
    """Also where a new leg is allowed: it changes weights and exclusions, not which sources there are."""
    arena.train(spec, until=8)
    source = spec.source.model_copy(update={"name": "more"})
    launch = spec.launch.model_copy(update={"new_leg": True})
    two = spec.model_copy(update={"mixture": [source], "launch": launch})
    with pytest.raises(ResumeMismatch, match=r"expected 1 sources, as leg 0 of run 'r1' binds, found 2"):
        start_attempt(Plans(arena.lakehouse), two, ClaimRequest(nonce="n"))
    with pytest.raises(ResumeMismatch, match="found 2 in the job spec"):
        rewind_run(arena.lakehouse, "r1", nonce="n", step=5, exclude=["row_id < 3"], spec=two)
    plan = make_plan(arena.lakehouse, spec.source)
    with pytest.raises(SpecInvalid, match=r"a plan for each of the 1 sources of run 'r1', found 2"):
        start_attempt(
            Plans(arena.lakehouse), spec, ClaimRequest(nonce="n", options=ResumeOptions(plans=(plan.row, plan.row)))
        )
    assert [row.attempt for row in arena.rows("r1", ClaimRow)] == [1]


def test_shifted_cursor_is_refused(arena: Arena, spec: JobSpec) -> None:
    """A reader state that the order contradicts is refused, also where manifest and ledger agree on it."""
    arena.train(spec, until=7)
    row = newest(arena)
    path = folder_of(row.manifest_uri) / MANIFEST
    manifest = json.loads(path.read_bytes())
    manifest["reader_state"][0][2][2] += 1
    content = json.dumps(manifest).encode()
    path.write_bytes(content)
    table = arena.lakehouse.own("consumption")
    rows = table.scan().to_arrow()
    digests = [
        content_digest(content) if each == row.manifest_digest else each for each in rows["manifest_digest"].to_pylist()
    ]
    index = rows.column_names.index("manifest_digest")
    field = rows.schema.field(index)
    table.overwrite(rows.set_column(index, field, pa.array(digests, field.type)))
    with pytest.raises(CursorMismatch, match=r"cursor of key group 2 in source 0 .* after step 5"):
        arena.train(spec)


def test_first_checkpoint_resumes_same_numbers(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that dies in its second step draws there what an undisturbed run draws, and not the numbers of step 1 again."""
    arena.table(appends=(96,))
    monkeypatch.setenv("DLAC_HOME", str(arena.home))
    drawn: dict[str, list[float]] = {"undisturbed": [], "killed": []}
    for run, until in (("undisturbed", 0), ("killed", 2), ("killed", 0)):
        path = arena.home / f"{run}.yaml"
        spec = arena.spec(run, world_size=1, passes=1, every_steps=1)
        path.write_text(yaml.safe_dump(spec.model_dump(mode="json")))
        with training_run(path) as opened:
            opened.restore(model=torch.nn.Linear(4, 1))
            for batch in opened.batches():
                if batch.step == until:
                    break
                drawn[run].append(torch.rand(()).item())
                opened.step_done(batch.mean(batch["x"].sum(-1)))
    assert drawn["killed"] == drawn["undisturbed"]
    assert len({*drawn["undisturbed"]}) == 3
