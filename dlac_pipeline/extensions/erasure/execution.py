"""Execution of a request to forget rows: runs are rewound, and checkpoints that have seen the rows are retired and removed."""

import json
from collections.abc import Sequence
from typing import Any

from blake3 import blake3

import dlac_pipeline as dlac
from dlac_pipeline.extensions.erasure.forget import ForgetPlan, SpecOf, plan_forget
from dlac_pipeline.extensions.erasure.left_weights import LeftWeights
from dlac_pipeline.lakehouse.errors import AppendHistoryLost, EmptyPlan, PinLost
from dlac_pipeline.lakehouse.iceberg.connect import Lakehouse
from dlac_pipeline.lakehouse.ledger.branches import FORGET_REASON, exclusions_in_force
from dlac_pipeline.lakehouse.ledger.ledger import Ledger
from dlac_pipeline.lakehouse.ledger.older_ledger import check_ledger
from dlac_pipeline.lakehouse.ledger.typed_rows import Exclusion, RewindRow
from dlac_pipeline.plan.legs.committed_leg import first_leg_of, leg_of
from dlac_pipeline.spec.job_spec import JobSpec


def execute_forget(lakehouse: Lakehouse, table: str, filters: Sequence[str], spec_of: SpecOf) -> list[str]:
    """Rewind each run to its clean checkpoint with the exclusion, then retire all that have seen the rows. Return the steps.

    Weights that killed attempts left in memory or in folders of checkpoints are removed, too. The ledger decides each step, so a
    repeated call completes a killed one. Runs that must begin again are left as they are. Raises as `plan_forget`
    and `rewind_run`.
    """
    plan = plan_forget(lakehouse, table, filters)
    done = [_rewind(lakehouse, plan, run, spec_of) for run in plan["runs"] if run["action"] == "rewind"]
    for run in plan_forget(lakehouse, table, filters)["runs"]:  # an attempt may have committed before it was fenced off
        if run["action"] in ("retire", "none"):
            done += _retire(lakehouse, run, spec_of(run["run"]))
    return done


def _rewind(lakehouse: Lakehouse, plan: ForgetPlan, run: dict[str, Any], spec_of: SpecOf) -> str:
    name, clean, rows = run["run"], run["clean_checkpoint"], Ledger(lakehouse).head_rows(run["run"])
    leg = first_leg_of(rows) if clean is None else leg_of(rows, clean)
    mine = [place for place, each in enumerate(leg.sources if leg else ()) if each.table_uuid == plan["table_uuid"]]
    wanted = [Exclusion(source=place, where=where) for place in mine for where in plan["filters"]]
    # a later rewind may have dropped what an equal one excluded
    facts = [plan["id"], name, run["head"], clean, sum(isinstance(row, RewindRow) for row in rows)]
    try:
        dlac.rewind_run(
            lakehouse,
            name,
            nonce=blake3(json.dumps(facts).encode()).hexdigest(length=8),
            target=clean or 0,
            # a rewind drops exclusions that were made after its target, among them those of earlier requests
            exclude=list(dict.fromkeys([*exclusions_in_force(rows), *wanted])),
            why=f"{FORGET_REASON}{plan['id']}",
            spec=spec_of(name),
        )
    except (PinLost, EmptyPlan, AppendHistoryLost) as err:
        return (
            f"run {name} cannot be rewound: {err}; train another run without the rows, if it is needed, run "
            f"dlac checkpoint retire {name} --whole-run, and repeat this"
        )
    return f"run {name} is rewound to step {run['clean_step']} without the rows: resume it with `dlac recover {name}`"


def _retire(lakehouse: Lakehouse, run: dict[str, Any], spec: JobSpec | None) -> list[str]:
    """Retire the affected checkpoints of a run whose head has not seen the rows, and remove their files and leftovers."""
    ledger, name, tags, affected = Ledger(lakehouse), run["run"], run["tags"] or (), run["affected"] or ()
    check_ledger(lakehouse, name)
    done = [f"tag {tag} of run {name} is removed from {dlac.unname_checkpoint(ledger, name, tag)}" for tag in tags]
    gone = dlac.retire_checkpoints(lakehouse, name, spec, only=affected) if affected else []
    done += [f"checkpoint {row.checkpoint_id} (step {row.step}) of run {name} is retired" for row in gone]
    if spec is not None:
        LeftWeights(lakehouse, spec, affected).remove()
    elif affected:
        done.append(f"the files of run {name} remain: repeat this with its job spec in --spec")
    return done
