"""One combination from its origin to its judgement."""

import json
import os
import shutil
import tempfile
import traceback
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from uuid import uuid4

from benchmarks.pairs_lab.afterwards import do_afterwards
from benchmarks.pairs_lab.factors import Combination
from benchmarks.pairs_lab.faults import stop_early, train, train_with_fault
from benchmarks.pairs_lab.judge import (
    check,
    check_audit,
    check_chain,
    check_nothing_left,
    check_rows,
    rest_of,
)
from benchmarks.pairs_lab.log import Entry, Step, last_attempt, read_entries, read_steps
from benchmarks.pairs_lab.scene import EXCLUDED, Scene
from benchmarks.programs.pairs_rank import digest_of
from dlac_pipeline.extensions.branches.rewind import rewind_run
from dlac_pipeline.extensions.exchange.fork import fork_run

_BASE_STEPS, _REWIND_TO, _STOPS_AFTER = 6, 5, 4
_NUMBERS = count()


class Course:
    """One combination that is tried."""

    def __init__(self, scene: Scene) -> None:
        self.scene = scene
        self.first: Entry | None = None
        """Digests with which the run begins, if it has an origin."""
        self.decays = 0
        """Steps of the schedule in the origin."""
        self.branches: list[int] = []
        """The last attempt before each rewind."""
        self.excluded: set[int] = set()

    def run(self) -> None:
        """Train with the fault, judge, do what comes then, and judge again."""
        scene = self.scene
        scene.spec()
        _ORIGINS[scene.combination["origin"]](self)
        if scene.combination["source"] == "followed":
            if scene.combination["origin"] in ("fresh", "adopted", "forked"):
                train(scene)
            scene.append_more()
        train_with_fault(scene)
        steps = self.judge()
        self._check_events(steps)
        attempt = last_attempt(read_entries(scene.log, scene.run))
        if (row := do_afterwards(scene, steps)) is not None:
            self.branches.append(attempt)
            self.excluded.add(row)
            self.judge()
        check_nothing_left(scene)

    def judge(self) -> list[Step]:
        """Judge the log of the run, and return its steps."""
        scene, entries = self.scene, read_entries(self.scene.log, self.scene.run)
        steps = read_steps(entries, branches=self.branches)
        rests = [self._began(entries, left) for left in self.branches]
        pending = check_rows(steps, scene.live_rows(), self.excluded, max(rests, default=1), rest=rest_of(scene))
        is_replicated = scene.combination["ranks"] == "replicas"
        check_chain(steps, first=self.first, decays=self.decays, is_replicated=is_replicated)
        check_audit(scene, steps, pending)
        return steps

    def _began(self, entries: list[Entry], left: int) -> int:
        return min((entry["step"] for entry in entries if entry["attempt"] > left), default=1)

    def _check_events(self, steps: list[Step]) -> None:
        """Check that the listener has learned of the last checkpoint."""
        if self.scene.combination["extras"] == "listeners":
            events = [json.loads(line) for line in self.scene.journaled_events.read_text().splitlines()]
            last = [event["step"] for event in events if event["kind"] == "CheckpointCommitted"][-1:]
            check(last == [len(steps)], f"the listener's last checkpoint is of step {last}, not {len(steps)}")

    def begin_adopted(self) -> None:
        """Begin from weights of others."""
        weights = self.scene.adopt()
        self.first = {"weights": digest_of([weights[name] for name in sorted(weights)])}

    def begin_forked(self) -> None:
        """Begin from another run."""
        scene = self.scene
        scene.spec("base", steps=_BASE_STEPS)
        train(scene, "base")
        base = read_steps(read_entries(scene.log, "base"))
        self.first, self.decays = {"weights": base[-1].ends[0]["after"]["weights"]}, len(base)
        fork_run(scene.lakehouse, scene.spec(), "base")

    def begin_rewound(self) -> None:
        """Train to the end, and go back to before rows that are excluded."""
        scene = self.scene
        train(scene)
        self.branches.append(last_attempt(read_entries(scene.log, scene.run)))
        where, is_mixture = f"row_id < {EXCLUDED}", scene.combination["source"] in ("mixed", "late")
        exclude = [("src.t", where) if is_mixture else where]
        nonce = uuid4().hex[:8]
        rewind_run(scene.lakehouse, scene.run, nonce=nonce, target=_REWIND_TO, exclude=exclude, spec=scene.spec())
        self.excluded |= set(range(EXCLUDED)) & scene.live_rows().keys()

    def begin_resized(self) -> None:
        """Train the first steps with another number of ranks."""
        scene = self.scene
        scene.spec(ranks="two" if scene.combination["ranks"] == "one" else "one")
        stop_early(scene, _STOPS_AFTER)
        scene.spec()


_ORIGINS = {
    "fresh": lambda course: None,
    "adopted": Course.begin_adopted,
    "forked": Course.begin_forked,
    "rewound": Course.begin_rewound,
    "resized": Course.begin_resized,
}


def why_skipped(combination: Combination) -> str | None:
    """Return why the combination cannot be tried here, or None."""
    if "full" in (combination["memory"], combination["fault"].rpartition(" ")[2]) and os.getuid():
        return "mounting a small tmpfs needs root"
    return None


def try_combination(combination: Combination, seed: int, *, keep: Path | None = None) -> str:
    """Try a combination. Return what is wrong with it, or an empty text. `keep` is a folder for what is left of a wrong one."""
    run = f"pair{os.getpid()}-{next(_NUMBERS)}"
    with ExitStack() as mounts:
        home = Path(mounts.enter_context(tempfile.TemporaryDirectory(prefix=f"{run}-", ignore_cleanup_errors=True)))
        scene = Scene(combination, run, home / "home", mounts, seed)
        mounts.callback(_end_processes, scene)
        try:
            Course(scene).run()
        except Exception as err:
            if keep is not None:
                shutil.copytree(scene.home, keep / run, dirs_exist_ok=True, symlinks=True)
            return f"{type(err).__name__}: {err}\n{''.join(traceback.format_tb(err.__traceback__)[-3:])}"
    return ""


def _end_processes(scene: Scene) -> None:
    """Kill what a failure has left, by the places in its command."""
    import psutil

    for process in psutil.process_iter(["cmdline"]):
        line = " ".join(process.info["cmdline"] or ())
        if str(scene.home) in line or f"dlac {scene.run} " in line:
            process.kill()
