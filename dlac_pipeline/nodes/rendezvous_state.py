"""The state of PyTorch's rendezvous as JSON: what a store holds may come from anyone who reaches its port.

PyTorch pickles this state, and reading a pickle runs the code that it names. Here a state is read field by field.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, ValidationError
from torch.distributed.elastic.rendezvous import RendezvousStateError
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import _NodeDesc, _RendezvousState

_Count = Annotated[int, Field(ge=0)]
_Node = tuple[str, _Count, _Count]
"""Address, process id, number within the process."""


class _Record(BaseModel):
    """A state as the store holds it; lists are sorted, so that equal states have equal bytes."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    format: Literal["dlac rendezvous 1"] = "dlac rendezvous 1"
    round: _Count
    complete: bool
    deadline: AwareDatetime | None
    closed: bool
    participants: list[tuple[_Node, _Count]]
    wait_list: list[_Node]
    redundancy_list: list[_Node]
    last_heartbeats: list[tuple[_Node, AwareDatetime]]


def encode_state(state: _RendezvousState) -> bytes:
    """Return the state as JSON."""
    return (
        _Record(
            round=state.round,
            complete=state.complete,
            deadline=state.deadline,
            closed=state.closed,
            participants=sorted((_plain(node), rank) for node, rank in state.participants.items()),
            wait_list=sorted(map(_plain, state.wait_list)),
            redundancy_list=sorted(map(_plain, state.redundancy_list)),
            last_heartbeats=sorted((_plain(node), at) for node, at in state.last_heartbeats.items()),
        )
        .model_dump_json()
        .encode()
    )


def decode_state(content: bytes) -> _RendezvousState:
    """Return the state that JSON describes.

    Raises:
        RendezvousStateError: the content is anything else.
    """
    try:
        record = _Record.model_validate_json(content)
    except ValidationError as err:
        raise RendezvousStateError(f"{len(content)} bytes that are no state of a rendezvous") from err
    state = _RendezvousState()
    state.round, state.complete = record.round, record.complete
    state.deadline, state.closed = record.deadline, record.closed
    state.participants = {_NodeDesc(*node): rank for node, rank in record.participants}
    state.wait_list = {_NodeDesc(*node) for node in record.wait_list}
    state.redundancy_list = {_NodeDesc(*node) for node in record.redundancy_list}
    state.last_heartbeats = {_NodeDesc(*node): at for node, at in record.last_heartbeats}
    return state


def _plain(node: _NodeDesc) -> _Node:
    return node.addr, node.pid, node.local_id
