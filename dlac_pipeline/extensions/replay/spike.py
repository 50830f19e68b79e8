"""Loss spikes of a run: their steps by the ledger's losses, the rows to blame by a replay, and the rewind without these rows."""

import json
import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

from dlac_pipeline.extensions.replay.committed_steps import CommittedStep, CommittedSteps
from dlac_pipeline.extensions.replay.loss_spikes import LossWindow, Spike, count_to_blame, find_spikes, finite_or_inf
from dlac_pipeline.extensions.replay.named_rows import filter_of_rows
from dlac_pipeline.extensions.replay.replay import bits_of
from dlac_pipeline.extensions.replay.step_replay import ReplayStart, replay_steps
from dlac_pipeline.extensions.replay.step_rows import StepRow, StepRows
from dlac_pipeline.lakehouse.errors import NothingToRehearse, ScriptInvalid, SpecInvalid
from dlac_pipeline.lakehouse.iceberg.connect import Lakehouse
from dlac_pipeline.lakehouse.iceberg.row_groups import parse_exclusion
from dlac_pipeline.lakehouse.ledger.branches import exclusions_in_force
from dlac_pipeline.lakehouse.ledger.run_rows import out_of
from dlac_pipeline.plan.legs.committed_leg import leg_of
from dlac_pipeline.rows.columns import check_identity
from dlac_pipeline.spec.job_spec import JobSpec

_OF_OTHERS = "a rewind excludes rows of one source: exclude those of the others in the job spec of a fork"


@dataclass(frozen=True, kw_only=True, slots=True)
class SpikeReport:
    """The rows of a step by their loss."""

    run: str
    step: int
    spike: Spike | None
    """The spike that the step is in. None if its loss does not stand out, or was not committed."""
    recorded: float | None
    """Global loss in the ledger. None: the step was not applied, or not committed."""
    replayed: float
    replayed_from: int
    """The step of the kept checkpoint before. 0: the beginning of the run."""
    rows: tuple[tuple[float, StepRow], ...]
    """Losses and rows, the largest loss first."""
    to_blame: int
    """Number of the first rows without which the loss of the step would be no spike."""
    rewinds: tuple[str, ...]
    """The command that excludes the rows to blame of the first row's source, at least the first row."""
    unnamed: str
    """Rows that no command names, and the reason. Empty: none."""
    others: tuple[Spike, ...]
    """The other spikes of the run, the largest first."""

    @property
    def identical(self) -> bool:
        """True if the replayed loss is the recorded one, bit for bit."""
        return bits_of(self.recorded) == bits_of(self.replayed)

    def to_json(self, top: int | None = None) -> dict[str, Any]:
        """Return this report as plain data, with the first `top` rows."""
        names = ("run", "step", "recorded", "replayed", "identical", "replayed_from", "to_blame", "rewinds", "unnamed")
        spikes = {"spike": self.spike and asdict(self.spike), "others": [asdict(each) for each in self.others]}
        ranked = enumerate(self.rows[:top])
        rows = [{"loss": loss, "to_blame": n < self.to_blame, **row.to_json()} for n, (loss, row) in ranked]
        return {**{name: getattr(self, name) for name in names}, **spikes, "rows": rows}


def explain_spike(
    lakehouse: Lakehouse,
    run: str,
    *,
    step: int | None = None,
    column: str | None = None,
    by: Sequence[str] = (),
    spec: JobSpec | None = None,
    sandbox_folder: Path | None = None,
) -> SpikeReport:
    """Rank the rows of a step by their loss in a replay: of the largest spike, unless `step` names another one.

    `column` is one whose values are added to the rows. `by` are columns that name rows, for sources without identity columns.

    Raises:
        NoSuchRun: the ledger has no row of the run.
        SpecInvalid: the run has no such step, or no spike, or a column of `by` cannot name rows.
        NothingToRehearse: no checkpoint before the step is kept.
        ScriptInvalid: the script does not pass the losses of samples to `Batch.mean`.
        DlacError: as `replay_steps` and `StepRows.of`.
    """
    rows = StepRows(lakehouse, run, spec=spec)
    losses = rows.steps.losses()
    if step is None:
        spikes = find_spikes(losses)
        if not spikes:
            raise SpecInvalid(
                f"expected a spike among the {len(losses)} recorded losses of run {run!r}, found none: name a step with --step N"
            )
        step = max(spikes, key=lambda each: (each.rise, each.step)).step
    found = rows.steps.find_trained(step)
    listed = rows.of_found(found, column=column)
    choose = partial(_start_before, lakehouse, run, found)
    done = replay_steps(lakehouse, run, choose, spec=spec, folder=sandbox_folder)
    replayed = done.losses.get(found.step)
    if replayed is None:
        raise NothingToRehearse(
            f"expected the script of run {run!r} to reach step {found.step} in the replay, found its end before: let it train "
            "that far with DLAC_REHEARSAL=1"
        )
    known = {**{each: loss for each, loss in done.losses.items() if each not in done.skipped}, **losses}
    limit = LossWindow({each: loss for each, loss in known.items() if each < found.step}).limit
    ranked = _ranked(run, found.step, listed, done.samples)
    to_blame = count_to_blame([given for given, _ in ranked], limit)
    chosen = [row for _, row in ranked[: max(1, to_blame)]]
    rewinds, unnamed = _rewinds(rows, found, chosen, by, to_step=done.start.step)
    spikes = find_spikes(known)
    mine = next((each for each in spikes if each.step <= found.step <= each.last_step), None)
    return SpikeReport(
        run=run,
        step=found.step,
        spike=mine,
        recorded=losses.get(found.step),
        replayed=replayed,
        replayed_from=done.start.step,
        rows=tuple((loss, row) for (loss, _), row in ranked),
        to_blame=to_blame,
        rewinds=rewinds,
        unnamed=unnamed,
        others=tuple(sorted((each for each in spikes if each is not mine), key=lambda each: -each.rise)),
    )


def _start_before(lakehouse: Lakehouse, run: str, found: CommittedStep) -> ReplayStart:
    """Return the newest kept checkpoint before a step, or the beginning, from which the step's leg can be repeated."""
    steps, leg, start = CommittedSteps(lakehouse, run), found.leg, None
    out = out_of(steps.rows)
    kept = [row for row in steps.lineage if row.step < found.step and row.checkpoint_id not in out]
    if kept and (kept[0].step == leg.start_step or leg_of(steps.rows, kept[0].checkpoint_id).index == leg.index):
        start = kept[0]
    elif leg.start_step or not steps.begins_itself:
        raise NothingToRehearse(
            f"expected a checkpoint of run {run!r} of steps {leg.start_step} to {found.step - 1} that is kept, found none: keep "
            f"more (checkpoint.keep_last, 0 for all), or tag one (`dlac checkpoint tag {run} NAME --step N`) before the next is "
            "committed"
        )
    return ReplayStart(rows=steps.rows, checkpoint=start, successor=found.checkpoint, leg=leg, last=found.step)


def _ranked(
    run: str, step: int, rows: Sequence[StepRow], samples: Sequence[Sequence[tuple[float, int]]]
) -> list[tuple[tuple[float, int], StepRow]]:
    """Return loss and items of the rows by their loss. If a slot has as many losses as rows, each row has one, else the mean."""
    found: list[tuple[tuple[float, int], StepRow]] = []
    is_given = bool(samples) and all(samples[row.slot] for row in rows)
    for slot, group in groupby(rows if is_given else (), key=lambda row: row.slot):
        mine, given = list(group), samples[slot]
        mean = sum(loss * n for loss, n in given) / (items := sum(n for _, n in given)), max(1, items // len(mine))
        found += zip(given if len(given) == len(mine) else [mean] * len(mine), mine, strict=True)
    if not found or len({loss for (loss, _), _ in found}) == 1 < len(found):
        raise ScriptInvalid(
            f"expected the script of run {run!r} to pass the loss of each sample to batch.mean, or of each token to "
            f"batch.token_mean, found none of step {step}, or one value for all: compute the loss without its mean "
            '(reduction="none"), and call loss = batch.mean(loss_per_sample). A script may do that in rehearsals only '
            "(DLAC_REHEARSAL=1)"
        )
    return sorted(found, key=lambda each: finite_or_inf(each[0][0]), reverse=True)


def _rewinds(
    steps: StepRows, found: CommittedStep, rows: Sequence[StepRow], by: Sequence[str], *, to_step: int
) -> tuple[tuple[str, ...], str]:
    """Return a command for the rows of the worst row's source, and the rows that it leaves out, or why there is none."""
    source, in_force = rows[0].source, exclusions_in_force(steps.steps.rows)
    mine, leg_source = [row for row in rows if row.source == source], found.leg.sources[source]
    table = steps.lakehouse.load(steps.tables(found.leg)[source])
    schema = table.schemas()[leg_source.schema_id]
    names = tuple(by) or leg_source.identity_columns or tuple(sorted(table.schema().identifier_field_names()))
    if not names:
        return (), f"table {leg_source.table!r} has no identity columns: name rows with --by COLUMN"
    check_identity(schema, names, setting="--by" if by else "identity_columns")
    values = [steps.values(found.leg, mine, name) for name in names]
    where = filter_of_rows([schema.find_field(name) for name in names], list(zip(*values, strict=True)))
    parse_exclusion(where, schema, table)
    if not steps.steps.lineage:
        return (), f"no checkpoint yet: add exclude = {json.dumps([where])} to source {leg_source.name!r} of the spec"
    wanted = dict.fromkeys([*(each.where for each in in_force if each.source == source), where])
    words = [word for each in wanted for word in ("--exclude", each)]
    words += ["--source", leg_source.name] if len(found.leg.sources) > 1 else []
    is_part = len({*(row.source for row in rows), *(each.source for each in in_force)}) > 1
    return (f"dlac rewind {steps.run} --to-step {to_step} {shlex.join(words)}",), _OF_OTHERS * is_part
