"""State machine of an attempt on one node. It is pure: observations go in, decisions come out."""

from collections.abc import Mapping
from enum import Enum, auto


class AttemptState(Enum):
    """State of an attempt."""

    STARTING = auto()
    """The ranks start and load. They have not begun to train."""
    TRAINING = auto()
    RESCALING = auto()
    """The ranks were asked to exit after a checkpoint, so that more nodes can join. They have no deadline."""
    DRAINING = auto()
    """The ranks were asked to exit, or have stopped for a rescale. They have a deadline."""
    ENDED = auto()


class Observation(Enum):
    """Event that a node observes during an attempt."""

    TRAINING_BEGAN = auto()
    STOP_REQUESTED = auto()
    """A person or a scheduler asked to stop the run, or asked this node to leave it."""
    NOTICE_RECEIVED = auto()
    """A rank of this node received a termination notice."""
    ROOM_TO_GROW = auto()
    """Nodes wait with which more ranks would train."""
    CHECKPOINT_REQUESTED = auto()
    """The request to exit after a checkpoint was written."""
    TRAINING_STOPPED = auto()
    """The ranks reported that they stopped. All their work is committed."""
    RANKS_TERMINATED = auto()
    """The signal of a requested exit killed a rank before it could handle the signal."""
    RANKS_FAILED = auto()
    RANKS_EXITED = auto()
    HANG_FOUND = auto()
    DEADLINE_PASSED = auto()
    VERDICT_RECEIVED = auto()
    """The leader has decided the end of the attempt. Observed by a node that follows."""
    LEADER_LOST = auto()
    """On a node that follows."""


class Decision(Enum):
    """Action that an observation requires."""

    CONTINUE = auto()
    LEAVE = auto()
    """Ask this node to leave the run to all further nodes."""
    REQUEST_STOP = auto()
    """Ask the ranks to exit before a deadline, which begins now."""
    REQUEST_CHECKPOINT = auto()
    """Ask the ranks to exit after a checkpoint. Observe `CHECKPOINT_REQUESTED` once that request is written."""
    START_DEADLINE = auto()
    """Begin the deadline of ranks that have stopped."""
    END_UNASKED = auto()
    """Conclude an attempt whose ranks exited without a request: they must have reported an ending."""
    END_AS_REPORTED = auto()
    """Conclude an attempt as its ranks reported. An attempt without a report was stopped."""
    END_AS_STOPPED = auto()
    """Conclude an attempt that was stopped on request. Nothing is lost."""
    FAIL = auto()


_At, _On, _Do = AttemptState, Observation, Decision
_LIVE = (_At.STARTING, _At.TRAINING, _At.RESCALING, _At.DRAINING)
_FAILURES = (_On.RANKS_FAILED, _On.HANG_FOUND, _On.LEADER_LOST)
TRANSITIONS: Mapping[tuple[AttemptState, Observation], tuple[AttemptState, Decision]] = {
    # By default an observation changes nothing.
    **{(state, each): (state, _Do.CONTINUE) for state in _LIVE for each in _On},
    # Ends of an attempt, in every state.
    **{(state, each): (_At.ENDED, _Do.FAIL) for state in _LIVE for each in _FAILURES},
    **{(state, _On.VERDICT_RECEIVED): (_At.ENDED, _Do.END_AS_REPORTED) for state in _LIVE},
    **{(state, _On.RANKS_TERMINATED): (_At.ENDED, _Do.END_AS_STOPPED) for state in _LIVE},
    **{(state, _On.RANKS_EXITED): (_At.ENDED, _Do.END_AS_REPORTED) for state in _LIVE},
    **{(state, _On.RANKS_EXITED): (_At.ENDED, _Do.END_UNASKED) for state in (_At.STARTING, _At.TRAINING)},
    # Requests to exit.
    **{(state, _On.STOP_REQUESTED): (_At.DRAINING, _Do.REQUEST_STOP) for state in _LIVE if state is not _At.DRAINING},
    **{(state, _On.NOTICE_RECEIVED): (state, _Do.LEAVE) for state in _LIVE if state is not _At.DRAINING},
    (_At.STARTING, _On.TRAINING_BEGAN): (_At.TRAINING, _Do.CONTINUE),
    (_At.TRAINING, _On.ROOM_TO_GROW): (_At.TRAINING, _Do.REQUEST_CHECKPOINT),
    (_At.TRAINING, _On.CHECKPOINT_REQUESTED): (_At.RESCALING, _Do.CONTINUE),
    (_At.RESCALING, _On.TRAINING_STOPPED): (_At.DRAINING, _Do.START_DEADLINE),
    (_At.DRAINING, _On.DEADLINE_PASSED): (_At.ENDED, _Do.FAIL),
    # An ended attempt ignores late observations.
    **{(_At.ENDED, each): (_At.ENDED, _Do.CONTINUE) for each in _On},
}
"""Next state and decision for each state and observation."""
ONLY_IN = {Observation.CHECKPOINT_REQUESTED: _At.TRAINING, Observation.DEADLINE_PASSED: _At.DRAINING}
"""Observations that the attempt itself brings about, with the only state in which it can."""


class AttemptMachine:
    """State of one attempt. `has_others`: other nodes can resume the run without this one."""

    def __init__(self, *, has_others: bool) -> None:
        self.state = AttemptState.STARTING
        self.rescales = False
        """True if the attempt ends so that more nodes can join, and no stop was requested instead."""
        self._has_others = has_others

    def observe(self, observation: Observation) -> Decision:
        """Change the state and return the decision. Raise `ValueError` if the observation is impossible in this state."""
        before = self.state
        if before is not ONLY_IN.get(observation, before) and before is not AttemptState.ENDED:
            raise ValueError(f"expected {observation.name} in state {ONLY_IN[observation].name}, found {before.name}")
        self.state, decision = TRANSITIONS[before, observation]
        if self.state is AttemptState.RESCALING:
            self.rescales = True
        if decision is Decision.REQUEST_STOP:
            self.rescales = False
        if decision is Decision.LEAVE and not (self._has_others or self.rescales):
            return Decision.CONTINUE  # the ranks handle the notice themselves: they take a checkpoint and exit
        return decision
