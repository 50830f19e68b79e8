"""State of a dataset as JSON data: made, merged over ranks, read, and checked against the requested settings."""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from blake3 import blake3
from torch.utils.data import get_worker_info

from dlac_pipeline.extensions.dataset.batches import LastBatch
from dlac_pipeline.lakehouse.errors import FormatTooNew, ResumeMismatch, SpecInvalid
from dlac_pipeline.lakehouse.iceberg.connect import connect
from dlac_pipeline.plan.legs.choice import requested_leg
from dlac_pipeline.plan.legs.leg import Leg, describe_differences
from dlac_pipeline.plan.order import LegOrder
from dlac_pipeline.plan.plan import Plans
from dlac_pipeline.plan.source_order import Cursor, SourceOrder
from dlac_pipeline.spec.job_spec import JobSpec

STATE_VERSION = 2
"""Version of the state. A later DLAC reads an earlier one. Version 1 had a digest of its leg only, and no `last_batch`."""
_KEYS = {1: ("leg", "step", "cursors"), 2: ("leg", "step", "cursors", "last_batch", "digest")}
"""Keys of a state of each version. Each has `format_version` too, and a worker's state has `worker`."""
STATE_FILE = "dlac_reader.json"
"""The state beside a checkpoint. It is written last, so a checkpoint folder without it is not complete."""

State = dict[str, Any]
Cursors = dict[int, list[list[int]]]
"""Key group -> its cursor in each source."""


def make_state(
    leg: Leg, *, step: int, cursors: Cursors | None, last_batch: LastBatch, worker: dict[str, Any] | None
) -> State:
    """Make the state of a consumer that received the batch of `step`, with `cursors` where the step does not determine them."""
    text = leg.to_json()
    state: State = {
        "format_version": STATE_VERSION,
        "leg": {"digest": digest_of(text), "json": text},
        "step": step,
        "cursors": None if cursors is None else {str(group): each for group, each in cursors.items()},
        "last_batch": last_batch,
    }
    return _with_digest(state if worker is None else {**state, "worker": worker})


def merge_states(states: Sequence[Mapping[str, Any]]) -> State:
    """Merge the ranks' states of one step into a state that any number of ranks can load.

    Raises `ResumeMismatch` if they are of different steps or legs, differ in a key group that ranks share, or one is missing.
    """
    read = [read_state(state) for state in states]
    found = sorted({(state["step"], state["leg"]["digest"], str(state.get("last_batch"))) for state in read})
    if len(found) != 1:
        raise ResumeMismatch(f"expected states of one step and leg, found {found!r}: merge what was saved together")
    first = read[0]
    if first["cursors"] is None:
        return first
    merged: dict[str, Any] = {}
    for state in read:
        for group, cursors in (state["cursors"] or {}).items():
            if merged.setdefault(group, cursors) != cursors:
                raise ResumeMismatch(
                    f"expected one cursor of key group {group}, found {merged[group]!r} and {cursors!r}"
                )
    missing = set(map(str, range(Leg.from_json(first["leg"]["json"]).key_groups))) - set(merged)
    if missing:
        raise ResumeMismatch(
            f"expected the states of all ranks, found none with key groups {sorted(missing, key=int)!r}"
        )
    return _with_digest({**first, "cursors": {group: merged[group] for group in sorted(merged, key=int)}})


def read_state(state: Mapping[str, Any] | str | Path) -> State:
    """Return a state, from a file or a folder that contains one, or as it is. Version, keys and digest are checked.

    Raises:
        SpecInvalid: the file does not exist, or it is not the state of a dataset.
        FormatTooNew: a newer DLAC wrote it.
        ResumeMismatch: it was altered.
    """
    found = _read_file(Path(state)) if isinstance(state, str | Path) else state
    if not isinstance(found, Mapping) or "format_version" not in found:
        raise SpecInvalid(
            f"expected what a dataset's state_dict() returned, found {_described(found)}: give the state of the dataset itself, "
            "not that of a loader around it"
        )
    found = dict(found)
    version = found["format_version"]
    if type(version) is not int or version not in _KEYS:
        raise FormatTooNew(
            f"expected a dataset's state of version {STATE_VERSION} or older, found version {version!r}: upgrade DLAC"
        )
    _check_content(found)
    return found


def _check_content(state: State) -> None:
    missing = [key for key in _KEYS[state["format_version"]] if key not in state]
    if missing:
        raise _altered(f"with {missing!r}, found only {sorted(map(str, state))!r}")
    leg = state["leg"]
    if not isinstance(leg, Mapping) or not isinstance(leg.get("json"), str):
        raise _altered(f"with its leg as JSON text, found {_described(leg)}")
    if digest_of(leg["json"]) != leg.get("digest"):
        raise _altered("whose leg has the digest that it names, found another")
    try:
        Leg.from_json(leg["json"])
    except (KeyError, TypeError, ValueError) as err:
        raise _altered(f"with the record of a leg, found something else ({type(err).__name__}: {err})") from err
    if state["format_version"] > 1 and state["digest"] != _digest(state):
        raise _altered(f"with the digest {state['digest']!r} that it names, found {_digest(state)!r}")


def _altered(found: str) -> ResumeMismatch:
    return ResumeMismatch(
        f"expected a dataset's state {found}: it was altered, or is of another dataset; give what state_dict() returned"
    )


def _with_digest(state: State) -> State:
    """Return the state with the digest of its content. Version 1 had none and stays as it is."""
    return state if state["format_version"] == 1 else {**state, "digest": _digest(state)}


def _digest(state: State) -> str:
    content = {name: value for name, value in state.items() if name != "digest"}
    try:
        return digest_of(json.dumps(content, sort_keys=True, separators=(",", ":")))
    except (TypeError, ValueError) as err:
        raise _altered(f"of plain JSON data, found {err}") from err


def _described(value: object) -> str:
    return f"the keys {sorted(map(str, value))!r}" if isinstance(value, Mapping) else repr(value)


def _read_file(path: Path) -> Any:
    path = path / STATE_FILE if path.is_dir() else path
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as err:
        raise SpecInvalid(f"expected the state of a dataset at {str(path)!r}, found {err}") from err


def check_last_batch(state: State, requested: LastBatch) -> None:
    """Check that a state was read with the requested `last_batch`. One of version 1 does not name it."""
    saved = state.get("last_batch", requested)
    if saved != requested:
        raise _other_settings({"last_batch": (saved, requested)})


def _other_settings(differences: Mapping[str, tuple[Any, Any]]) -> ResumeMismatch:
    return ResumeMismatch(
        "the state was read with other settings than the dataset was opened with:\n"
        f"{describe_differences(differences, bound='saved')}\ngive the saved values again, or begin without the state"
    )


def check_position(state: State, order: LegOrder) -> None:
    """Raise `ResumeMismatch` unless a state's step and cursors are places of its leg."""
    step, first = state["step"], order.settings.start_step
    last = order.total_steps if order.counted else order.settings.steps
    if type(step) is not int or step < first or (last is not None and step > last):
        until = "" if last is None else f" to {last}"
        raise _altered(f"with a step of {first}{until}, found {step!r}")
    if order.counted != (state["cursors"] is None):
        raise _altered(f"{'without' if order.counted else 'with'} cursors, found {_described(state['cursors'])}")
    for group, cursors in (state["cursors"] or {}).items():
        _check_cursors(str(group), cursors, order)


def _check_cursors(group: str, cursors: Any, order: LegOrder) -> None:
    sound = group.isdecimal() and int(group) < order.settings.key_groups
    sound = sound and isinstance(cursors, list | tuple) and len(cursors) == len(order.sources)
    places: Iterable[tuple[SourceOrder, Any]] = zip(order.sources, cursors, strict=True) if sound else ()
    if not sound or not all(_is_place(int(group), source, cursor) for source, cursor in places):
        raise _altered(
            f"with cursors of key groups below {order.settings.key_groups}, each a place in one of {len(order.sources)} sources, "
            f"found {cursors!r} of key group {group!r}"
        )


def _is_place(group: int, source: SourceOrder, cursor: object) -> bool:
    if not isinstance(cursor, list | tuple) or len(cursor) != 4:
        return False
    if not all(type(number) is int and number >= 0 for number in cursor):
        return False
    place, start = Cursor(*cursor), source.start
    passes = start.next_pass + sum(passes for _, passes in start.upcoming)
    if not place.offset and place == Cursor(place.pass_index):
        return source.endless or place.pass_index <= passes
    if not source.endless and place.pass_index >= passes:
        return False
    try:
        cut = source.cut_of(place.pass_index)
        return place.block < cut.block_count(group) and place.position <= cut.block(group, place.block).rows
    except IndexError:
        return False


def check_requested(spec: JobSpec, leg: Leg) -> None:
    """Check that the spec requests the settings of a state's leg. The state names the snapshot if the spec does not."""
    lakehouse = connect(spec.lakehouse, tables=spec.own_tables)
    uuids = {source.table: str(lakehouse.load(source.table).metadata.table_uuid) for source in spec.sources}
    differing = leg.differences(requested_leg(spec, leg, uuids))
    if differing:
        raise _other_settings(differing)
    for source, mine in zip(spec.sources, leg.sources, strict=True):
        Plans(lakehouse).check_files(mine.start.live_plan_ids, table=source.table)


def start_of(leg: Leg, key_groups: range) -> Cursors:
    """The cursors of these key groups where the leg begins."""
    return {group: [list(source.start.cursors[group]) for source in leg.sources] for group in key_groups}


def cursors_of(state: State, leg: Leg, key_groups: range) -> Cursors:
    """Return the cursors of these key groups. For a counted leg the step determines them."""
    if state["cursors"] is None:
        return start_of(leg, key_groups)
    missing = [group for group in key_groups if str(group) not in state["cursors"]]
    if missing:
        raise ResumeMismatch(
            f"expected a state with key groups {missing!r}, found those of another rank: save gathered_state(), or put the "
            "states of all ranks together with merge_states([...])"
        )
    return {group: [list(cursor) for cursor in state["cursors"][str(group)]] for group in key_groups}


def base_of(state: State) -> int | None:
    """Return the step after which the workers took turns, if a worker made the state."""
    part, worker = state.get("worker"), get_worker_info()
    if part is None:
        return None
    if worker is None or worker.num_workers != part["of"]:
        raise ResumeMismatch(
            f"expected to load the state of one of {part['of']} workers into such a worker, found "
            f"{'none' if worker is None else f'{worker.num_workers} workers'}: load it through its StatefulDataLoader"
        )
    return int(part["base"])


def digest_of(text: str) -> str:
    """The digest of a leg's JSON."""
    return blake3(text.encode()).hexdigest(length=12)
