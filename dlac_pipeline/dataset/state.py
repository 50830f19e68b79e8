"""Where a consumer stands, as JSON data: made, merged over ranks, read, and checked against what is asked for."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from blake3 import blake3
from torch.utils.data import get_worker_info

from catalog.connect import connect
from catalog.errors import FormatTooNew, ResumeMismatch, SpecInvalid
from dlac_pipeline.plan.leg import Leg, told
from dlac_pipeline.plan.legs import asked_for
from dlac_pipeline.spec import (
    JobSpec,
)

STATE_VERSION = 1
"""Of the state; a later DLAC reads what an earlier one wrote."""
STATE_FILE = "dlac_reader.json"
"""The state beside a checkpoint; written last, so a checkpoint folder without it is not complete."""

State = dict[str, Any]
Cursors = dict[int, list[list[int]]]
"""Key group -> its cursor in each source."""


def merge_states(states: Sequence[Mapping[str, Any]]) -> State:
    """One state of those of all ranks at one step, which any number of ranks can load.

    Raises:
        ResumeMismatch: they are of different steps or legs, differ in a key group that ranks share, or one is missing.
    """
    read = [read_state(state) for state in states]
    first = read[0]
    found = sorted({(state["step"], state["leg"]["digest"]) for state in read})
    if len(found) > 1:
        raise ResumeMismatch(f"expected states of one step and leg, found {found!r}: merge what was saved together")
    if first["cursors"] is None:
        return first
    merged: dict[str, Any] = {}
    for state in read:
        for group, cursors in state["cursors"].items():
            if merged.setdefault(group, cursors) != cursors:
                raise ResumeMismatch(
                    f"expected one cursor of key group {group}, found {merged[group]!r} and {cursors!r}"
                )
    missing = set(map(str, range(Leg.from_json(first["leg"]["json"]).key_groups))) - set(merged)
    if missing:
        raise ResumeMismatch(
            f"expected the states of all ranks, found none with key groups {sorted(missing, key=int)!r}"
        )
    return {**first, "cursors": {group: merged[group] for group in sorted(merged, key=int)}}


def read_state(state: Mapping[str, Any] | str | Path) -> State:
    """A state, from a file or a folder that holds one, or as it is; checked for its version and digest.

    Raises:
        SpecInvalid: there is no such file.
        FormatTooNew: a newer DLAC wrote it.
        ResumeMismatch: it was altered.
    """
    found = _read_file(Path(state)) if isinstance(state, str | Path) else dict(state)
    if found.get("format_version") != STATE_VERSION:
        raise FormatTooNew(
            f"expected a dataset's state of version {STATE_VERSION}, found version {found.get('format_version')!r}: upgrade DLAC"
        )
    if digest_of(found["leg"]["json"]) != found["leg"]["digest"]:
        raise ResumeMismatch("expected a state whose leg has the digest that it names, found another: it was altered")
    return found


def _read_file(path: Path) -> State:
    path = path / STATE_FILE if path.is_dir() else path
    try:
        return dict(json.loads(path.read_text()))
    except (OSError, ValueError) as err:
        raise SpecInvalid(f"expected the state of a dataset at {str(path)!r}, found {err}") from err


def check_asked(spec: JobSpec, leg: Leg) -> None:
    """Check that the spec asks for what the leg of a state binds; a snapshot that it does not name is that of the state."""
    lakehouse = connect(spec.lakehouse)
    uuids = {source.table: str(lakehouse.load(source.table).metadata.table_uuid) for source in spec.sources}
    differing = leg.differences(asked_for(spec, leg, uuids))
    if differing:
        raise ResumeMismatch(
            f"the state was read with other settings than the dataset was opened with:\n{told(differing, bound='saved')}\n"
            "give the saved values again, or begin without the state"
        )


def start_of(leg: Leg, key_groups: range) -> Cursors:
    """The cursors of these key groups where the leg begins."""
    return {group: [list(source.start.cursors[group]) for source in leg.sources] for group in key_groups}


def cursors_of(state: State, leg: Leg, key_groups: range) -> Cursors:
    """The cursors of these key groups; of a counted leg the steps alone say where they are."""
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
    """Behind which step the workers took turns, where the state is that of one of them."""
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
