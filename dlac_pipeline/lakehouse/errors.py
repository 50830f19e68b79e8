"""Errors of DLAC, one class per failure: docs/errors.md has the tree. `exit_code` is the exit status of the process."""

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any, ClassVar, Self

from dlac_pipeline.lakehouse.masking import mask_secrets


class DlacError(Exception):
    """Root of all errors of this project."""

    exit_code: ClassVar[int] = 70
    transient: ClassVar[bool] = False
    """True if the same request may succeed later: an orchestrator tries again, within bounds."""

    def __init_subclass__(cls, *, exit_code: int | None = None, transient: bool | None = None) -> None:
        """Set the class attributes that are given. The base class has all further ones."""
        cls.exit_code = cls.exit_code if exit_code is None else exit_code
        cls.transient = cls.transient if transient is None else transient

    def __init__(self, *args: object) -> None:
        """`args` as of any exception. Secrets in them are masked, because errors go to logs, reports and Dagster."""
        super().__init__(*(mask_secrets(each) if isinstance(each, str) else each for each in args))


HOW_TO_RENEW = (
    "stop all launches, then restore the newest backup of the catalog, or run `dlac ledger rebuild` "
    "(docs/recovery/repair.md)"
)
"""Advice for a ledger that is older than its journal or its store."""
_NAMED = 20
"""Columns that a message names, at the most."""


class BadInput(DlacError, exit_code=64):
    """The request cannot be met as it is written. Trying again unchanged is useless."""


class SpecInvalid(BadInput):
    """A job spec, a name or an option is wrong."""


class ResumeMismatch(BadInput):
    """Resuming would change something that the leg binds."""


class CatalogMisconfigured(BadInput):
    """The address or the credentials of the catalog are wrong. Waiting does not help."""


class NoSuchLakehouse(BadInput):
    """There is no lakehouse of DLAC at the address."""


class NoSuchTable(BadInput):
    """The named table is not in the catalog."""


class NoSuchSnapshot(BadInput):
    """The named snapshot is not in the table."""


class NoSuchColumn(BadInput):
    """A named column is not in the table's schema."""

    @classmethod
    def of(cls, setting: str, name: str, known: Sequence[str], *, hint: str = "") -> Self:
        """Return the error for a name in a setting that is none of the `known` columns. `hint` is the advice if it is known."""
        spelled = {each.casefold(): each for each in known}
        # A known name is a field of a struct whose path was quoted as one name.
        close = [] if name in known else get_close_matches(name.casefold(), list(spelled), n=1)
        meant = f"did you mean {spelled[close[0]]!r}?" if close else "name one of these"
        more = f", and {len(known) - _NAMED} more," if len(known) > _NAMED else ""
        return cls(
            f"expected one of the columns {[*known[:_NAMED]]!r}{more} in {setting}, found {name!r}: {hint or meant}"
        )


class NoSuchRun(BadInput):
    """The ledger has no row of the named run."""


class NoSuchCheckpoint(BadInput):
    """The run has no checkpoint of this step, id or name that can be restored."""


class NoSuchJobSpec(BadInput):
    """The job spec of the run's last launch is not on this node."""


class UnsupportedColumn(BadInput):
    """A column's type or content cannot become a tensor."""


class UnsupportedSnapshot(BadInput):
    """The snapshot has an id that is no signed 64-bit number, or a schema that the table's metadata lack."""


class UnsupportedDeletes(BadInput):
    """The snapshot carries delete files that cannot be applied: not Parquet, on nested columns, or vectors outside Puffin."""


class TableReplaced(BadInput):
    """The table under this name is not the planned table."""


class EmptyPlan(BadInput):
    """A pass would have no live row."""


class ScriptInvalid(BadInput):
    """The training script cannot be run, or does not do its part: restore, then a batch, then its step's end."""


class TransformFailed(BadInput):
    """The user's transform raised, rejected rows, or broke its contract."""


class TokenizerUnreadable(BadInput):
    """A tokenizer cannot be loaded, or lacks a requested token."""


class LogsMissing(BadInput):
    """The logs of an attempt are not on this node, or no longer."""


class NothingToRehearse(BadInput):
    """No checkpoint is kept that has a committed successor, whose losses could be compared."""


class FormatTooNew(BadInput):
    """Something stored was written by another version of DLAC, whose format this one does not read."""


class LakehouseError(DlacError, exit_code=69, transient=True):
    """The lakehouse did not do its part."""


class CatalogUnreachable(LakehouseError):
    """The catalog, or the warehouse of its tables, does not answer."""


class CatalogHostUnknown(CatalogUnreachable, transient=False):
    """The name of the catalog's host does not resolve. A launch waits within its bounds, an orchestrator does not retry."""


class MetadataLost(LakehouseError, transient=False):
    """The metadata file of a table, which the catalog names, is missing or cannot be read."""


class TableDamaged(LakehouseError, transient=False):
    """A file of one of DLAC's own tables was cut, replaced or altered."""


class PinLost(LakehouseError, transient=False):
    """The tag that keeps a planned snapshot alive is gone or names another snapshot."""


class AppendHistoryLost(LakehouseError, transient=False):
    """Rows appended to a source since its plan cannot be identified any more."""


class DataFileUnreadable(LakehouseError):
    """A data file of the pinned snapshot is missing or cannot be decoded."""


class DataFileChanged(LakehouseError, transient=False):
    """A registered Parquet file has another content than before."""


class LedgerError(DlacError, exit_code=71):
    """The consumption ledger refused something."""


class Fenced(LedgerError, exit_code=80):
    """A newer attempt owns the run. This one must stop for good."""


class RunBusy(LedgerError, exit_code=81):
    """Another launch of this run is alive."""


class RunFinished(LedgerError, exit_code=82):
    """The run is finished and takes no more attempts."""


class SteppedAside(LedgerError, exit_code=83):
    """Another recovery claimed the run first."""


class HeadMoved(LedgerError):
    """The head is neither my parent nor me, under my own attempt: another process group of it, a bug, or a hand in the ledger."""


class LedgerOlderThanStore(LedgerError, exit_code=87):
    """The catalog was restored from a backup that lacks checkpoints which were committed since: restore a newer one."""


class RowsBetween(LedgerError):
    """Another process, such as an operator who named a checkpoint, appended rows to the run that a commit has not seen."""


class CommitConflict(LedgerError):
    """`main` of a table moved between the read and the commit. The commit did not land. The commit loop retries it."""


class CommitOutcomeUnknown(LedgerError, transient=True):
    """The catalog stayed away past the deadline while a commit was under way."""


class CheckpointError(DlacError, exit_code=74):
    """A checkpoint could not be taken or restored."""


class StoreUnavailable(CheckpointError, transient=True):
    """The checkpoint store is not writable, full or away."""


class StateChanged(CheckpointError, transient=True):
    """Something other than a step of an optimizer has changed a state while it was copied beside training."""


class CheckpointDamaged(CheckpointError):
    """A checkpoint's file is missing, truncated or altered."""


class CheckpointUnsafe(CheckpointError):
    """A checkpoint's file has something in it that loading would run as code."""


class NoRestorableCheckpoint(CheckpointError, exit_code=84):
    """No checkpoint on the lineage can be restored."""


class CursorMismatch(CheckpointError):
    """A restored or reported cursor differs from the order."""


class WorldSizeUnsupported(CheckpointError):
    """The saved model state cannot be loaded by this number of ranks."""


class TrainingFailed(DlacError, exit_code=72, transient=True):
    """The ranks died and were not relaunched."""


class PeerLeft(TrainingFailed):
    """Another rank has ended, or closed its connection. Its own failure is the cause."""


class NodesMissing(TrainingFailed):
    """Fewer nodes than the job needs joined in time."""


class ClusterRefused(TrainingFailed):
    """The cluster's scheduler does not take the job, or is not there."""


class ClusterSilent(TrainingFailed, transient=False):
    """The cluster's scheduler does not answer any more: its job is followed no longer, and left as it is."""


class NoProgress(TrainingFailed, exit_code=85, transient=False):
    """Several attempts in a row committed nothing."""


class LossNotFinite(TrainingFailed, exit_code=88, transient=False):
    """The loss of a step that was applied is NaN or infinite, or the weights are: training on would waste time."""


class LossSpiked(TrainingFailed, exit_code=90, transient=False):
    """The loss of a step is far above the losses of the steps before, and `launch.on_spike` does not train on."""

    detail: Mapping[str, Any] = {}
    """The step and the samples to blame, if another attempt is to leave them out."""


class ScriptFailed(TrainingFailed, exit_code=89, transient=False):
    """The training script raised the same exception at the same place in two attempts in a row."""


class OutOfMemory(TrainingFailed, exit_code=91, transient=False):
    """A rank could not allocate memory, in an attempt that committed nothing: another one would fail as well."""


class MemoryStateLost(TrainingFailed):
    """A memory state changed while it was loaded, or no checkpoint may have its weights. The next attempt reads a checkpoint."""


class LeftUnfinished(TrainingFailed, transient=False):
    """The script ended with exit status 0 before the run did."""


class Preempted(TrainingFailed, exit_code=86):
    """The deadline of a termination notice passed before its checkpoint was committed. The one before is the head."""


def error_kind(err: BaseException) -> str:
    """Return the kind of an error for other processes: the name of its nearest class here, else of the error's class."""
    return next((each for each in type(err).__mro__ if each.__module__ == __name__), type(err)).__name__


def error_class(kind: str) -> type[DlacError] | None:
    """Return the class here of this name, or None if it is no error of DLAC's, or one of another version."""
    found = globals().get(kind)
    return found if isinstance(found, type) and issubclass(found, DlacError) else None


def error_from_kind(kind: str, message: str, *, default: type[DlacError]) -> DlacError:
    """Return the error that another process reported. An unknown kind becomes a `default` that names it."""
    known = error_class(kind)
    return default(f"{kind}: {message}") if known is None else known(message)
