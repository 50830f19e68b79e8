"""The engine per step: groups, one per node, train together. A lighthouse proposes quorums, which the ledger records."""

from __future__ import annotations

from dataclasses import dataclass, field

from tests.simulation import values
from tests.simulation.commit import Stage, check_owner, commit_checkpoint, finish_run
from tests.simulation.ledger import OutcomeUnknown, Reading, Refused, extend
from tests.simulation.scheduler import Life, Process
from tests.simulation.world import Node, World, share_of

_RANKS = 2
"""Ranks of a group."""


@dataclass(eq=False)
class Group:
    """A replica group. Without a claim it has just been started, and waits for a quorum."""

    node: Node
    life: Life
    claim: values.ClaimRow | None = None
    state: values.State | None = None
    position: tuple[int, int] = (-1, -1)
    """The quorum that executed the last step of its state, and that step."""
    quorum: int = -1
    """The quorum in which it contributed last."""
    joined: list[int] = field(default_factory=list)
    """Appends of the quorums that it joined since then."""
    view: View | None = None
    head: values.CheckpointRow = values.BEGINNING
    """The head as it knows it."""
    commits: bool = False
    staged_step: int = 0

    @property
    def latest(self) -> int:
        """Return the append of the quorum that it joined last."""
        return 0 if self.view is None else self.view.append_id


@dataclass(eq=False)
class View:
    """A proposed quorum, and later the recorded one."""

    claim: values.ClaimRow
    append_id: int
    number: int
    members: list[Group]
    newest: tuple[int, int]
    """The position of the state that all members need before the next step."""
    recorded: bool = False
    broken: bool = False

    @property
    def nodes(self) -> tuple[int, ...]:
        """Return the numbers of its nodes."""
        return tuple(group.node.number for group in self.members)


class Groups:
    """All groups of one run, and their lighthouse."""

    def __init__(self, world: World) -> None:
        self._world = world

    def start_attempt(self, claim: values.ClaimRow, reading: Reading, state: values.State, team: list[Node]) -> None:
        """Start a group on each node of a launch. The claim has recorded their quorum."""
        groups = [Group(node, node.ranks, claim, state, (0, state.step), quorum=0, head=reading.head) for node in team]
        view = View(claim, claim.append_id, 0, groups, (0, state.step), recorded=True)
        view.broken = view.nodes != claim.members
        for group in groups:
            group.node.group, group.view = group, view
        self._world.scheduler.spawn(self._train(view), Life())

    # The lighthouse

    def run_lighthouse(self) -> Process[None]:
        """Restart lost groups, and propose quorums to the groups that reach each other."""
        world = self._world
        while True:
            yield world.between(0.4, world.conditions.propose)
            for node in world.nodes:
                if node.group is None and not node.trains and not node.life.ended:
                    life = node.restart_ranks()  # it ends the node's group
                    node.group = Group(node, life)
                    node.progress = world.now
            for side in world.lighthouses:
                self._propose([node for node in world.nodes if world.side[node.number] == side])

    def _reaches_lighthouse(self, group: Group) -> bool:
        return self._world.side[group.node.number] in self._world.lighthouses

    def _propose(self, nodes: list[Node]) -> None:
        world = self._world
        groups = [node.group for node in nodes if node.group is not None and not node.group.life.ended]
        claims = [group.claim for group in groups if group.claim is not None]
        if not claims:
            return
        claim = max(claims, key=lambda each: each.fence.attempt)
        groups = [group for group in groups if group.claim in (None, claim)]
        first = groups[0].view
        if first is not None and first.members == groups and not self._is_broken(first):
            return
        members = [group for group in groups if not world.happens(0.15)]
        base = max((group.quorum for group in members), default=-1)
        if base < 0:
            return
        donors = [group for group in members if group.state and world.rules.is_donor(group.quorum, base)]
        newest = max((group.position for group in donors), key=lambda position: position[1])
        writer = next(group for group in members if group.quorum == base)
        view = View(claim, world.number(), base + 1, members, newest)
        world.note("the lighthouse proposes {} to {}, from quorum {}", view.append_id, view.nodes, base)
        for group in members:
            group.view, group.claim, group.node.trains = view, claim, True
            group.joined.append(view.append_id)
        world.advance([group.node for group in members])
        world.scheduler.spawn(self._record(view, writer), writer.life)
        world.scheduler.spawn(self._train(view), Life())

    def _is_broken(self, view: View) -> bool:
        return view.broken or len(self._present(view)) < len(view.members)

    def _present(self, view: View) -> list[Group]:
        """Return the members that reach the first live one, and count for this quorum."""
        alive = [group for group in view.members if not group.life.ended]
        near = [group for group in alive if self._world.linked(alive[0].node, group.node)]
        return [group for group in near if self._world.rules.is_in_quorum(view.append_id, group.latest)]

    def _record(self, view: View, writer: Group) -> Process[None]:
        """Append the row of a quorum, after the quorum that its donors trained in."""
        world, fence, base = self._world, view.claim.fence, writer.quorum

        def decide(reading: Reading) -> values.QuorumRow:
            check_owner(world, reading, fence.attempt, fence.nonce)
            if not world.rules.is_in_quorum(view.append_id, writer.latest):
                raise Refused("is_in_quorum", reading)
            later = [append_id for _, append_id, _ in reading.quorums(fence.nonce, after=base)]
            if not world.rules.succeeds_quorum(later, writer.joined):
                raise Refused("succeeds_quorum", reading)
            if not world.rules.reaches_head(view.newest[1], reading.head.state.step):
                raise Refused("reaches_head", reading)
            view.number = reading.quorums(fence.nonce)[-1][0] + 1
            return values.QuorumRow(
                fence=extend(reading.fence), append_id=view.append_id, number=view.number, members=view.nodes
            )

        try:
            reading = yield from world.ledger.append(writer.node, view.append_id, decide)
        except Refused as refused:
            self._restart(view, f"quorum refused: {refused}")
        except OutcomeUnknown:
            view.broken = True
        else:
            view.recorded = True
            for group in view.members:
                group.head = reading.head

    def _restart(self, view: View, why: str) -> None:
        """Restart the groups of a quorum, which lose their states."""
        self._world.note("{} restart: {}", view.nodes, why)
        view.broken = True
        for group in view.members:
            if group.view is view and group.node.group is group:
                group.node.restart_ranks()

    # Steps

    def _train(self, view: View) -> Process[None]:
        """Execute steps until a member is lost or joins another quorum."""
        world, rules = self._world, self._world.rules
        self._heal(view)
        while not view.broken:
            yield world.between(0.5, 1.0)
            world.reach("forward")
            present = self._present(view)
            if not present or not rules.have_all_contributed(present, view.members):
                view.broken = True
                world.note("quorum {} breaks", view.nodes)
            elif not self._reaches_lighthouse(present[0]) or not rules.is_recorded(view.recorded):
                continue
            elif all(rules.is_healed(group.position, view.newest) for group in present):
                world.advance([group.node for group in present])
                if view.newest[1] == values.LAST_STEP:
                    self._commit_if_due(present[0], view)
                else:
                    yield from self._execute(view, present)

    def _execute(self, view: View, present: list[Group]) -> Process[None]:
        """Execute one step. Each group learns for itself whether its collective operation succeeded."""
        world = self._world
        world.truth.check_step(view.claim.fence.nonce, view.number, view.nodes)
        result = self._reduce(view, present)
        for group in present:
            group.quorum = view.number
            group.joined.clear()
        yield world.between(0.05, 0.3)
        world.reach("reduce")
        applied: list[values.State] = []
        for group in world.rng.sample(present, len(present)):
            yield world.between(0.0, 0.1)
            if group.life.ended or not world.rules.is_in_quorum(view.append_id, group.latest):
                continue
            disturbed = self._is_broken(view)
            votes = [not (world.rng.random() < 0.5 if disturbed else world.happens(0.02)) for _ in range(_RANKS)]
            if world.rules.have_ranks_voted(votes):
                group.state = result if all(votes) else world.garbage(result.step)
                group.position = view.newest = (view.number, result.step)
                applied.append(group.state)
                world.scheduler.spawn(self._stage(group, result, view), group.life)
                if group is view.members[0]:
                    self._commit_if_due(group, view)
                world.reach("apply")
        if applied:
            by_all = len(applied) == len(view.members)
            world.truth.check_applied(view.claim.fence.nonce, set(applied), by_all=by_all)
        self._heal(view)

    def _reduce(self, view: View, present: list[Group]) -> values.State:
        """Return the state after a step that divides the global batch among the groups."""
        rows = values.rows_of(view.claim.leg, view.newest[1] + 1)
        consumed: list[int] = []
        for group in present:
            theirs = group.view or view
            index = theirs.members.index(group) if group in theirs.members else 0
            consumed += share_of(rows, index, len(theirs.members))
        states = {group.state for group in present}
        before = states.pop()
        if states or before is None:
            return self._world.garbage(view.newest[1] + 1)
        return self._world.truth.make(before, values.digest_rows(before.rows, sorted(consumed)), view.claim.fence.nonce)

    def _heal(self, view: View) -> None:
        for group in view.members:
            if group.position != view.newest and not group.life.ended:
                self._world.scheduler.spawn(self._receive(group, view), group.life)

    def _receive(self, group: Group, view: View) -> Process[None]:
        """Receive the newest state from a member that has it. Nothing is received if the donor is lost."""
        world, newest = self._world, view.newest
        yield world.between(0.3, 2.0)
        world.reach("heal")
        donors = [each for each in view.members if each.position == newest and world.linked(each.node, group.node)]
        if donors and group.view is view:
            group.state, group.position = donors[0].state, newest
            group.head = max(group.head, donors[0].head, key=lambda row: row.fence.seq)

    def _stage(self, group: Group, state: values.State, view: View) -> Process[None]:
        """Copy the parts of all ranks of a group into the memory of its node. The other groups are its buddies."""
        fence = view.claim.fence
        stamp = values.Stamp(state.step, fence.attempt, view.number, fence.nonce, view.claim.leg, _RANKS)
        for index in range(_RANKS):
            yield from self._world.copy(group.node, values.Part(stamp, index, state), group.staged_step)
        group.staged_step = state.step

    # Durable checkpoints

    def _commit_if_due(self, group: Group, view: View) -> None:
        """Let the first member of a quorum commit a checkpoint."""
        state, world = group.state, self._world
        due = min(group.head.state.step + world.conditions.interval, values.LAST_STEP)
        if state is not None and not group.commits and state.step >= due:
            group.commits = True
            world.scheduler.spawn(self._checkpoint(group, view, state), group.life)

    def _checkpoint(self, group: Group, view: View, state: values.State) -> Process[None]:
        world, fence = self._world, view.claim.fence
        stage = Stage.of(view.claim, state, group.head.checkpoint, quorum=group.quorum)
        try:
            if group.head.state.step < values.LAST_STEP:
                reading = yield from commit_checkpoint(world, group.node, stage, [group.life] * _RANKS)
                group.head = reading.head
            if group.head.state.step == values.LAST_STEP:
                yield from finish_run(world, group.node, fence.attempt, fence.nonce)
        except OutcomeUnknown:
            world.note("the outcome of a commit is unknown")
        except Refused as refused:
            group.head = refused.reading.head
            if refused.rule in ("owns_run", "stays_member"):
                self._restart(view, f"commit refused: {refused}")
        group.commits = False
