import json
import shutil
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch

import dlac_pipeline as dlac
from dlac_pipeline.checkpoint.engines import TorchState
from dlac_pipeline.checkpoint.manifest import content_digest, read_manifest, verify_files
from dlac_pipeline.checkpoint.store import MANIFEST, folder_of
from dlac_pipeline.extensions.branches.rewind import rewind_run
from dlac_pipeline.lakehouse import errors
from dlac_pipeline.lakehouse.ledger.typed_rows import CheckpointRow, ClaimRow, QuarantinedCheckpointRow
from dlac_pipeline.lakehouse.store_files import StoreFiles
from dlac_pipeline.plan.plan import Plans
from dlac_pipeline.plan.planner import make_plan
from dlac_pipeline.spec.job_spec import JobSpec
from dlac_pipeline.supervise.start.request import ClaimRequest, ResumeOptions
from dlac_pipeline.supervise.start.start_attempt import start_attempt
from tests.conftest import Arena, source_rows


def newest(arena: Arena, back: int = 0) -> CheckpointRow:
    """The newest checkpoint's row, or one `back` before it."""
    return arena.lineage("r1")[-1 - back]


def files(row: CheckpointRow) -> list[Path]:
    """The files of a checkpoint, largest first, without its manifest."""
    found = [path for path in folder_of(row.manifest_uri).iterdir() if path.name != "manifest.json"]
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
    """A checkpoint with a damaged file or manifest does not verify, and the error names the file. A newer format is no damage."""
    arena.train(spec, until=8)
    row = newest(arena)
    folder = folder_of(row.manifest_uri)
    shutil.copytree(folder, tmp_path / "undamaged")
    for how in DAMAGES:
        verify_files(read_manifest(row.manifest_uri, row.manifest_digest, StoreFiles()), str(folder), StoreFiles())
        path = damage(row, how)
        with pytest.raises(errors.CheckpointDamaged) as caught:
            verify_files(read_manifest(row.manifest_uri, row.manifest_digest, StoreFiles()), str(folder), StoreFiles())
        named = [path.name] if how != "swapped" else [found.name for found in files(row)]
        assert any(name in str(caught.value) for name in named), how
        shutil.copytree(tmp_path / "undamaged", folder, dirs_exist_ok=True)
    manifest = read_manifest(row.manifest_uri, row.manifest_digest, StoreFiles())
    raw = {**json.loads((folder / MANIFEST).read_text()), "files": manifest.files, "format_version": 99}
    newer = type(manifest)(**raw).to_bytes()
    (folder / MANIFEST).write_bytes(newer)
    with pytest.raises(errors.FormatTooNew, match="format version 99"):
        read_manifest(row.manifest_uri, content_digest(newer), StoreFiles())


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


def test_a_store_that_is_away_is_not_damage(arena: Arena, spec: JobSpec) -> None:
    """A store that is not mounted is reported, and nothing is quarantined. Once it is mounted the run resumes."""
    arena.train(spec, until=8)
    store = Path(spec.checkpoint.store)
    store.rename(store.with_name("elsewhere"))
    for _ in range(2):  # with no folder at all, and with the empty folder of a mount point
        with pytest.raises(errors.StoreUnavailable, match="mount"):
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
    ({"version": 1}, r"snapshot_id: committed \d+, asked for 1"),
]


def test_resuming_something_else_is_refused_by_name(arena: Arena, spec: JobSpec) -> None:
    """Another seed, filter, batch size or table is named with both values, and so is a replaced table; nothing is claimed."""
    arena.train(spec, until=8)
    before = arena.rows("r1")
    for changes, message in CHANGES:
        settings = {"world_size": 1, "batch_size": 16, "key_groups": 4, "every_steps": 5, **changes}
        with pytest.raises(errors.ResumeMismatch, match=message):
            arena.train(arena.spec("r1", **settings))
    with pytest.raises(errors.NoSuchTable, match=r"'src\.other'.*did you mean 'src\.t'"):
        arena.train(arena.spec("r1", world_size=1, batch_size=16, key_groups=4, every_steps=5, table="src.other"))
    arena.lakehouse.catalog.drop_table("src.t")
    arena.table(appends=(70, 50), row_group_rows=20)
    with pytest.raises(errors.TableReplaced):
        arena.train(spec)
    assert arena.rows("r1") == before
    with pytest.raises(errors.TableReplaced):  # a recovery claims first, and loads its tables before any rank trains
        start_attempt(Plans(arena.lakehouse), spec, ClaimRequest(replaces=1))


def test_early_recovery_keeps_plan(arena: Arena) -> None:
    """After the source has grown, the run resumes on the snapshot that its first attempt was claimed for."""
    arena.table(appends=(100, 100))
    spec = arena.spec("early", world_size=1)
    first = start_attempt(Plans(arena.lakehouse), spec, ClaimRequest())
    arena.lakehouse.load("src.t").append(source_rows(200, 100))
    assert start_attempt(Plans(arena.lakehouse), spec, ClaimRequest(replaces=first.attempt)).leg == first.leg
    afresh = start_attempt(Plans(arena.lakehouse), spec, ClaimRequest())
    assert json.loads(afresh.leg)["sources"] != json.loads(first.leg)["sources"]


def test_recovery_keeps_exclusions_of_rewind(arena: Arena, spec: JobSpec) -> None:
    """A recovery after a rewind leaves the excluded rows out, in a new leg, although its launch requests no change."""
    arena.train(spec, until=8)
    rewind_run(arena.lakehouse, "r1", nonce="n", target=5, exclude=["even = true"], spec=spec)
    point = start_attempt(Plans(arena.lakehouse), spec, ClaimRequest(replaces=2))
    assert (point.step, point.leg_is_new, point.leaves_out_more) == (5, True, True)
    assert json.loads(point.leg)["sources"][0]["exclude"] == ["even = true"]


def test_unwritable_store_is_named(arena: Arena, spec: JobSpec) -> None:
    """The first checkpoint ends the attempt with the store's path. Nothing is committed."""
    path = arena.home / "file"
    path.touch()
    with pytest.raises(errors.StoreUnavailable, match=str(path)):
        arena.train(arena.spec("r1", world_size=1, store=str(path / "store")))
    assert arena.rows("r1", CheckpointRow) == []


class Unloadable(torch.nn.Linear):
    """A model whose state has something that loading refuses."""

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]  # torch overloads it
        """Return the state with a plain object in it."""
        return {**super().state_dict(*args, **kwargs), "extra": object()}


@pytest.mark.parametrize(
    ("replaced", "by", "error", "named"),
    [
        ("torch.nn.Linear", Unloadable, errors.SpecInvalid, "extra"),
        ("dlac_pipeline.train.training_run.TrainingRun.step_done", lambda *_: None, errors.ScriptInvalid, "step 1"),
    ],
    ids=["failed vote", "step not done"],
)
def test_missing_answer_prevents_commit(
    arena: Arena, spec: JobSpec, replaced: str, by: Any, error: type[Exception], named: str
) -> None:
    """A rank that cannot save votes no. A batch that is never done stops the run, so that nothing is recorded unnoticed."""
    arena.monkeypatch.setattr(replaced, by)
    with pytest.raises(error, match=named):
        arena.train(spec)
    assert arena.rows("r1", CheckpointRow) == []


def test_other_source_count_is_refused_early(arena: Arena, spec: JobSpec) -> None:
    """Also where a new leg is allowed: it changes weights and exclusions, not which sources there are."""
    arena.train(spec, until=8)
    source = spec.source.model_copy(update={"name": "more"})
    two = spec.model_copy(update={"mixture": [source], "launch": spec.launch.model_copy(update={"new_leg": True})})
    with pytest.raises(errors.ResumeMismatch, match=r"expected 1 sources, as leg 0 of run 'r1' binds, found 2"):
        start_attempt(Plans(arena.lakehouse), two, ClaimRequest(nonce="n"))
    with pytest.raises(errors.ResumeMismatch, match="found 2 in the job spec"):
        rewind_run(arena.lakehouse, "r1", nonce="n", target=5, exclude=["row_id < 3"], spec=two)
    plan = make_plan(arena.lakehouse, spec.source)
    with pytest.raises(errors.SpecInvalid, match=r"a plan for each of the 1 sources of run 'r1', found 2"):
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
    with pytest.raises(errors.CursorMismatch, match=r"cursor of key group 2 in source 0 .* after step 5"):
        arena.train(spec)


def test_first_checkpoint_resumes_same_numbers(arena: Arena) -> None:
    """A run that dies in its second step draws there what an undisturbed run draws, and not the numbers of step 1 again."""
    arena.table(appends=(96,))
    drawn: dict[str, list[float]] = {"undisturbed": [], "killed": []}
    for run, until in (("undisturbed", 0), ("killed", 2), ("killed", 0)):
        with arena.training_run(arena.spec(run, world_size=1, passes=1, every_steps=1)) as opened:
            opened.restore(model=torch.nn.Linear(4, 1))
            for batch in opened.batches():
                if batch.step == until:
                    break
                drawn[run].append(torch.rand(()).item())
                opened.step_done(batch.mean(batch["x"].sum(-1)))
    assert drawn["killed"] == drawn["undisturbed"]
    assert len({*drawn["undisturbed"]}) == 3


def counter() -> torch.nn.Linear:
    """A model whose weight counts the steps that it has."""
    model = torch.nn.Linear(1, 1)
    torch.nn.init.zeros_(model.weight)
    return model


def count(model: torch.nn.Linear) -> None:
    """Train a step."""
    with torch.no_grad():
        model.weight += 1


def counted(arena: Arena) -> list[tuple[int, float]]:
    """Return (step, steps in the weights) of each checkpoint."""
    parts = [(row.step, TorchState.parts_in(folder_of(row.manifest_uri))) for row in arena.lineage("r1")]
    return [(step, found["model"]["weight"].item()) for step, found in parts]


def test_second_restore_is_refused(arena: Arena, spec: JobSpec) -> None:
    """It would load the resume point over later steps, which the ledger has. Within a step the weights may have more than it."""
    for _ in range(2):
        with arena.training_run(spec) as run:
            model = counter()
            run.restore(model=model)
            for batch in islice(run.batches(), 3):
                count(model)
                with pytest.raises(errors.ScriptInvalid, match=f"of step {batch.step}"):
                    run.checkpoint()
                run.step_done(0.0)
            with pytest.raises(errors.ScriptInvalid, match="a second one"):
                run.restore(model=model)
    assert counted(arena) == [(3, 3.0), (5, 5.0), (6, 6.0)]


def test_script_cannot_train_after_a_failed_restore(arena: Arena, spec: JobSpec) -> None:
    """A script that catches the error would continue the ledger with a new model."""
    with arena.training_run(spec) as run:
        model = counter()
        run.restore(model=model)
        for _ in islice(run.batches(), 2):
            count(model)
            run.step_done(0.0)
    with arena.training_run(spec) as run:
        with suppress(errors.ResumeMismatch):
            run.restore(dlac.DistributedState(model=model))
        with pytest.raises(errors.ScriptInvalid, match=r"before run\.batches"):
            next(run.batches())
    assert counted(arena) == [(2, 2.0)]


def test_due_checkpoint_precedes_another_loop(arena: Arena, spec: JobSpec) -> None:
    """A script with a loop for each of its epochs leaves the first one after a step with a checkpoint."""
    with arena.training_run(spec) as run:
        model = counter()
        run.restore(model=model)
        for last in (5, 15):
            for batch in run.batches():
                count(model)
                run.step_done(0.0)
                if batch.step == last:
                    break
    assert counted(arena) == [(5, 5.0), (10, 10.0), (15, 15.0)]


def test_nothing_is_committed_after_a_kept_error(arena: Arena, spec: JobSpec) -> None:
    """The weights have a step that was refused, because the batch before it was left out."""
    with arena.training_run(spec) as run:
        model = counter()
        run.restore(model=model)
        for batch in run.batches():
            if batch.step == 4:
                break
            count(model)
            run.step_done(0.0)
        with suppress(errors.CursorMismatch):
            for _ in run.batches():
                count(model)
                run.step_done(0.0)
    assert counted(arena) == []
