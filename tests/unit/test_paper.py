"""The sums of benchmarks/paper: how trainings under faults are compared, and the simulated month."""

from __future__ import annotations

import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.checkpoint import storage_figures
from benchmarks.figures import Figure
from benchmarks.intervals import Measured, cost_of, measured_of
from benchmarks.intervals import figures_of as interval_figures
from benchmarks.paper_parts.claims import claim_rows, table_2_rows
from benchmarks.paper_parts.divergence import BATCH, Outcome, fault_steps
from benchmarks.paper_parts.month import DAYS, INTERRUPTIONS, Mode, modes_of, simulate
from benchmarks.paper_parts.page import program_tables
from benchmarks.paper_parts.programs import PROGRAMS
from benchmarks.paper_parts.summary import band_of, seconds_to, steps_worth, summarize, summarize_undisturbed
from benchmarks.recovery_lab.stamps import Stamp, StampFile

CALM = {10: 4.0, 20: 3.0, 30: 2.0}


def outcome(method: str, *, seed: int = 0, faulted: bool, validation: dict[int, float] = CALM) -> Outcome:
    """Return a training of 30 steps whose training losses equal its validation losses."""
    return Outcome(
        setting="stream", method=method, seed=seed, faulted=faulted, failed="", trained=30, computed=30, losses=dict(validation),
        validation=validation,
    )  # fmt: skip


def test_faults_are_the_same_for_all() -> None:
    """They are in order, apart, and in steps that any training has."""
    steps = fault_steps(240, 20)
    assert steps == fault_steps(240, 20)
    assert list(steps) == sorted(set(steps))
    assert len(steps) == 20
    assert 10 <= steps[0] <= steps[-1] < 240


def test_band_is_student_interval() -> None:
    """Five values: the factor is 2.776. A single one has no band."""
    assert band_of([1.0, 2.0, 3.0, 4.0, 5.0]) == pytest.approx(2.776 * math.sqrt(2.5 / 5))
    assert band_of([7.0]) == 0.0


def test_loss_is_worth_undisturbed_steps() -> None:
    """Between two evaluations it is interpolated. A curve that rises again counts by its best loss so far."""
    assert steps_worth(2.5, outcome("dlac", faulted=False)) == 25
    assert steps_worth(1.0, outcome("dlac", faulted=False)) == 30
    assert steps_worth(2.5, outcome("dlac", faulted=False, validation={10: 4.0, 20: 2.0, 30: 2.2})) == 17.5
    assert steps_worth(9.0, outcome("dlac", faulted=False, validation={10: 4.0, 20: 2.0, 30: 9.0})) == 30


def test_time_to_equal_loss() -> None:
    """It is the first time of that loss, at the training's mean time of a step. A training that never has it has none."""
    slow = replace(outcome("dlac", faulted=True), seconds=60.0)
    assert seconds_to(2.0, slow) == 60
    assert seconds_to(2.5, slow) == 50
    assert seconds_to(1.9, slow) is None
    assert seconds_to(2.0, replace(slow, validation={10: 4.0, 20: 2.0, 30: 2.2})) == 40


def test_method_is_compared_with_own_calm_training() -> None:
    """A method that shares its undisturbed training has the values of that training. A failed one is named, and not averaged."""
    worse = {step: loss + 0.5 for step, loss in CALM.items()}
    outcomes = [
        outcome("dlac", faulted=False),
        outcome("dlac", faulted=True),
        outcome("stateful", faulted=False),
        replace(outcome("restart", faulted=True, validation=worse), repeated=8, missing=6, computed=45),
        replace(outcome("restart", seed=1, faulted=True), failed="out of rows", validation={}),
    ]
    ours, hf, restart = summarize([*outcomes, replace(outcome("hf", faulted=True), failed="no such rank")], BATCH)
    assert (hf.method, hf.seeds, hf.failed) == ("hf", 0, ("no such rank",))
    assert (ours.method, ours.identical, ours.excess, ours.area) == ("dlac", 1, 0.0, 0.0)
    assert (restart.method, restart.identical, restart.seeds, restart.failed) == ("restart", 0, 1, ("out of rows",))
    assert (restart.excess, restart.area) == (0.5, 0.5)
    assert ours.loss_distance == 0
    assert restart.loss_distance == pytest.approx((0.5 / 4 + 0.5 / 3 + 0.5 / 2) / 3)
    assert (ours.reached, restart.reached) == (1, 0)
    assert (restart.worth, restart.computed, restart.repeated, restart.missing) == (25, 1.5, 8, 6)


def test_month_loses_what_modes_cost() -> None:
    """Without restarts and losses only the overhead is lost. A restart costs its seconds times the interruptions."""
    free = Mode(name="", about="", restart_s=0.0, at_risk_s=0.0, overhead=0.02)
    assert simulate(free, start_s=0).mean == pytest.approx(0.98)
    slow = simulate(replace(free, overhead=0.0), start_s=600)
    assert slow.mean == pytest.approx(1 - INTERRUPTIONS * 600 / (DAYS * 86_400), rel=0.01)
    assert slow.low < slow.mean < slow.high


def test_month_has_measured_modes() -> None:
    """Checkpoints every 30 s have the fitted cost and the measured work at risk, and are left out without them."""
    recovery = {"bare_recovery_s": 5.0, "forked_recovery_s": 1.0}
    intervals = {"30s_overhead": 1.5, "30s_at_risk_s": 37.0, "commit_most_s": 7.0, "checkpoint_cost_s": 0.6}
    parts = {"recovery": recovery, "intervals": intervals}
    found = {part: {"figures": {name: {"value": value} for name, value in of.items()}} for part, of in parts.items()}
    *bare, ours = modes_of(found)
    assert (ours.restart_s, ours.at_risk_s, ours.overhead) == (1, 37, 0.02)
    assert modes_of({"recovery": found["recovery"]}) == bare


def at_interval(interval_s: float, *, overhead: float, commit_s: float) -> Measured:
    """Return the measurement of one checkpoint interval."""
    return Measured(
        interval_s=interval_s, overhead=overhead, between_commits_s=interval_s, at_risk_s=interval_s + commit_s,
        commit_s=commit_s, noise=(1.0, 1.0),
    )  # fmt: skip


def test_cost_fits_steady_intervals() -> None:
    """One interval is too short for a commit, and does not count unless no other exists. No cost is negative."""
    short = at_interval(5, overhead=0.1, commit_s=8)
    steady = [at_interval(10, overhead=0.06, commit_s=8), at_interval(30, overhead=0.02, commit_s=8)]
    assert cost_of([short, *steady]) == pytest.approx(0.6)
    assert cost_of([short]) == pytest.approx(0.5)
    assert cost_of([at_interval(10, overhead=-0.01, commit_s=1)]) == pytest.approx(-0.1)


def test_longer_intervals_are_modelled() -> None:
    """Overhead is the cost over the interval. At risk is the interval and the longest commit. Noise hides an overhead only."""
    figures = interval_figures([at_interval(10, overhead=0.06, commit_s=8), at_interval(30, overhead=0.02, commit_s=7)])
    assert figures["modelled_60s_overhead"].value == pytest.approx(1)
    assert figures["modelled_300s_at_risk_s"].value == 308
    assert figures["modelled_at_risk_at_2_percent_s"].value == pytest.approx(38)
    assert (figures["10s_overhead"].bar, figures["30s_at_risk_s"].bar) == ("<= 2", "<= 30")
    noisy = interval_figures([replace(at_interval(30, overhead=0.02, commit_s=7), noise=(0.96, 1.09))])
    assert (noisy["30s_overhead"].bar, noisy["30s_at_risk_s"].bar) == (None, "<= 30")


def test_blocks_become_overhead() -> None:
    """A block with checkpoints is compared with those around it. A state is at risk until the next commit."""
    raw: dict[str, Any] = {
        "blocks": [
            {"seconds": 10.0, "first": 0, "last": 10},
            {"seconds": 12.0, "first": 10, "last": 20},
            {"seconds": 10.0, "first": 20, "last": 30},
        ],
        "stamps_s": [float(step) for step in range(1, 31)],
        "checkpoints": [
            {"step": step, "phases": {"total": total}} for step, total in ((3, 9.0), (10, 2.0), (15, 3.0), (30, 9.0))
        ],
    }
    found = measured_of(5.0, raw)
    assert found.overhead == pytest.approx(0.2)
    assert (found.commit_s, found.between_commits_s, found.at_risk_s) == (3, 6, 8)
    assert found.noise == (1, 1)
    with pytest.raises(RuntimeError, match="two checkpoints in a block"):
        measured_of(5.0, {**raw, "checkpoints": raw["checkpoints"][:2]})


def test_storage_beside_model_is_summed() -> None:
    """The ledger grows with each checkpoint. The reader's state is part of the manifest."""
    figures = storage_figures(
        plain_bytes=1e6,
        state_bytes=1e6 + 200,
        manifest_bytes=500,
        reader_state_bytes=400,
        ledger_bytes=1_200,
        checkpoints=4,
    )
    assert figures["storage_additional"].value == pytest.approx(0.1)
    assert figures["storage_run_additional_bytes"].value == 4_000
    assert figures["storage_run_beside_last"].value == pytest.approx(0.17)


def test_figures_of_rows_share_table() -> None:
    """Names that begin or end with a row's name are its cells. A missing one is empty, and the rest is a separate table."""
    measured = {
        "5s_overhead": Figure(value=0.0567, unit="share", bar="<= 0.02"),
        "bytes_5s": Figure(value=123_456, unit="bytes"),
        "10s_overhead": Figure(value=0.01, unit="share"),
        "5s_at_risk_s": Figure(value=7.0, unit="s"),
        "step_s": Figure(value=0.5, unit="s"),
    }
    sides, others = program_tables({name: each.to_json() for name, each in measured.items()}, ("5s", "10s", "30s"))
    assert sides == (
        ("figure", "5s", "10s"),
        [("overhead (share)", "0.0567 (<= 0.02: missed)", "0.01"), ("bytes", "123,456", ""), ("at risk (s)", "7", "")],
    )
    assert others[1] == [("step s", "0.5", "s", "", "")]


def test_name_of_side_is_removed_once() -> None:
    """A figure of a side may end with the side's name as well."""
    measured = {"bare_over_bare": Figure(value=1.25, unit="ratio"), "bare_s": Figure(value=4.5, unit="s")}
    (table,) = program_tables({name: each.to_json() for name, each in measured.items()}, ("bare", "forked"))
    assert table == (("figure", "bare"), [("over bare (ratio)", "1.25"), ("s", "4.5")])


def test_undisturbed_trainings_have_summaries() -> None:
    """A method that is compared with the undisturbed training of another one has none."""
    outcomes = [outcome(method, seed=seed, faulted=False) for method in ("dlac", "stateful") for seed in (0, 1)]
    found = summarize_undisturbed([*outcomes, outcome("restart", faulted=True)], BATCH)
    assert [(each.method, each.seeds, each.final, each.identical) for each in found] == [
        ("dlac", 2, 2.0, 2),
        ("stateful", 2, 2.0, 2),
    ]


def test_claims_are_filled_in_from_parts() -> None:
    """A ratio has no unit and a share is a percentage. A part that did not run, or failed, is named as not measured."""
    figures = {
        "resume": {"in_order_less_than_replay": Figure(value=99.28, unit="%")},
        "state": {"torchdata_state_over_ours": Figure(value=271.4, unit="ratio")},
        "memory_recovery": {"100M_overhead": Figure(value=0.0162, unit="share of the time")},
    }
    found: dict[str, Any] = {
        part: {"figures": {name: each.to_json() for name, each in of.items()}} for part, of in figures.items()
    }
    cells = {row[0]: row[2:] for row in claim_rows({**found, "overhead": {"failed": "out of memory"}})}
    assert cells["positioning"][0] == "99.3 % less in order, not measured shuffled"
    assert cells["reader state for 10 TB and 128 workers"][1].startswith(
        "StatefulDataLoader's is 271 times as large, not measured times"
    )
    assert " at 1.62 % with states in memory" in cells["recovery point objective, overhead"][0]
    assert cells["tracking"][0].startswith("not measured")
    assert cells["training loss under faults"] == (
        "not measured",
        "not measured. With two ranks in each launch: not measured",
    )


def test_table_2_is_filled_in_from_parts() -> None:
    """Its last two columns are measured, or say that they are not."""
    figures = {"one_8_wall": Figure(value=16.6, unit="s"), "one_256_wall": Figure(value=22.3, unit="s")}
    rows = table_2_rows({"control_plane": {"figures": {name: each.to_json() for name, each in figures.items()}}})
    cells = {category: measured for category, _, _, *measured in rows}
    assert cells["Scaling efficiency"][1].endswith(": 16.6 s with 8 nodes, 22.3 s with 256")
    assert cells["Resource utilization"] == [
        "not measured to read again what was consumed, at 99 % of a pass",
        "not measured less",
    ]


def test_training_loss_is_a_claim() -> None:
    """DLAC's distance to its undisturbed training is apart from all other methods' distances."""
    other = {step: 1.1 * loss for step, loss in CALM.items()}
    outcomes = [
        outcome(method, faulted=faulted, validation=other if faulted and method == "stateful" else CALM)
        for method in ("dlac", "stateful")
        for faulted in (False, True)
    ]
    found = {"divergence": {"outcomes": [asdict(each) for each in outcomes]}}
    _, _, ours, others = claim_rows(found)[0]
    assert ours == "DLAC, training_run of one rank: 0.00 %"
    assert others == "StatefulDataLoader: 10.00 %. With two ranks in each launch: not measured"
    failed = [
        *(replace(each, setting="passes", failed="no such rank" if each.faulted else "") for each in outcomes),
        replace(outcomes[-1], seed=1, failed="no such rank"),
    ]
    fixed = replace(outcomes[-1], setting="fixed", losses=dict(CALM), validation=dict(CALM))
    of_all = [asdict(each) for each in [*outcomes, *failed, fixed]]
    _, _, ours, others = claim_rows({"divergence": {"outcomes": of_all}})[0]
    assert ours == "DLAC, training_run of one rank: 0.00 % and failed"
    assert others == (
        "StatefulDataLoader: 10.00 % (1 of its seeds failed) and failed. "
        "With two ranks in each launch: StatefulDataLoader: 0.00 %"
    )


def test_programs_exist() -> None:
    """Each part of the page names a program of the benchmarks' folder, and the rows of its table are distinct."""
    folder = Path(__file__).parents[2] / "benchmarks"
    for name, program in PROGRAMS.items():
        assert (folder / f"{name}.py").is_file()
        assert len(set(program.sides)) == len(program.sides)


def test_stamp_is_parsed_once(tmp_path: Path) -> None:
    """A poll parses only the stamps that were completed since the last one. A part of a line waits for its rest."""
    path = tmp_path / "stamps"
    stamps = StampFile(path)
    assert stamps.read() == []
    path.write_text("7 1 10.0 10.5\n7 2 11.0 11.5\n7 3 12")
    assert [each.step for each in stamps.read()] == [1, 2]
    with path.open("r+") as stream:
        stream.write("broken")  # a second look at the first stamp would fail
    assert [each.step for each in stamps.read(after=1)] == [2]
    with path.open("a") as stream:
        stream.write(".0 12.5\n8 3 13.0 13.5\n")
    assert stamps.read(after=2) == [Stamp(7, 3, 12.0, 12.5), Stamp(8, 3, 13.0, 13.5)]
