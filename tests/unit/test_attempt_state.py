"""The state machine of an attempt: every observation in every state."""

from itertools import product

import pytest

from dlac_pipeline.supervise.attempt_state import AttemptMachine, AttemptState, Decision, Observation

LIVE = [state for state in AttemptState if state is not AttemptState.ENDED]
PATHS = {
    AttemptState.STARTING: [],
    AttemptState.TRAINING: [Observation.TRAINING_BEGAN],
    AttemptState.RESCALING: [Observation.TRAINING_BEGAN, Observation.CHECKPOINT_REQUESTED],
    AttemptState.DRAINING: [Observation.STOP_REQUESTED],
    AttemptState.ENDED: [Observation.RANKS_EXITED],
}
"""Observations that lead to each state."""
At, On, Do = AttemptState, Observation, Decision
CHANGES = {
    (At.STARTING, On.TRAINING_BEGAN): (At.TRAINING, Do.CONTINUE),
    (At.STARTING, On.STOP_REQUESTED): (At.DRAINING, Do.REQUEST_STOP),
    (At.STARTING, On.NOTICE_RECEIVED): (At.STARTING, Do.LEAVE),
    (At.STARTING, On.RANKS_EXITED): (At.ENDED, Do.END_UNASKED),
    (At.TRAINING, On.STOP_REQUESTED): (At.DRAINING, Do.REQUEST_STOP),
    (At.TRAINING, On.NOTICE_RECEIVED): (At.TRAINING, Do.LEAVE),
    (At.TRAINING, On.ROOM_TO_GROW): (At.TRAINING, Do.REQUEST_CHECKPOINT),
    (At.TRAINING, On.CHECKPOINT_REQUESTED): (At.RESCALING, Do.CONTINUE),
    (At.TRAINING, On.RANKS_EXITED): (At.ENDED, Do.END_UNASKED),
    (At.RESCALING, On.STOP_REQUESTED): (At.DRAINING, Do.REQUEST_STOP),
    (At.RESCALING, On.NOTICE_RECEIVED): (At.RESCALING, Do.LEAVE),
    (At.RESCALING, On.TRAINING_STOPPED): (At.DRAINING, Do.START_DEADLINE),
    (At.RESCALING, On.RANKS_EXITED): (At.ENDED, Do.END_AS_REPORTED),
    (At.DRAINING, On.RANKS_EXITED): (At.ENDED, Do.END_AS_REPORTED),
    (At.DRAINING, On.DEADLINE_PASSED): (At.ENDED, Do.FAIL),
}
"""Transitions that depend on the state. The list is written out, not computed from the module."""
ENDS = {
    **{On.RANKS_FAILED: Do.FAIL, On.HANG_FOUND: Do.FAIL, On.LEADER_LOST: Do.FAIL},
    **{On.RANKS_TERMINATED: Do.END_AS_STOPPED, On.VERDICT_RECEIVED: Do.END_AS_REPORTED},
}
"""Decisions of the observations that end an attempt in every state."""
IMPOSSIBLE = {
    *((state, On.CHECKPOINT_REQUESTED) for state in LIVE if state is not At.TRAINING),
    *((state, On.DEADLINE_PASSED) for state in LIVE if state is not At.DRAINING),
}


def machine_in(state: AttemptState, *, has_others: bool = True) -> AttemptMachine:
    """Return a machine in a state."""
    machine = AttemptMachine(has_others=has_others)
    for observation in PATHS[state]:
        machine.observe(observation)
    assert machine.state is state
    return machine


@pytest.mark.parametrize(("state", "observation"), list(product(AttemptState, Observation)))
def test_observation_leads_to_decision(state: AttemptState, observation: Observation) -> None:
    """Every observation in every state has one next state and decision, or is refused."""
    machine = machine_in(state)
    if (state, observation) in IMPOSSIBLE:
        with pytest.raises(ValueError, match=f"expected {observation.name} in state"):
            machine.observe(observation)
        assert machine.state is state
        return
    after, decision = CHANGES.get((state, observation), (state, Do.CONTINUE))
    if observation in ENDS and state in LIVE:
        after, decision = At.ENDED, ENDS[observation]
    assert (machine.observe(observation), machine.state) == (decision, after)


@pytest.mark.parametrize("state", [At.STARTING, At.TRAINING])
def test_notice_on_single_node_is_ignored(state: AttemptState) -> None:
    """No other node can resume the run, and the ranks exit themselves after a checkpoint."""
    machine = machine_in(state, has_others=False)
    assert (machine.observe(On.NOTICE_RECEIVED), machine.state) == (Do.CONTINUE, state)


def test_stopped_ranks_still_rescale() -> None:
    """The deadline of the ranks begins, and later requests reach no rank."""
    machine = machine_in(At.RESCALING)
    assert machine.observe(On.TRAINING_STOPPED) is Do.START_DEADLINE
    assert machine.observe(On.TRAINING_STOPPED) is Do.CONTINUE
    assert machine.observe(On.STOP_REQUESTED) is Do.CONTINUE
    assert (machine.observe(On.RANKS_EXITED), machine.rescales) == (Do.END_AS_REPORTED, True)
