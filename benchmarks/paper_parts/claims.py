"""The paper's claims and its tables, each beside what was measured here."""

from collections.abc import Iterator
from typing import Any

from benchmarks.paper_parts.divergence import BATCH, METHODS, SETTINGS, Outcome
from benchmarks.paper_parts.summary import Summary, summarize

Found = dict[str, Any]
Rows = list[tuple[str, ...]]
CLAIM_HEADS = ("claim", "the paper", "DLAC, measured here", "beside it")
TABLE_1_HEADS = ("component", "function", "the paper", "DLAC")
TABLE_2_HEADS = ("category", "the paper: without", "the paper: with", "measured without", "measured with DLAC")


def claim_rows(found: Found) -> Rows:
    """Return a row per claim. A cell whose program failed or did not run says so."""
    return [(claim, paper, _text(ours, found), _text(others, found)) for claim, paper, ours, others in _CLAIMS]


def table_1_rows(found: Found) -> Rows:
    """Return the rows of the paper's table 1, with what DLAC does instead of it."""
    return [
        (
            "State serialization",
            "captures precise reader position",
            "Protocol Buffers with custom binary encoding",
            _text(
                "JSON in the manifest of a checkpoint, with a cursor per key group: {state:reader_state_bytes} at 10 TB",
                found,
            ),
        ),
        (
            "Row group tracking",
            "monitors position within Parquet files",
            "multi-level consumption hierarchy",
            "a row group is a unit of work, and a row of the ledger says which rows of a block a checkpoint has consumed",
        ),
        (
            "Differential encoding",
            "reduces checkpoint size",
            "delta compression between states",
            _text(
                "the ledger has what was consumed since the parent checkpoint: {checkpoint:storage_ledger_bytes_per_checkpoint} "
                "per checkpoint with 1,024 key groups",
                found,
            ),
        ),
        (
            "Recovery protocol",
            "ensures consistent restart",
            "two-phase commit coordination",
            "all ranks vote, and one Iceberg commit has the checkpoint and its consumption. That of a replaced attempt fails",
        ),
    ]


def table_2_rows(found: Found) -> Rows:
    """Return the rows of the paper's table 2, with what was measured without and with DLAC."""
    return [(*of_paper, _text(without, found), _text(ours, found)) for *of_paper, without, ours in _TABLE_2]


_NO_PEER = "no peer was measured"
_TABLE_2 = (
    (
        "Training loss consistency",
        "high variance after recovery",
        "tracks within failure-free runs",
        "{others}, from the undisturbed training",
        "{ours}",
    ),
    (
        "Recovery point objective",
        "epoch boundaries only",
        "fine-grained intervals",
        "the epoch's start, by definition: not measured",
        "{memory_recovery:100M_at_risk_s} with states in memory, {intervals:30s_at_risk_s} with a checkpoint every 30 s",
    ),
    (
        "Resource utilization",
        "redundant computation",
        "efficient resumption",
        "{resume:in_order_replay_to_99_percent_s} to read again what was consumed, at 99 % of a pass",
        "{resume:in_order_less_than_replay} less",
    ),
    (
        "Scaling efficiency",
        "degrades with size",
        "maintains performance",
        _NO_PEER,
        "recovery from the loss of a node: {control_plane:one_8_wall} with 8 nodes, {control_plane:one_256_wall} with 256",
    ),
)
_CLAIMS = (
    (
        "training loss under faults",
        "within 0.1 % of failure-free runs (5.2)",
        "{ours}",
        "{others}. With two ranks in each launch: {fixed}",
    ),
    (
        "positioning",
        "87.3 % less (5.1)",
        "{resume:in_order_less_than_replay} less in order, {resume:shuffled_less_than_replay} shuffled",
        "replay: {resume:in_order_replay_to_99_percent_s}, {resume:shuffled_replay_to_99_percent_s}",
    ),
    (
        "recovery point objective, overhead",
        "below 30 s, below 2 % (5.1)",
        "{memory_recovery:100M_at_risk_s} at {memory_recovery:100M_overhead} with states in memory, {intervals:30s_at_risk_s} at "
        "{intervals:30s_overhead} with a checkpoint every 30 s. A checkpoint costs {intervals:checkpoint_cost_s}, fitted to "
        "the intervals that are long enough for a commit",
        "the noise of the latter: a block without a checkpoint over the one before is {intervals:without_over_without_low} to "
        "{intervals:without_over_without_high}",
    ),
    (
        "recovery from the loss of a node",
        "below 45 s with 256 nodes (4.3)",
        "{control_plane:one_256_wall} with 256 nodes on one machine",
        "one of two ranks killed: DLAC {recovery:forked_recovery_s}, a bare relaunch {recovery:bare_recovery_s}",
    ),
    (
        "reader state for 10 TB and 128 workers",
        "35 to 45 MB (4.1), up to 20 times smaller than generic encoding (5.3)",
        "{state:reader_state_bytes}",
        "StatefulDataLoader's is {state:torchdata_state_over_ours} times as large, "
        "{state:torchdata_seed_only_state_over_ours} times with a sampler that keeps its seed only",
    ),
    (
        "tracking",
        "0.3 to 1.0 % of the training time (4.2)",
        "{overhead:tracking_share_of_step_10ms} of steps of {overhead:step_ms_10ms}, "
        "{overhead:tracking_share_of_step_50ms} of {overhead:step_ms_50ms}, {overhead:tracking_share_of_step_500ms} of "
        "{overhead:step_ms_500ms}",
        _NO_PEER,
    ),
    (
        "storage",
        "0.1 to 0.2 % more (4.2)",
        "{checkpoint:storage_additional}",
        _NO_PEER,
    ),
    (
        "coordination of a checkpoint",
        "O(log n) in place of O(n) (4.2)",
        "16 ranks / 2 ranks: {coordination:tree_16_over_2}. Between four ranks, beyond gradients: "
        "{traffic:relaunch_beyond_gradients_per_step} per step",
        "flat gather: {coordination:flat_16_over_2}",
    ),
    (
        "recovery as nodes are added",
        "near-constant (5.3)",
        "{control_plane:one_8_wall}, {control_plane:one_32_wall}, {control_plane:one_128_wall}, {control_plane:one_256_wall} "
        "with 8, 32, 128, 256 nodes",
        _NO_PEER,
    ),
    (
        "bytes from the store per recovery of a rank",
        "a factor of 5 less network traffic, of erasure-coded storage (3.3)",
        "{traffic:memory_from_store_per_recovery} with states in memory, {traffic:per_step_from_store_per_recovery} with replica "
        "groups: rows of the table, which each new process reads again",
        "from the last checkpoint, on the node's disk: {traffic:relaunch_from_store_per_recovery}",
    ),
)


def _text(template: str, found: Found) -> str:
    """Fill in `{PROGRAM:FIGURE}`, `{ours}`, `{others}` and `{fixed}`."""
    parts = []
    for piece in template.split("{"):
        name, closed, rest = piece.partition("}")
        parts += [_measured(name, found), rest] if closed else [piece]
    return "".join(parts)


def _measured(name: str, found: Found) -> str:
    if name in ("ours", "others", "fixed"):
        return "; ".join(_distances(found, of_ours=name == "ours", is_fixed=name == "fixed")) or "not measured"
    program, _, figure = name.partition(":")
    one = found.get(program, {}).get("figures", {}).get(figure)
    if one is None:
        return "not measured"
    value, unit = one["value"], one["unit"]
    if unit.startswith("share"):
        value, unit = 100 * value, "%"
    shown = f"{value:,.0f}" if abs(value) >= 1_000 else f"{value:.3g}"
    return shown if unit == "ratio" else f"{shown} {unit}"


def _distances(found: Found, *, of_ours: bool, is_fixed: bool) -> Iterator[str]:
    """Yield how far the training losses of each method are from its undisturbed ones, over the settings.

    `is_fixed` chooses those in which the number of ranks stays.
    """
    outcomes = [Outcome.from_json(each) for each in found.get("divergence", {}).get("outcomes", ())]
    by_method: dict[str, list[Summary]] = {}
    for each in summarize(outcomes, BATCH):
        if (len(set(SETTINGS[each.setting].worlds)) == 1) == is_fixed:
            by_method.setdefault(each.method, []).append(each)
    for method, summaries in by_method.items():
        if method.startswith("dlac") == of_ours:
            yield f"{METHODS[method].name}: {' and '.join(map(_distance, summaries))}"


def _distance(each: Summary) -> str:
    """Return the distance over the seeds that did not fail."""
    if not each.seeds:
        return "failed"
    return f"{100 * each.loss_distance:.2f} %" + (f" ({len(each.failed)} of its seeds failed)" if each.failed else "")
