"""Retention: the choice of checkpoints to keep, and the removal of the rest. See docs/design/0003-checkpoints.md."""

import logging
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress

from dlac_pipeline.checkpoint.restore.conversion import discard_conversion
from dlac_pipeline.checkpoint.store import MANIFEST, Tiers, attempt_of, folder_name_of, folder_uri
from dlac_pipeline.lakehouse.errors import CheckpointDamaged
from dlac_pipeline.lakehouse.ledger import branches, commits, older_ledger, run_rows, typed_rows
from dlac_pipeline.lakehouse.own_folders import remove_tree
from dlac_pipeline.lakehouse.store_files import below
from dlac_pipeline.spec.job_spec import CheckpointSpec

AGAIN_AT_ONCE = 16
"""Earlier failures that are tried again after one checkpoint."""
FAILING_S = 10.0
"""Seconds that failures may take after one checkpoint, because the end of the process waits for them."""
_OUT = (typed_rows.RetireRow, typed_rows.QuarantinedCheckpointRow)
_KINDS = (typed_rows.CheckpointRow, typed_rows.NameRow, typed_rows.RewindRow, *_OUT)
_STAGED = re.compile(r"/step-(\d+)-(\w+?)(-\d+-\w+)?$")
"""Step, nonce of the attempt, and name of its writer, if the attempt has several."""

_log = logging.getLogger(__name__)


class Removal:
    """Removal of one attempt. `left_over` finds the folders of earlier attempts, once."""

    def __init__(self, tiers: Tiers, attempt: int, left_over: Callable[[], Iterable[str]]) -> None:
        self._tiers = tiers
        self._files = tiers.files.hurried()
        self._attempt = attempt
        self._left_over = left_over
        self._swept = False
        self._new: deque[str] = deque()
        self._failed: deque[str] = deque()
        """The one that was tried longest ago first."""
        self._warned = False
        self._lock = threading.Lock()
        self._under_way = False

    def begin(self, folders: Iterable[str]) -> None:
        """Remove these folders, then all further ones that are due, in a thread. A running thread takes them as well."""
        with self._lock:
            self._new.extend(folders)
            if self._under_way or not (self._new or self._failed or not self._swept):
                return
            self._under_way = True
        # Not a daemon: after the last checkpoint of a run no attempt would remove the rest.
        threading.Thread(target=self.work, name="retention").start()

    def work(self) -> None:
        """Remove the folders that are due, new ones first: however many fail, they do not wait for those."""
        failing_s = 0.0 if self._swept else self._sweep()
        again = min(len(self._failed), AGAIN_AT_ONCE)
        while True:
            with self._lock:
                retries = not self._new
                if failing_s >= FAILING_S or (retries and not again):
                    self._under_way = False
                    return
                folder = (self._failed if retries else self._new).popleft()
            again -= retries
            started = time.monotonic()
            try:
                self._remove(folder)
            except Exception as err:  # the checkpoint is committed: nothing of this may fail it
                self._failed.append(folder)
                failing_s += time.monotonic() - started
                self._warn_once(folder, err)
            else:
                self._warned = self._warned and bool(self._failed)

    def _sweep(self) -> float:
        """Find left-over folders. Return the seconds that failures took."""
        started = time.monotonic()
        try:
            found = list(self._left_over())
        except Exception as err:
            self._warn_once(self._tiers.durable_run(), err)
            return time.monotonic() - started
        with self._lock:
            known = set(self._new)
            self._new.extend(each for each in found if each not in known)
        self._swept = True
        return 0.0

    def _remove(self, folder: str) -> None:
        local = self._tiers.folder("/".join(folder.split("/")[-2:]))
        discard_conversion(local)
        self._files.remove(folder)
        with suppress(OSError):
            remove_tree(local)
        if (attempt_of(local.parent.name) or self._attempt) < self._attempt:
            with suppress(OSError):
                local.parent.rmdir()  # it is empty when its last checkpoint is gone

    def _warn_once(self, where: str, err: Exception) -> None:
        """Log a failure, once until everything is removed."""
        if not self._warned:
            self._warned = True
            _log.warning(
                f"expected to remove checkpoints that no run needs, found at {where}: {err}; tried again after the next "
                "checkpoint, without another warning"
            )


class Retention:
    """Retention at the coordinator of one attempt. `rows` are the run's when the attempt began."""

    def __init__(
        self, settings: CheckpointSpec, tiers: Tiers, attempt: int, rows: Sequence[typed_rows.LedgerRow]
    ) -> None:
        self._settings = settings
        self._tiers = tiers
        self._files = tiers.files.hurried()  # the end of the process waits for a removal
        self._attempt = attempt
        claims = [row for row in rows if isinstance(row, typed_rows.ClaimRow)]
        self._nonces = {row.nonce for row in claims}
        self._marking = {row.nonce for row in claims if row.marks_commits}
        """Nonces of attempts that mark each checkpoint that they commit."""
        self._rows: list[typed_rows.LedgerRow] = []
        self._removal = Removal(tiers, attempt, self._left_over)
        self.saw(rows)

    def saw(self, rows: Sequence[typed_rows.LedgerRow]) -> None:
        """Rows that others have appended to the run."""
        self._rows += [row for row in rows if isinstance(row, _KINDS)]

    def due(self, checkpoint_id: str, step: int, parent: str | None) -> list[str]:
        """Return what must be retired when this checkpoint becomes the head: all that is not kept, oldest first.

        Checkpoints that a rewind abandoned stay, because only their operator knows whether they are still needed. Checkpoints
        of one step, without a batch between them, count once.
        """
        keep_last, every = self._settings.keep_last, self._settings.keep_every_steps
        if not keep_last:
            return []
        checkpoints = run_rows.checkpoint_rows(self._rows)
        out = run_rows.out_of(self._rows)
        kept, steps = {checkpoint_id}, {step}
        abandoned = branches.left_by_rewinds(self._rows) - set(run_rows.lineage_of(self._rows, parent))
        while parent is not None:
            row = checkpoints[parent]
            before = checkpoints[row.parent].step if row.parent in checkpoints else 0
            again = row.step in steps
            # The multiple of `keep_every_steps` that the checkpoint stands for may be after its parent's step.
            milestone = every > 0 and row.step // every > before // every
            if parent not in out and (again or milestone or len(steps) < keep_last):
                kept.add(parent)
                steps.add(row.step)
            parent = row.parent
        needed = kept | abandoned | out | set(commits.names_of(self._rows).values())
        return [each for each in checkpoints if each not in needed]

    def committed(self, checkpoint: typed_rows.CheckpointRow, retired: Iterable[str]) -> None:
        """The checkpoint is the head, and these are retired: remove their files, in a thread."""
        gone, before = set(retired), self._referred()
        self._rows += [checkpoint, *(typed_rows.RetireRow(checkpoint_id=each) for each in gone)]
        kept, after = self._kept(), self._referred()
        freed = before - kept.keys()  # folders of retired checkpoints, from the last that referred to them
        found = {folder_name_of(row.manifest_uri): row for row in run_rows.checkpoint_rows(self._rows).values()}
        due = [row for name, row in found.items() if name not in after and (row.checkpoint_id in gone or name in freed)]
        self._removal.begin([folder_uri(row.manifest_uri) for row in due])

    def check_kept(self, folders: Collection[str]) -> None:
        """Raise `CheckpointDamaged` unless kept checkpoints need these folders, so that no process removes one."""
        if missing := set(folders) - self._kept().keys() - self._referred():
            raise CheckpointDamaged(
                f"expected the files in {sorted(missing)!r}, to which this checkpoint refers, found that an operator has retired "
                "them: start the run again, and its next checkpoint has all files"
            )

    def _kept(self) -> dict[str, typed_rows.CheckpointRow]:
        """Return the checkpoints that are not retired, by the names of their folders."""
        out = {row.checkpoint_id for row in self._rows if isinstance(row, typed_rows.RetireRow)}
        rows = run_rows.checkpoint_rows(self._rows).values()
        return {folder_name_of(row.manifest_uri): row for row in rows if row.checkpoint_id not in out}

    def _referred(self) -> set[str]:
        """Return the folders to which these refer. They stay, also of retired ones."""
        return {folder for row in self._kept().values() for folder in row.refers_to}

    def sweep(self) -> None:
        """Remove the remains of retired checkpoints now. No thread is running."""
        self._removal.work()

    def _left_over(self) -> Iterator[str]:
        """Yield the folders of retired checkpoints, and folders that no checkpoint has, by unique names.

        The latter are of earlier attempts, or of process groups of this one that did not commit them: one of that step, or of a
        later one, has been committed.
        """
        out = {row.checkpoint_id for row in self._rows if isinstance(row, typed_rows.RetireRow)}
        checkpoints = list(run_rows.checkpoint_rows(self._rows).values())
        named = {folder_name_of(row.manifest_uri): row.checkpoint_id for row in checkpoints}
        known, referred, newest = (
            set(named.values()),
            self._referred(),
            max((row.step for row in checkpoints), default=0),
        )
        files, run = self._files, self._tiers.durable_run()
        attempts = [name for name in files.children(run) if attempt_of(name) is not None]
        for name in [f"{each}/{step}" for each in attempts for step in files.children(below(run, each))]:
            checkpoint_id, attempt, staged = named.get(name), attempt_of(name), _STAGED.search(name)
            if checkpoint_id in out and name not in referred:
                yield below(run, name)
            elif checkpoint_id is None and name not in referred and attempt is not None and staged is not None:
                step, nonce, group = staged.groups()
                is_over = attempt < self._attempt or (attempt == self._attempt and group and int(step) <= newest)
                mine = nonce in self._nonces  # not of a run of this name in another lakehouse
                if is_over and mine and self._never_committed(below(run, name), nonce, known):
                    yield below(run, name)

    def _never_committed(self, folder: str, nonce: str, known: set[str]) -> bool:
        """Return True if a folder that no row names has no committed checkpoint. In doubt, as without commit marks, it stays."""
        proof = older_ledger.proven_parent(folder, self._files)
        if proof is not None and proof.checkpoint_id not in known:
            return False
        return nonce in self._marking or MANIFEST not in self._files.children(folder)
