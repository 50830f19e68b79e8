"""The scenarios of a loader, run in its process. They give the rows repeated and the rows missing."""

import contextlib
import dataclasses
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from dlac_pipeline.extensions.loader_check import tables
from dlac_pipeline.extensions.loader_check.client import LoaderEnded, LoaderFailed, LoaderProcess, LoaderTooSlow
from dlac_pipeline.extensions.loader_check.protocol import KINDS, Job
from dlac_pipeline.extensions.loader_check.row_log import Ids, Record, read_records
from dlac_pipeline.extensions.loader_check.tables import Lake

BATCH = 32  # samples in a global batch
LIMIT_S = 90.0
"""Time for one launch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Scenario:
    """A run in several launches with `worlds[i]` ranks, saved and ended at `saves[i]` of the expected steps."""

    name: str
    description: str
    worlds: tuple[int, ...] = (2, 2)
    saves: tuple[float, ...] = (0.4,)
    change: str = ""  # to the table, after the first launch
    kill: bool = False
    shuffle: bool = False
    filtered: bool = False
    packed: bool = False
    uneven: bool = False
    passes: int = 1
    between: bool = False  # saved and ended when the loader has ended the first pass, instead of after a step

    def refusal(self, not_offered: dict[str, str]) -> str | None:
        """Return why a loader does not offer this. One without a shuffle has no shuffled scenario."""
        return not_offered.get(self.name, not_offered.get("shuffle") if self.shuffle else None)


SCENARIOS = [
    Scenario(
        name="tail",
        description="one pass, 4 ranks, rows not a multiple of the batch",
        worlds=(4,),
        saves=(),
        uneven=True,
    ),
    Scenario(name="kill", description="SIGKILL with prefetch in flight, state saved every 7 steps", kill=True),
    Scenario(name="resize_2_4", description="2 ranks, then 4", worlds=(2, 4)),
    Scenario(name="resize_4_2_1", description="4 ranks, then 2, then 1", worlds=(4, 2, 1), saves=(0.3, 0.6)),
    Scenario(name="resize_shuffle", description="2 ranks, then 4, shuffled", worlds=(2, 4), shuffle=True),
    Scenario(name="append", description="rows appended between save and resume", change="append"),
    Scenario(name="delete", description="rows deleted between save and resume", change="delete"),
    Scenario(name="compact", description="files compacted between save and resume", change="compact"),
    Scenario(name="twice", description="resumed twice", worlds=(2, 2, 2), saves=(0.3, 0.6)),
    Scenario(name="second_pass", description="resumed in the second pass", saves=(1.4,), passes=2),
    Scenario(
        name="second_pass_shuffled",
        description="resumed in the second pass, shuffled",
        saves=(1.4,),
        passes=2,
        shuffle=True,
    ),
    Scenario(name="pass_boundary", description="resumed after the last step of a pass", saves=(1.0,), passes=2),
    Scenario(
        name="between_passes",
        description="resumed between two passes, shuffled",
        saves=(),
        passes=2,
        shuffle=True,
        between=True,
    ),
    Scenario(name="shuffle", description="shuffle on", shuffle=True),
    Scenario(name="filter", description="row filter on", filtered=True, worlds=(1, 1)),
    Scenario(name="packing", description="documents packed to sequences", packed=True, worlds=(1, 1)),
]


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """Amount of data of the scenarios."""

    files: int
    groups: int  # row groups in a file
    group_rows: int
    sequence: int

    @property
    def rows(self) -> int:
        """Rows in all."""
        return self.files * self.groups * self.group_rows


@dataclass(kw_only=True, slots=True)
class Count:
    """Counts of repeated and missing rows."""

    repeated: int
    missing: int
    left_out: int = 0  # rows that the filter leaves out, and that were read
    appended_read: int | None = None
    one_order: bool = False  # True if both passes have the same order
    order_lost: bool = False  # True if that is so only because of the resume
    with_workers: str = ""  # why it fails with workers, if the count is that without
    uninterrupted: tuple[int, int] | None = None  # the count without resume, change or kill, only if rows are missing

    @property
    def exact(self) -> bool:
        """True if every row, and no other, was read once, and no resume began a pass in the order of the first one."""
        return not self.repeated and not self.missing and not self.left_out and not self.order_lost

    @property
    def remarks(self) -> list[str]:
        """Facts without which the counts would mislead."""
        found = [f"without workers; with them: {self.with_workers}"] if self.with_workers else []
        if self.left_out:
            found.append(f"read {self.left_out:,} rows that the filter leaves out")
        if self.order_lost:
            found.append("the resumed pass has the order of the first one; without the resume it has another")
        if self.uninterrupted not in (None, (0, 0)):
            found.append("uninterrupted: {} / {}".format(*self.uninterrupted or ()))
        return found


@dataclass(slots=True)
class Bench:
    """Scenarios of a loader. A scenario that changes the table has a copy."""

    host: LoaderProcess
    lake: Lake
    size: Size
    scratch: Path
    workers: int = 2
    limit_s: float = LIMIT_S
    other: LoaderProcess | None = None
    """Process of every second launch, so that a restart has another seed of hashes and another import of the loader."""
    copies: dict[str, str] = field(default_factory=dict)  # table -> folder of the loader's own copy
    converted: list[dict[str, float]] = field(default_factory=list)
    relaunched: list[str] = field(default_factory=list)  # launches that failed and were started again
    _whole: dict[Scenario, Count] = field(default_factory=dict)

    def run(self, scenario: Scenario) -> Count:
        """Run all launches of a scenario, and count the rows of its surviving lineage.

        Raises:
            LoaderFailed: the loader does not finish it.
        """
        table = self.table(scenario)
        records: list[Record] = []
        for launch, world in enumerate(scenario.worlds):
            if launch == 1 and scenario.change:
                self._change(scenario.change, table)
                self.copies.pop(table, None)
            records += self._launch(scenario, table, launch, world)
        return self._count_rows(scenario, records)

    def uninterrupted(self, scenario: Scenario) -> Count:
        """Run the scenario in one launch, on an unchanged table."""
        whole = dataclasses.replace(
            scenario,
            name="whole",
            description="",
            worlds=scenario.worlds[:1],
            saves=(),
            change="",
            kill=False,
            between=False,
        )
        if whole not in self._whole:
            self._whole[whole] = self.run(whole)
        return self._whole[whole]

    def _launch(self, scenario: Scenario, table: str, launch: int, world: int) -> list[Record]:
        stop = round(scenario.saves[launch] * self.steps(scenario)) if launch < len(scenario.saves) else 0
        jobs = [self.job(scenario, table, launch=launch, world=world, rank=rank, stop=stop) for rank in range(world)]
        for job in jobs:
            Path(job.log).unlink(missing_ok=True)
        host = self.other if self.other and launch % 2 else self.host
        try:
            host.consume(jobs, self.limit_s)
        except (LoaderEnded, LoaderTooSlow):
            raise
        except LoaderFailed as err:  # once more, as any supervisor of a training does
            self.relaunched.append(f"{scenario.name}: {err}")
            for job in jobs:
                Path(job.log).unlink(missing_ok=True)
            host.consume(jobs, self.limit_s)
        if not stop:
            return [record for job in jobs for record in _records(job)]
        kept = max(step for step in jobs[0].save_at if step <= (jobs[0].die_at or stop))
        return [record for job in jobs for record in _records(job) if record.step <= kept]

    def job(self, scenario: Scenario, table: str, *, launch: int, world: int, rank: int, stop: int) -> Job:
        """Return the job of rank `rank` of `world` in a launch that ends after step `stop` (0: at its end)."""
        folder = self.scratch / f"{self.host.name}-{scenario.name}"
        folder.mkdir(exist_ok=True)
        before = scenario.worlds[launch - 1] if launch else 0
        source = 0 if self.host.about["shared_state"] or not before else rank % before
        saves = list(range(7, stop + 1, 7)) if scenario.kill else [stop]
        job = Job(
            home=str(self.lake.home),
            catalog=self.lake.catalog,
            table=f"{tables.NAMESPACE}.{table}",
            files=self.lake.files(table),
            own_format="",
            rows=self.size.rows,
            sequence=self.size.sequence,
            batch_size=BATCH,
            world_size=world,
            rank=rank,
            workers=self.workers,
            seed=17,
            shuffle=scenario.shuffle,
            filtered=scenario.filtered,
            packed=scenario.packed,
            passes=scenario.passes,
            log=str(folder / f"log-{launch}-{rank}"),
            load=str(folder / f"state-{launch - 1}-{source}") if launch else "",
            save=str(folder / f"state-{launch}-{rank}"),
            save_at=saves if stop else [],
            stop_at=0 if scenario.kill else stop,
            stop_after_pass=scenario.between and not launch,
            die_at=stop if scenario.kill else 0,
        )
        return dataclasses.replace(job, own_format=self._copy(job, table))

    def _copy(self, job: Job, table: str) -> str:
        """Return the loader's own copy of the table, and make it if it is missing."""
        folder = self.scratch / f"{self.host.name}-copy-{table}"
        if self.host.about["converts"] and table not in self.copies:
            job = dataclasses.replace(job, own_format=str(folder), log=f"{folder}.log", die_at=0)
            self.converted.append(self.host.convert(job, self.limit_s))
            self.copies[table] = str(folder)
        return str(folder)

    def steps(self, scenario: Scenario) -> int:
        """Return the steps of one pass."""
        if scenario.packed:
            return int(self._starts[-1]) // (self.size.sequence * BATCH)
        return self.size.rows // (2 if scenario.filtered else 1) // BATCH

    @property
    def _starts(self) -> Ids:
        return tables.document_starts(self.size.rows, self.size.sequence)

    def table(self, scenario: Scenario) -> str:
        """Return the table of a scenario. Unchanged tables are shared."""
        name = "uneven" if scenario.uneven else "documents" if scenario.packed else "plain"
        if scenario.change:
            name = f"{scenario.change}_{self.host.name}_{self.workers}"
        if self.lake.lakehouse.catalog.table_exists(f"{tables.NAMESPACE}.{name}"):
            return name
        in_file = self.size.groups * self.size.group_rows
        bounds = [(file * in_file, (file + 1) * in_file) for file in range(self.size.files)]
        if scenario.uneven:
            bounds[-1] = (bounds[-1][0], bounds[-1][1] - 13)
        if scenario.packed:
            batches = [tables.packable(begin, end, self._starts) for begin, end in bounds]
        else:
            batches = [tables.sequences(begin, end, self.size.sequence) for begin, end in bounds]
        self.lake.create(name, batches, self.size.group_rows)
        return name

    def _change(self, change: str, table: str) -> None:
        rows = self.size.rows
        if change == "append":
            for begin in (rows, rows + rows // 8):  # two files, so that the number of ranks still divides that of files
                self.lake.append(table, tables.sequences(begin, begin + rows // 8, self.size.sequence))
        elif change == "delete":
            self.lake.delete(table, *self._deleted)
        else:
            self.lake.compact(table)

    @property
    def _deleted(self) -> tuple[int, int]:
        return self.size.rows // 2 + 8, self.size.rows // 2 + 8 + 8 * BATCH

    def _count_rows(self, scenario: Scenario, records: list[Record]) -> Count:
        rows = self.size.rows - (13 if scenario.uneven else 0)
        expected = np.ones(rows, bool)
        if scenario.filtered:
            expected = np.arange(rows) * 7 % KINDS < KINDS // 2
        if scenario.change == "delete":
            expected[slice(*self._deleted)] = False  # a pinned run may still read them, another need not
        total = Count(repeated=0, missing=0)
        passes = [_ids_of_pass(records, number) for number in range(scenario.passes)]
        total.one_order = len(passes) > 1 and all(np.array_equal(passes[0], each) for each in passes)
        for ids in passes:
            limit = self._id_limit(scenario)
            if len(ids) and ids.max() >= limit:
                name = "numbers of tokens" if scenario.packed else "a row_id"
                raise LoaderFailed(f"expected {name} below {limit}, found {ids.max()}: return those of the given rows")
            count = self._pass(scenario, ids, expected)
            total.repeated += count.repeated
            total.missing += count.missing
            total.left_out += count.left_out
            total.appended_read = count.appended_read
        return total

    def _id_limit(self, scenario: Scenario) -> int:
        rows = self.size.rows + (2 * (self.size.rows // 8) if scenario.change == "append" else 0)
        return int(self._starts[-1]) if scenario.packed else rows

    def _pass(self, scenario: Scenario, ids: Ids, expected: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> Count:
        if scenario.packed:  # ids are those of tokens: a row is repeated, or missing, with any token of it
            times = np.bincount(ids, minlength=int(self._starts[-1]))
            most = np.maximum.reduceat(times, self._starts[:-1])
            least = np.minimum.reduceat(times, self._starts[:-1])
            return Count(repeated=int((most > 1).sum()), missing=int((least == 0).sum()))
        times = np.bincount(ids, minlength=len(expected))
        left_out = int((times[: len(expected)] * ~expected).sum()) if scenario.filtered else 0
        repeated = int(np.maximum(times - 1, 0).sum())
        missing = int((expected & (times[: len(expected)] == 0)).sum())
        appended = int((times[len(expected) :] > 0).sum()) if scenario.change == "append" else None
        return Count(repeated=repeated, missing=missing, left_out=left_out, appended_read=appended)


def _ids_of_pass(records: list[Record], number: int) -> Ids:
    """Return the ids of a pass without padding: the first rank's in their order, then the next rank's."""
    ids = np.concatenate([record.ids for record in records if record.pass_number == number] or [np.empty(0, int)])
    return ids[ids >= 0]


def _records(job: Job) -> list[Record]:
    return read_records(Path(job.log).read_bytes())


def run_and_count(bench: Bench, scenario: Scenario) -> Count:
    """Run a scenario and count its rows. If that shows a problem, also run it uninterrupted. Raises `LoaderFailed`."""
    count = bench.run(scenario)
    in_doubt = scenario.shuffle and count.one_order
    if (not count.exact or in_doubt) and len(scenario.worlds) > 1:
        with contextlib.suppress(LoaderFailed):  # the counts hold without it
            whole = bench.uninterrupted(scenario)
            count.uninterrupted = (whole.repeated, whole.missing)
            count.order_lost = in_doubt and not whole.one_order
    return count
