"""Does training diverge when it resumes without its position in the data? The same faults, with and without it.

One model learns real text from the rows of one table, with every loader, with the same seeds and the same faults. Some faults
change the number of ranks. Each loader is also trained undisturbed, because each has an order of its own.
"""

from __future__ import annotations

import json
import queue
import subprocess
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.paper_parts import text
from benchmarks.paper_parts.model import LENGTH
from benchmarks.paper_parts.trainer import Training
from benchmarks.paper_parts.whole import run_name
from benchmarks.peer_loaders import environments
from benchmarks.peer_loaders.environments import Environment
from dlac_pipeline.audit.audit import audit_run
from dlac_pipeline.extensions.loader_check import tables
from dlac_pipeline.extensions.loader_check.client import LoaderFailed
from dlac_pipeline.extensions.loader_check.protocol import Job
from dlac_pipeline.extensions.loader_check.tables import Lake

BATCH = 16
_ROW_GROUP = 20
_FILES = 16
_VALIDATION_ROWS = 64
WORLDS = (2, 2, 4, 4, 2, 2, 2, 1, 1, 2, 2, 2, 4, 2, 2, 2, 2, 1, 2, 2, 2)
"""Ranks of each launch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Method:
    """A way to resume."""

    name: str
    loader: str
    environment: Environment
    keeps_state: bool = True
    calm: str = ""
    """Method whose undisturbed training is the same. Empty: its own."""


METHODS = {
    "dlac": Method(name="DLAC, training_run of one rank", loader="training_run", environment=environments.OWN),
    "dlac_dataset": Method(name="DLAC, dataset alone", loader="dlac", environment=environments.OWN, calm="dlac"),
    "stateful": Method(name="StatefulDataLoader", loader="torchdata", environment=environments.SHARED),
    "hf": Method(name="HF datasets, state_dict", loader="hf_parquet", environment=environments.SHARED),
    "restart": Method(
        name="restart at the epoch's start",
        loader="torchdata",
        environment=environments.SHARED,
        keeps_state=False,
        calm="stateful",
    ),
    "deepspeed": Method(name="DeepSpeed's own loader", loader="deepspeed", environment=environments.OWN),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """How often the rows are read, by how many ranks, and by which methods."""

    name: str
    passes: int
    shuffle: bool
    worlds: tuple[int, ...] = WORLDS
    methods: tuple[str, ...] = tuple(METHODS)
    calm: str = ""
    """Setting whose table and undisturbed trainings are the same. Empty: its own."""


SETTINGS = {
    each.name: each
    for each in (
        Setting(name="stream", passes=1, shuffle=False),
        Setting(name="passes", passes=5, shuffle=True),
        Setting(
            name="fixed",
            passes=1,
            shuffle=False,
            worlds=(WORLDS[0],) * len(WORLDS),
            methods=("dlac_dataset", "stateful", "hf"),
            calm="stream",
        ),
    )
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Effort:
    """Amount of measurement."""

    seeds: int
    steps: int
    faults: int
    settings: tuple[Setting, ...]
    save_every: int = 8
    evaluate_every: int = 24


QUICK = Effort(seeds=1, steps=160, faults=10, settings=(SETTINGS["stream"],))
FULL = Effort(seeds=5, steps=240, faults=20, settings=tuple(SETTINGS.values()))


@dataclass(kw_only=True, slots=True)
class Outcome:
    """What one training did."""

    setting: str
    method: str
    seed: int
    faulted: bool
    failed: str = "it was not run"
    seconds: float = 0.0
    trained: int = 0
    """Steps of the surviving lineage."""
    computed: int = 0
    """Steps that were computed, with those that were lost."""
    repeated: int = 0
    missing: int = 0
    losses: dict[int, float] = field(default_factory=dict)
    validation: dict[int, float] = field(default_factory=dict)
    exact: bool | None = None
    """What the audit of DLAC's run says."""

    @classmethod
    def from_json(cls, raw: dict[str, Any]) -> Outcome:
        """Return the outcome of its JSON, in which the steps are texts."""
        curves = {name: {int(step): loss for step, loss in raw[name].items()} for name in ("losses", "validation")}
        return cls(**{**raw, **curves})

    @property
    def final(self) -> float:
        """The last validation loss."""
        return self.validation[max(self.validation)]


def measure(effort: Effort, scratch: Path, *, processes: int = 2) -> list[Outcome]:
    """Train everything, `processes` at a time. A training that fails is an outcome with its reason."""
    lake = Lake(scratch / "lake")
    work: queue.Queue[tuple[Method, Training, Outcome]] = queue.Queue()
    chosen = [each for setting in effort.settings for each in _trainings(effort, setting, lake, scratch / setting.name)]
    outcomes = [outcome for _, _, outcome in chosen]
    missing = _install({method.environment for method, _, _ in chosen})
    for training in sorted(chosen, key=lambda each: not each[2].faulted):  # the longest first
        method, _, outcome = training
        if method.environment in missing:
            outcome.failed = missing[method.environment]
        else:
            work.put(training)
    threads = [threading.Thread(target=_work, args=(work, lake, scratch / f"process-{n}")) for n in range(processes)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcomes


def _install(wanted: set[Environment]) -> dict[Environment, str]:
    """Make the environments that are missing. Return why some cannot be made."""
    failed = {}
    for environment in wanted:
        try:
            environments.python_of(environment)
        except LoaderFailed as err:
            failed[environment] = str(err)
    return failed


def _trainings(
    effort: Effort, setting: Setting, lake: Lake, folder: Path
) -> Iterator[tuple[Method, Training, Outcome]]:
    folder.mkdir(parents=True)
    np.save(folder / "validation.npy", text.validation_rows(_VALIDATION_ROWS, LENGTH))
    rows = effort.steps * BATCH // setting.passes
    table = setting.calm or _make_table(lake, setting.name, rows)
    faults = fault_steps(effort.steps, effort.faults)
    for seed in range(effort.seeds):
        for key in setting.methods:
            method = METHODS[key]
            for faulted in (True,) if method.calm or setting.calm else (False, True):
                name = f"{setting.name}-{key}-{seed}-{'faults' if faulted else 'calm'}"
                (folder / name).mkdir()
                job = Job(
                    home=str(lake.home), catalog=lake.catalog, table=f"{tables.NAMESPACE}.{table}", files=lake.files(table),
                    own_format="", rows=rows, sequence=LENGTH, batch_size=BATCH, world_size=1, rank=0, workers=0, seed=seed,
                    shuffle=setting.shuffle, filtered=False, packed=False, passes=setting.passes, log="", load="", save="",
                    save_at=[], stop_at=0, stop_after_pass=False, die_at=0,
                )  # fmt: skip
                training = Training(
                    loader=method.loader, keeps_state=method.keeps_state, job=job, folder=str(folder / name), seed=seed,
                    steps=effort.steps, save_every=effort.save_every, evaluate_every=effort.evaluate_every,
                    faults=faults if faulted else (), worlds=setting.worlds[: len(faults) + 1 if faulted else 1],
                )  # fmt: skip
                yield method, training, Outcome(setting=setting.name, method=key, seed=seed, faulted=faulted)


def fault_steps(steps: int, faults: int) -> tuple[int, ...]:
    """Return the steps of the faults, in order. They are the same for every method and seed."""
    drawn = np.random.default_rng(20).choice(np.arange(10, steps), size=faults, replace=False)
    return tuple(sorted(int(step) for step in drawn))


def _make_table(lake: Lake, name: str, rows: int) -> str:
    tokens = text.training_rows(rows, LENGTH)
    bounds = np.linspace(0, rows, _FILES + 1).astype(int)
    lake.create(
        name,
        [tables.token_rows(int(low), tokens[low:high]) for low, high in pairwise(bounds)],
        _ROW_GROUP,
    )
    return name


def _work(work: queue.Queue[tuple[Method, Training, Outcome]], lake: Lake, folder: Path) -> None:
    """Train what is left, in one process per environment."""
    folder.mkdir()
    with _trainers(folder) as ask:
        while True:
            try:
                method, training, outcome = work.get_nowait()
            except queue.Empty:
                return
            try:
                answer = ask(method.environment, training)
                outcome.failed, outcome.seconds = answer["failed"], answer["seconds"]
                if not outcome.failed:
                    _account(training, outcome)
                    if training.loader == "training_run":
                        outcome.exact = audit_run(lake.lakehouse, run_name(training)).exact
            except Exception as err:  # one training must not end the others
                outcome.failed = f"{type(err).__name__}: {err}"
            print(json.dumps(_line(outcome)), flush=True)


@contextmanager
def _trainers(folder: Path) -> Iterator[Any]:
    started: dict[str, subprocess.Popen[str]] = {}

    def ask(environment: Environment, training: Training) -> dict[str, Any]:
        process = started.get(environment.folder)
        if process is not None and process.poll() is not None:
            _end(started.pop(environment.folder))
            process = None
        if process is None:
            process = started[environment.folder] = _start(environment, folder)
        file = folder / "training.json"
        training.write(file)
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(f"{file}\n")
        process.stdin.flush()
        line = process.stdout.readline()
        if not line:
            raise RuntimeError(f"expected an answer of the trainer, found its end with status {process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    try:
        yield ask
    finally:
        for process in started.values():
            _end(process)


def _end(process: subprocess.Popen[str]) -> None:
    """Close the pipes of a trainer, which tells it to end, and wait for it."""
    with suppress(BrokenPipeError):
        process.communicate()


def _start(environment: Environment, folder: Path) -> subprocess.Popen[str]:
    """Start a trainer with the interpreter of an environment."""
    errors = (folder / f"{environment.folder.strip('.')}.log").open("w")
    with errors:
        return subprocess.Popen(
            [str(environments.python_of(environment)), "-m", "benchmarks.paper_parts.trainer"],
            env=environments.environment_of(folder),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )


def _account(training: Training, outcome: Outcome) -> None:
    """Read the log of a training: of each step, what was trained last."""
    entries = [json.loads(line) for line in training.log.read_text().splitlines()]
    kept = {entry["step"]: entry for entry in entries}
    outcome.computed = len(entries)
    outcome.trained = len(kept)
    outcome.losses = {step: entry["loss"] for step, entry in kept.items()}
    outcome.validation = {step: entry["validation"] for step, entry in kept.items() if "validation" in entry}
    seen = Counter(row for entry in kept.values() for row in entry["ids"])
    passes = training.job.passes
    outcome.repeated = sum(max(0, times - passes) for times in seen.values())
    outcome.missing = sum(max(0, passes - seen[row]) for row in range(training.job.rows))


def _line(outcome: Outcome) -> dict[str, Any]:
    about = f"{outcome.setting} {outcome.method} seed {outcome.seed}{' faults' if outcome.faulted else ''}"
    if outcome.failed:
        return {"training": about, "failed": outcome.failed}
    return {
        "training": about, "validation": round(outcome.final, 5), "repeated": outcome.repeated, "missing": outcome.missing,
        "steps": outcome.trained, "computed": outcome.computed, "seconds": round(outcome.seconds, 1),
    }  # fmt: skip


def distance(outcome: Outcome, calm: Outcome) -> float:
    """Return the mean distance of two validation curves, over the steps at which both were evaluated."""
    return float(
        np.mean(
            [abs(loss - calm.validation[step]) for step, loss in outcome.validation.items() if step in calm.validation]
        )
    )


def loss_distance(outcome: Outcome, calm: Outcome) -> float:
    """Return the mean distance of two curves of training losses, as a share of the loss."""
    steps = outcome.losses.keys() & calm.losses.keys()
    return float(np.mean([abs(outcome.losses[step] - calm.losses[step]) / calm.losses[step] for step in sorted(steps)]))


def same(outcome: Outcome, other: Outcome) -> bool:
    """Return whether two trainings had the same losses, bit by bit."""
    return outcome.losses == other.losses and outcome.validation == other.validation
