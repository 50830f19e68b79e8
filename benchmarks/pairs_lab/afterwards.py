"""The operation after the training, compared with the script's own log."""

import shutil
from collections import Counter
from collections.abc import Callable

from safetensors.torch import load_file

from benchmarks.pairs_lab.faults import train
from benchmarks.pairs_lab.judge import check
from benchmarks.pairs_lab.log import Step
from benchmarks.pairs_lab.scene import Scene
from benchmarks.programs.pairs_rank import digest_of
from dlac_pipeline.audit.audit import audit_run
from dlac_pipeline.checkpoint.store import tiers_of
from dlac_pipeline.extensions.erasure.certificate import certify, differences, is_signed, make_key
from dlac_pipeline.extensions.erasure.execution import execute_forget
from dlac_pipeline.extensions.erasure.seen import who_has_seen
from dlac_pipeline.extensions.exchange.export import export_weights
from dlac_pipeline.extensions.rebuild.damaged import connect_damaged
from dlac_pipeline.extensions.rebuild.rebuild import rebuild_ledger
from dlac_pipeline.extensions.replay.step_rows import StepRows
from dlac_pipeline.lakehouse.config import LakehouseConfig
from dlac_pipeline.lakehouse.errors import SpecInvalid
from dlac_pipeline.lakehouse.ledger.ledger import Ledger
from dlac_pipeline.lakehouse.ledger.typed_rows import CheckpointRow
from tests.forked import Forked

_ASKED = 4
"""Steps or rows that are asked about."""


def do_afterwards(scene: Scene, steps: list[Step]) -> int | None:
    """Do the operation of the combination. Return the row that it has removed, if any."""
    then = scene.combination["then"]
    if then == "forget":
        return _forget(scene, steps)
    _CHECKS[then](scene, steps)
    return None


def _audit(scene: Scene, steps: list[Step]) -> None:
    """The command exits with status 0."""
    import sys

    out = scene.home / "audit.out"
    with out.open("wb") as stream:
        command = [sys.executable, "-m", "dlac_pipeline.cli.main", "audit", scene.run, "--home", str(scene.home)]
        status = Forked(command, stdout=stream, stderr=stream, start_new_session=True).wait(timeout=120)
    check(status == 0, f"dlac audit: status {status}: {out.read_text()[-500:]}")


def _rows(scene: Scene, steps: list[Step]) -> None:
    """The rows of steps, by rank, are those in the tensors."""
    rows = StepRows(scene.lakehouse, scene.run, spec=scene.spec())
    for step in scene.chance.sample(steps, _ASKED):
        found = rows.of(step.number, column="row_id")
        if scene.combination["source"] == "packed":
            check(
                {each.value for each in found} == step.rows.keys(), f"dlac rows of step {step.number}: other documents"
            )
            continue
        check(Counter(each.value for each in found) == step.rows, f"dlac rows of step {step.number}: other rows")
        for share in step.shares if scene.combination["ranks"] != "replicas" else ():
            mine = sorted(each.value for each in found if each.rank == share["rank"])
            check(mine == sorted(share["rows"]), f"dlac rows of step {step.number}: other rows of rank {share['rank']}")


def _seen(scene: Scene, steps: list[Step]) -> None:
    """The first checkpoint that has seen a row is the first one at or after its step."""
    kept = sorted(row.step for row in _lineage(scene))
    ids = {row.checkpoint_id: row.step for row in _lineage(scene)}
    for step in scene.chance.sample(steps, _ASKED):
        row = scene.chance.choice(sorted(step.rows))
        first = min(each.number for each in steps if each.rows[row])
        found = who_has_seen(scene.lakehouse, [str(row)], run=scene.run, table="src.u" if row >= 10_000 else "src.t")[
            "seen_by"
        ]
        mine = [ids[each["checkpoint_id"]] for each in found if each["run"] == scene.run and each["survives"]]
        wanted = min(at for at in kept if at >= first)
        check(min(mine, default=0) == wanted, f"dlac seen {row}: step {min(mine, default=0)}, expected {wanted}")


def _lineage(scene: Scene) -> list[CheckpointRow]:
    """Return the surviving checkpoints."""
    ledger = Ledger(scene.lakehouse)
    rows = {row.checkpoint_id: row for row in ledger.rows(scene.run, kinds=(CheckpointRow,))}
    head, found = ledger.state(scene.run).fence.head, []
    while head is not None:
        found.append(rows[head])
        head = rows[head].parent
    return found


def _forget(scene: Scene, steps: list[Step]) -> int:
    """Forget a row, train without it, and certify."""
    rows = sorted({row for step in steps for row in step.rows if row < 10_000})
    row, spec = scene.chance.choice(rows), scene.spec()
    where = [f"row_id = {row}"]
    specs = {scene.run: spec}.get
    execute_forget(scene.lakehouse, "src.t", where, specs)
    train(scene)
    key = scene.home / "key.pem"
    public = make_key(key)
    try:
        document = certify(scene.lakehouse, "src.t", where, specs, file=scene.home / "certificate.json", key=key)
    except SpecInvalid as err:
        check(False, f"no certificate for row {row}: {err}")
        raise
    check(is_signed(document, public), "the certificate is not signed")
    found = differences(scene.lakehouse, document["certificate"], specs)
    check(not found, f"the certificate differs: {found}")
    return row


def _rebuild(scene: Scene, steps: list[Step]) -> None:
    """Lose the table of the ledger, or its metadata, and rebuild it."""
    before = Ledger(scene.lakehouse).rows(scene.run)
    if scene.chance.random() < 0.5:
        scene.lakehouse.catalog.drop_table("dlac.consumption")
    else:
        shutil.rmtree(scene.home / "warehouse" / "dlac" / "consumption" / "metadata")
    config = LakehouseConfig().at_home(scene.home)
    done = rebuild_ledger(connect_damaged(config))
    problems = [run.problem for run in done.runs if run.problem]
    check(not problems, f"dlac ledger rebuild: {problems}")
    lakehouse = scene.reconnect()
    after = Ledger(lakehouse).rows(scene.run)
    lost = {*map(repr, before)} - {*map(repr, after)}
    check(not lost and len(before) == len(after), f"rows before {len(before)}, after {len(after)}: {sorted(lost)[:3]}")
    check(audit_run(lakehouse, scene.run).exact, "the audit after the rebuild is not exact")


def _export(scene: Scene, steps: list[Step]) -> None:
    """The exported weights are the last ones of the script."""
    path = scene.home / "weights.safetensors"
    export_weights(scene.lakehouse, tiers_of(scene.spec()), path)
    weights = load_file(path)
    found = digest_of([weights[name] for name in sorted(weights)])
    check(found == steps[-1].ends[0]["after"]["weights"], f"other weights are exported: {sorted(weights)}")


_CHECKS: dict[str, Callable[[Scene, list[Step]], None]] = {
    "audit": _audit,
    "rows": _rows,
    "seen": _seen,
    "rebuild": _rebuild,
    "export": _export,
}
