"""The state that a rank resumes from: loaded into the script's engine from a checkpoint, or from memory, with the generators."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from dlac_pipeline.checkpoint.collectives import RankTree, failing_together
from dlac_pipeline.checkpoint.commit.ledger_rows import agreed_reader_state
from dlac_pipeline.checkpoint.engines import Engine
from dlac_pipeline.checkpoint.engines.safe_load import load_tensors
from dlac_pipeline.checkpoint.restore.fetch_checkpoint import load_checkpoint
from dlac_pipeline.checkpoint.restore.resume_point import FromMemory, ResumePoint
from dlac_pipeline.checkpoint.rng import rng_file, rng_state, set_rng_state
from dlac_pipeline.elastic.ranks.script_errors import describe_exception
from dlac_pipeline.lakehouse.errors import MemoryStateLost
from dlac_pipeline.lakehouse.ledger.arrow_rows import parse_columns
from dlac_pipeline.lakehouse.ledger.typed_rows import AdvanceRow
from dlac_pipeline.memory_states.states import MemoryState, Trained, check_unchanged, read_slot, remove_state
from dlac_pipeline.plan.order import LegOrder, ReaderState, reader_state_of
from dlac_pipeline.spec.job_spec import JobSpec


class RestoredGenerators:
    """The random generators as they are now, as after the load of a state. Constructors of a trainer draw numbers afterwards."""

    def __init__(self) -> None:
        self._kept = rng_state()

    def reset(self) -> None:
        """Set the random generators to that state."""
        set_rng_state(self._kept)


@dataclass(frozen=True, kw_only=True, slots=True)
class RestoredMemory:
    """Facts of a memory state that are not in its files."""

    state: MemoryState
    cursors: ReaderState
    trained: Trained
    """The steps since the head."""
    advances: list[AdvanceRow]


def read_memory(point: ResumePoint, order: LegOrder, *, replays: bool = True) -> RestoredMemory | None:
    """Return the facts of a resume point's memory state, if it has one. Raise `MemoryStateLost` if it is gone or does not fit.

    Without `replays` a state of steps that read skipped rows again does not fit: the ledger would not have these rows.
    """
    if not isinstance(point, FromMemory):
        return None
    state = read_slot(Path(point.folder))
    trained = None if state is None or state.first.step != point.step else state.trained_since(point.head_step)
    if state is None or trained is None:
        place = f"in {point.folder!r}" if point.folder else "on this node"
        raise MemoryStateLost(
            f"expected the memory state of step {point.step} {place}, found another one or none: start the run again with "
            "`dlac train`, unless a supervisor does"
        )
    with lose_if_unreadable(state):
        last = order.total_steps if order.counted else None
        if not replays and last is not None and point.step > last:
            raise ValueError(f'expected steps up to {last}, found step {point.step} of launch.on_skipped = "replay"')
        cursors = agreed_reader_state(order, state.votes(), point.step)
    return RestoredMemory(
        state=state,
        cursors=reader_state_of(cursors),
        trained=trained,
        advances=[row for row in parse_columns(trained.advances) if isinstance(row, AdvanceRow)],
    )


def load_state(
    engine: Engine,
    point: ResumePoint,
    memory: RestoredMemory | None,
    spec: JobSpec,
    tree: RankTree,
    *,
    restores: bool,
    check_weights: Callable[[], None],
) -> tuple[float, float]:
    """Load the state of a resume point, as `load_checkpoint` does. Collective.

    A state from memory is checked as no checkpoint has to be: `check_weights` may raise. Raise `MemoryStateLost` if it cannot be
    read, or changed meanwhile. Then it is removed, so that the next attempt reads a checkpoint. The error of a connection to
    another rank, or of a script whose model a whole state does not fit, is raised as it is.
    """
    if memory is None:
        return load_checkpoint(engine, point, spec, tree, restores=restores)
    with lose_if_unreadable(memory.state, loads=engine):
        spent = load_checkpoint(engine, point, spec, tree, restores=restores)
    with lose_if_unreadable(memory.state):
        with failing_together(tree, doing="checking the state from memory"):
            if (
                memory.state.first.world_size == tree.world_size
                and not rng_file(memory.state.folder, tree.rank).exists()
            ):
                raise MemoryStateLost(f"the random generators of rank {tree.rank} are missing")
            check_weights()
        if not check_unchanged(memory.state):
            raise MemoryStateLost("another attempt wrote it meanwhile")
    return spent


@contextmanager
def lose_if_unreadable(state: MemoryState, *, loads: Engine | None = None) -> Iterator[None]:
    """Turn a failure into `MemoryStateLost`, and remove the states of that attempt.

    They stay if another rank was lost, or if a state that an engine `loads` is whole: it does not fit the script, which may be
    corrected.
    """
    try:
        yield
    except Exception as err:
        if describe_exception(err)["origin"] in ("peer", "passing") or (loads is not None and _is_whole(state, loads)):
            raise
        remove_state(state)
        raise MemoryStateLost(
            f"expected to resume from the memory state in {str(state.folder)!r}, found {type(err).__name__}: {err}"
        ) from err


def _is_whole(state: MemoryState, engine: Engine) -> bool:
    """Return whether a state is unchanged, and PyTorch can read its files. A user's adapter may name no classes."""
    try:
        classes: Sequence[type] = getattr(engine, "safe_classes", tuple)()
        for path in sorted(state.folder.glob("**/*.pt")):
            load_tensors(path, classes)
    except Exception:  # whatever damage makes of a file
        return False
    return check_unchanged(state)
