"""Proofs about forgotten rows that must not be given: weights that were adopted, kept in memory, or left without keys."""

import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import duckdb
import pytest
from pyiceberg.expressions import And
from safetensors.torch import load_file, save_file

from dlac_pipeline.checkpoint.store import tiers_of
from dlac_pipeline.extensions.branches.retire import retire_left
from dlac_pipeline.extensions.branches.rewind import rewind_run
from dlac_pipeline.extensions.erasure.certificate import differences, is_signed, make_key
from dlac_pipeline.extensions.erasure.explain import EXPLAINED
from dlac_pipeline.extensions.erasure.passport import write_passport
from dlac_pipeline.extensions.erasure.seen import who_has_seen
from dlac_pipeline.extensions.exchange.export import export_tensors, export_weights
from dlac_pipeline.extensions.exchange.foreign import foreign_checkpoint
from dlac_pipeline.extensions.exchange.fork import adopt_checkpoint, fork_run
from dlac_pipeline.lakehouse.errors import SpecInvalid
from dlac_pipeline.lakehouse.iceberg.connect import among, equals
from dlac_pipeline.lakehouse.iceberg.pins import remove_pin
from dlac_pipeline.lakehouse.iceberg.snapshots import snapshot_of
from dlac_pipeline.lakehouse.ledger.ledger import Ledger
from dlac_pipeline.lakehouse.ledger.typed_rows import ClaimRow
from dlac_pipeline.memory_states.states import memory_folder, read_states
from dlac_pipeline.spec.job_spec import JobSpec
from tests.conftest import Arena, source_rows, wait_until
from tests.extensions.erasure.test_forget import Erasure, rows_until, small

train_sharded = partial(Arena.train, sharded=True)
"""Train a run with an engine that loads adopted weights, and return its rows by step."""


class Exported:
    """A run `a` that has read a row, and an export of it."""

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        arena.table(appends=(400,))
        arena.table("src.other", appends=(100,))
        self.spec = small(arena, "a")
        self.row = train_sharded(arena, self.spec)[3][0]
        self.folder = arena.home.parent / "export"
        self.folder.mkdir()
        self.file = self.folder / "model.safetensors"
        export_weights(arena.lakehouse, tiers_of(self.spec), self.file)

    def adopt(self, folder: Path, run: str = "d") -> JobSpec:
        """Begin a run over another table, which has none of the rows, from a folder."""
        spec = small(self.arena, run, table="src.other")
        adopt_checkpoint(self.arena.lakehouse, spec, foreign_checkpoint(folder))
        return spec


@pytest.fixture
def exported(arena: Arena) -> Exported:
    """A run that has read the row, and its export."""
    return Exported(arena)


@pytest.mark.slow
def test_adopted_export_is_affected(exported: Exported) -> None:
    """Runs that began with an export, with changed weights of it, or with an exported state have seen what their origin had."""
    arena, home = exported.arena, exported.arena.home.parent
    folders = {"weights": exported.folder, "changed": home / "changed", "state": home / "state"}
    export_tensors(arena.lakehouse, tiers_of(exported.spec), folders["state"])
    folders["changed"].mkdir()
    changed = {name: each * 2 for name, each in load_file(exported.file).items()}
    save_file(changed, folders["changed"] / "model.safetensors", {"dlac.checkpoint_id": str(arena.head("a"))})
    adopted = [exported.adopt(folder, run) for run, folder in folders.items()]
    for spec in adopted:
        train_sharded(arena, spec)
    erasure = Erasure(arena, [f"row_id = {exported.row}"], exported.spec, *adopted)
    found = {each["run"]: (each["action"], each["affected_checkpoints"]) for each in erasure.plan()["runs"]}
    assert {run: found[run] for run in folders} == {run: ("fork again", len(arena.lineage(run))) for run in folders}
    erasure.execute()
    train_sharded(arena, exported.spec)
    with pytest.raises(SpecInvalid) as refused:
        erasure.certify()
    for run in folders:
        assert f"run {run}: expected no restorable checkpoint" in str(refused.value)
    assert not [each for each in erasure.plan()["rows"]["limits"] if each.startswith("Run ")]


@pytest.mark.slow
def test_unknown_adoption_is_a_limit(exported: Exported) -> None:
    """A run whose adopted weights name no checkpoint is named in the certificate, also once it was taken back to them."""
    arena = exported.arena
    save_file({name: each + 1 for name, each in load_file(exported.file).items()}, exported.file)
    d = small(arena, "d")
    adopt_checkpoint(arena.lakehouse, d, foreign_checkpoint(exported.folder))
    steps = train_sharded(arena, d)
    erasure = Erasure(arena, [f"row_id = {exported.row}", f"row_id = {steps[1][0]}"], exported.spec, d)
    erasure.execute()
    assert erasure.run("d")["head_step"] == 0
    for spec in (exported.spec, d):
        train_sharded(arena, spec)
    document, _ = erasure.certify()
    assert [
        each
        for each in document["certificate"]["rows"]["limits"]
        if each.startswith(f"Run d began with weights from {exported.folder}, of unknown origin")
    ]


@pytest.mark.slow
@pytest.mark.parametrize("rewound", [False, True])
def test_state_in_memory_refuses_certificate(arena: Arena, rewound: bool) -> None:
    """A killed launch has read the row after its last checkpoint. Its state is removed, also after a rewind by hand."""
    arena.table(appends=(400,))
    memory = arena.home / "memory"
    memory.mkdir()
    spec = small(arena, "r", memory=str(memory), memory_every_steps=1, every_steps=4, pause_s=0.1)
    launch, folder = arena.launch(spec), memory_folder(spec)
    assert folder is not None
    wait_until(lambda: any(each.first.step >= 7 for each in read_states(folder)), what="a state of step 7")
    launch.destroy()
    row = next(each["rows"][0] for each in arena.entries("r") if each["step"] == 7)
    staged = arena.home / "checkpoints" / "r" / "attempt-0001" / f"step-000000007-{arena.rows('r', ClaimRow)[0].nonce}"
    staged.mkdir()
    (staged / "rank.pt").write_bytes(b"weights")
    erasure = Erasure(arena, [f"row_id = {row}"], small(arena, "r"))
    if rewound:
        rewind_run(arena.lakehouse, "r", nonce="op", target=0, exclude=erasure.filters)
        with pytest.raises(SpecInvalid, match=r"expected no weights in .*memory.*") as refused:
            erasure.certify()
        assert str(staged) in str(refused.value)
    assert read_states(folder)
    erasure.execute()
    assert (list(memory.rglob("*.pt")), staged.exists()) == ([], False)
    arena.train(small(arena, "r"))
    assert erasure.certify()


def forgeries(erasure: Erasure, honest: dict[str, Any]) -> list[dict[str, Any]]:
    """Return changes of each field that a signer may state otherwise, and scripts and snapshots that would show less."""
    run, script = honest["runs"][0], honest["script"]
    first = erasure.arena.lakehouse.own("consumption").metadata.snapshots[0].snapshot_id
    fewer = re.sub(r"(?<=read_parquet\(\[\n).*?,\n", "", script, count=1, flags=re.DOTALL)
    return [
        {"runs": [{**run, "affected": None}]},
        {"runs": [{**run, "seq": run["seq"] - 1}]},
        {"runs": [run, {**run, "run": "other"}]},
        {"runs": [{**run, "note": "approved"}]},
        {"rows": {**honest["rows"], "limits": []}},
        {"rows": {**honest["rows"], "count": 7}},
        {"script": script.replace("FROM forget_problems;", "FROM forget_problems WHERE false;")},
        {"script": fewer},
        *({"snapshots": {**honest["snapshots"], "consumption": each}} for each in (None, 17, first)),
        {"certified_at": "2099-01-01T00:00:00+00:00"},
        {"id": "0"},
        {"table_uuid": "0"},
    ]


@pytest.mark.slow
def test_false_certificates_are_found(arena: Arena, tmp_path: Path) -> None:
    """Forged statements, changed fields, other keys, and a training on the rows after all, each with its reason."""
    arena.table(appends=(400,))
    spec = small(arena, "r")
    erasure = Erasure(arena, [f"row_id = {arena.train(spec)[7][0]}"], spec)
    erasure.execute()
    arena.train(spec)
    document, public = erasure.certify()
    honest = document["certificate"]
    with duckdb.connect() as plain:
        assert plain.execute(honest["script"]).fetchall() == []
    assert erasure.differences({"certificate": honest}) == []
    for each in forgeries(erasure, honest):
        assert erasure.differences({"certificate": {**honest, **each}}), each
    missing = "expected in the certificate the runs ['r'], found []"
    assert erasure.differences({"certificate": {**honest, "runs": []}}) == [missing]
    empty = {"runs": [], "script": "SELECT 1 WHERE false", "certified_at": "2020-01-01T00:00:00+00:00"}
    found = "\n".join(erasure.differences({"certificate": {**honest, **empty}}))
    assert "expected the script of DLAC" in found
    assert "rows: expected the count" in found
    changed = json.loads(json.dumps(document))
    changed["certificate"]["runs"][0]["head_step"] += 1
    for signed, key in (
        (changed, public),
        (document, make_key(tmp_path / "other.pem")),
        ({"certificate": honest}, public),
    ):
        assert not is_signed(signed, key)
    with pytest.raises(SpecInvalid, match="expected to write the new file"):
        make_key(arena.home / "key.pem")
    with pytest.raises(SpecInvalid, match="expected an Ed25519 key"):
        is_signed(document, arena.home / "key.pem")
    assert (arena.home / "key.pem").stat().st_mode & 0o777 == 0o600
    rewind_run(arena.lakehouse, "r", nonce="op", target=4)
    [pending] = erasure.differences(document)
    assert pending == "run r: expected the rows to be excluded, found that the next steps would read them"
    arena.train(spec)
    assert [each.split(", found")[0] for each in erasure.differences(document)][:2] == [
        "run r: expected a head that has not seen the rows",
        "run r: expected no restorable checkpoint that has seen the rows",
    ]


@pytest.mark.parametrize(
    "change",
    [
        *({"runs": None}, {"runs": [{"run": "r", "seq": 10**30}]}, {"certified_at": "2026-01-01T00:00:00"}),
        *({"filters": ["row_id = '\ud800'"]}, {"snapshots": {"consumption": "1"}}, {"more": 1}),
    ],
)
def test_malformed_certificate_is_refused(arena: Arena, change: dict[str, Any]) -> None:
    """Signed fields of other types, and fields that are missing or unknown, are an error of the input."""
    fields = {"id": "0", "table": "src.t", "table_uuid": "0", "filters": ["row_id = 1"], "runs": [], "rows": {}}
    facts = {"script": "", "format_version": 1, "certified_at": "2026-01-01T00:00:00+00:00", "dlac_version": "1"}
    certificate = {**fields, **facts, "snapshots": dict.fromkeys(EXPLAINED), **change}
    with pytest.raises(SpecInvalid, match="expected the fields of a certificate"):
        differences(
            arena.lakehouse, {name: each for name, each in certificate.items() if each is not None}, lambda run: None
        )


@pytest.mark.slow
def test_expired_row_is_found_by_key(arena: Arena) -> None:
    """A row that was deleted from the table, and whose snapshot and file are gone, is forgotten by its key."""
    arena.table(appends=(200,))
    spec = small(arena, "r", row_keys=True, identity_columns=["row_id"])
    steps = arena.train(spec)
    table = arena.lakehouse.load("src.t")
    planned = snapshot_of(table, None).snapshot_id
    remove_pin(arena.lakehouse, "src.t", planned, force=True)
    table.refresh().overwrite(source_rows(200, 200))
    table.maintenance.expire_snapshots().by_ids([planned]).commit()
    erasure = Erasure(arena, [f"row_id = {steps[5][0]}"], spec)
    plan = erasure.plan()
    assert (plan["rows"]["count"], plan["runs"][0]["first_affected_step"]) == (1, 6)
    assert "dlac checkpoint retire r --whole-run, and repeat this" in erasure.execute()[0]
    retire_left(Ledger(arena.lakehouse), "r", whole=True)
    erasure.execute()
    document, _ = erasure.certify()
    assert erasure.differences(document) == []
    later = Erasure(arena, [f"row_id in ({steps[1][0]}, {steps[2][0]}) or row_id = {steps[3][0]}"], spec)
    assert (later.plan()["rows"]["count"], later.plan()["problems"]) == (3, [])
    assert any("are not counted" in each for each in Erasure(arena, ["even = true"], spec).plan()["problems"])


@pytest.mark.slow
def test_lost_append_proves_nothing(arena: Arena) -> None:
    """A run without an append, and a fork of a lost checkpoint, are unknown to all proofs until they are retired."""
    arena.table(appends=(400,))
    spec = small(arena, "r", row_keys=True, identity_columns=["row_id"])
    fork = small(arena, "f", row_keys=True, identity_columns=["row_id"])
    row = train_sharded(arena, spec)[7][3]
    lost = next(each for each in arena.lineage("r") if each.step == 8)
    fork_run(arena.lakehouse, fork, "r", checkpoint_id=lost.checkpoint_id)
    arena.lakehouse.own("consumption").delete(And(equals("run", "r"), among("seq", [lost.seq])))
    for run in (None, "r", "f"):
        assert who_has_seen(arena.lakehouse, [str(row)], run=run)["notes"][-1].startswith(
            "unknown for run r, of whose 11"
        )
    exported = export_weights(arena.lakehouse, tiers_of(spec), arena.home / "model.safetensors")
    passport = write_passport(arena.lakehouse, exported.path)
    assert passport is not None
    assert passport.incomplete == ("the ledger has 13 of the 14 appends of run r",)
    erasure = Erasure(arena, [f"row_id = {row}"], spec, fork)
    problems = " ".join(erasure.plan()["problems"])
    assert f"run f: expected checkpoint {lost.checkpoint_id} of run r in the ledger" in problems
    assert "run r: expected all 15 appends in the ledger, found 14" in problems
    for run in ("r", "f"):
        retire_left(Ledger(arena.lakehouse), run, whole=True)
    assert erasure.certify()


@pytest.mark.slow
def test_follower_skips_forgotten_row(arena: Arena) -> None:
    """A run that has not planned an appended row yet will read it, unless it excludes it."""
    arena.table(appends=(200,))
    follower, other = small(arena, "a", follow="appends"), small(arena, "b")
    arena.train(follower)
    arena.lakehouse.load("src.t").append(source_rows(200, 200))
    row = next(each for rows in arena.train(other).values() for each in rows if each >= 200)
    erasure = Erasure(arena, [f"row_id = {row}"], follower, other)
    assert (erasure.run("a")["action"], erasure.run("a")["steps_to_replay"]) == ("rewind", 0)
    erasure.execute()
    document, _ = erasure.certify()
    assert row not in rows_until(arena.train(follower), 99)
    assert erasure.differences(document) == []
