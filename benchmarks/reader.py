"""One rank's tokens per second against raw pyarrow decoding: `python -m benchmarks.reader [--quick] [--only KIND,...]`.

Columns of tokens as lists (512 int32), as fixed bytes (512 uint16) and as text (tokenized during the read and packed), in the
table's order and shuffled. The other side decodes the same column of the same row groups in as many threads, and discards
it. For text it also tokenizes, and lays the tokens out as [n, T]. Both sides read a table in the page cache repeatedly,
in alternation: raw, DLAC, raw. The two raw ones against each other are the noise (A/A). A DLAC window begins and ends with
the same amount decoded ahead, so that it has exactly the work for its own batches.

Each ratio is reported twice: tokens per second, and tokens per second of CPU, which a training job without a free core gets. The
bars are for one decoding thread on each side. On two cores the thread that takes the batches then has its own core. With
two decoding threads (`busy`) it has none. Both sides use Arrow's allocator as a rank does, or, with `--own-script`, as a script
does that calls `open_dataset` without settings. Peak memory is that of a separate process, minus its memory before it opened
the reader.
"""

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
from tokenizers import Tokenizer

from benchmarks.figures import Figure, report
from dlac_pipeline.extensions.loader_check.tables import Lake
from dlac_pipeline.plan.legs.choice import first_leg
from dlac_pipeline.plan.plan import Plans
from dlac_pipeline.plan.planner import make_plan
from dlac_pipeline.read.batch import Batch
from dlac_pipeline.read.memory import ALLOCATOR_SETTINGS
from dlac_pipeline.read.opening.open_leg import open_leg
from dlac_pipeline.read.reader import BatchReader
from dlac_pipeline.spec.job_spec import JobSpec, parse_spec
from examples.corpus.tokenizer import save_tokenizer, train_tokenizer

T = 512
"""Tokens of a sequence."""
_VOCABULARY = 50_257
_MEMORY = Path(__file__).parent / "programs" / "reader_memory.py"
Tokens = npt.NDArray[np.int32]


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """A table and its reading: `groups` row groups of `group_rows` rows, `key_groups` and `block_slices` when shuffled."""

    name: str
    groups: int
    group_rows: int
    key_groups: int = 16
    block_slices: int = 4
    batch_size: int = 512
    bars: tuple[str, str] | None = (">= 0.9", ">= 0.8")
    """Bars unshuffled and shuffled, or None if the figure is only stated."""
    cpu_bars: tuple[str, str] | None = (">= 0.8", ">= 0.7")
    """The same bars per second of CPU."""


def kinds(*, quick: bool) -> list[Kind]:
    """Return kinds with row groups of 8 MB decoded (text: 8 MB of UTF-8), and tables of 1 GB (text: 64 MB, as slow to read)."""
    groups = 64 if quick else 128
    return [
        Kind(name="list", groups=groups, group_rows=1024 if quick else 4096),
        Kind(name="fixed", groups=groups, group_rows=2048 if quick else 8192),
        Kind(name="text", groups=8, group_rows=128 if quick else 1024, key_groups=2, block_slices=2, batch_size=64),
        Kind(name="fixed_uniform", groups=groups, group_rows=2048 if quick else 8192, bars=None, cpu_bars=None),
    ]


def main() -> None:
    """Measure every kind, and report."""
    own_script = "--own-script" in sys.argv
    if not own_script and not ALLOCATOR_SETTINGS.items() <= os.environ.items():  # read when the library is loaded
        os.execve(
            sys.executable, [sys.executable, "-m", "benchmarks.reader", *sys.argv[1:]], os.environ | ALLOCATOR_SETTINGS
        )
    parser = argparse.ArgumentParser()
    parser.add_argument("--own-script", action="store_true", help="leave Arrow's allocator as it is")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", default="")
    parser.add_argument("--pairs", type=int, default=10)
    arguments = parser.parse_args()
    figures: dict[str, Figure] = {}
    for kind in kinds(quick=arguments.quick):
        if arguments.only and kind.name not in arguments.only.split(","):
            continue
        with tempfile.TemporaryDirectory(prefix="dlac-reader-") as home:
            build(Path(home), kind)
            for shuffle in (False, True):
                for threads in (1, 2):
                    figures |= _compare(Path(home), kind, shuffle=shuffle, threads=threads, pairs=arguments.pairs)
                figures |= _memory(Path(home), kind, shuffle=shuffle)
    figures["load_average_1min"] = Figure(value=os.getloadavg()[0], unit="processes")
    report("reader", figures)


# Tables


def build(home: Path, kind: Kind) -> None:
    """Make the table of a kind, in files of 8 row groups, and a tokenizer for text."""
    tables = _texts(home, kind) if kind.name == "text" else _token_tables(kind)
    Lake(home).create(kind.name, list(tables), kind.group_rows)


def _token_tables(kind: Kind) -> Iterator[pa.Table]:
    random = np.random.default_rng(0)
    pool = _token_pool(random, uniform=kind.name == "fixed_uniform")
    rows = 8 * kind.group_rows
    for first in range(0, kind.groups * kind.group_rows, rows):
        starts = random.integers(0, len(pool) - T, size=rows)
        yield _as_table(kind.name, first, pool[starts[:, None] + np.arange(T)])


def _token_pool(random: np.random.Generator, *, uniform: bool) -> Tokens:
    """Return tokens with the frequencies of words (Zipf-Mandelbrot), or uniform ones, which cannot be compressed."""
    size = 2**23
    if uniform:
        return random.integers(0, 2**16, size=size, dtype=np.int32)
    frequency = 1 / (np.arange(_VOCABULARY) + 2.7)
    ranks = np.searchsorted(np.cumsum(frequency) / frequency.sum(), random.random(size))
    return random.permutation(_VOCABULARY).astype(np.int32)[np.minimum(ranks, _VOCABULARY - 1)]


def _as_table(kind: str, first: int, tokens: Tokens) -> pa.Table:
    row_id = pa.array(np.arange(first, first + len(tokens), dtype=np.int64))
    if kind == "list":
        offsets = pa.array(np.arange(len(tokens) + 1, dtype=np.int32) * T)
        column: pa.Array = pa.ListArray.from_arrays(offsets, pa.array(tokens.reshape(-1)))
    else:
        content = pa.py_buffer(tokens.astype(np.uint16))
        column = pa.FixedSizeBinaryArray.from_buffers(pa.binary(2 * T), len(tokens), [None, content])
    return pa.table({"row_id": row_id, "tokens": column})


def _texts(home: Path, kind: Kind) -> Iterator[pa.Table]:
    """Yield Python's standard library as documents of up to 8 KiB, repeatedly."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    sources = [path.read_text(errors="replace") for path in sorted(folder.glob("*.py"))]
    save_tokenizer(train_tokenizer(sources[:40], 4096), home / "tokenizer.json")
    pieces = [source[at : at + 8192] for source in sources for at in range(0, len(source), 8192)]
    documents = itertools.cycle(pieces)
    rows = 2 * kind.group_rows
    for first in range(0, kind.groups * kind.group_rows, rows):
        texts = list(itertools.islice(documents, rows))
        yield pa.table({"row_id": pa.array(np.arange(first, first + rows)), "tokens": pa.array(texts)})


# Sides


def job(home: Path, kind: Kind, *, shuffle: bool, threads: int = 2) -> JobSpec:
    """Return the job of one rank that only reads the table, repeatedly."""
    order = {"batch_size": kind.batch_size, "key_groups": kind.key_groups, "shuffle": shuffle}
    order["block_slices"] = kind.block_slices
    text = {"length": T, "column": "tokens", "tokenizer": str(home / "tokenizer.json"), "end_token": 0}
    return parse_spec(
        {
            "run": f"{kind.name}-{shuffle}",
            "source": {"table": f"bench.{kind.name}", "columns": ["tokens"]},
            "order": {**order, "passes": 1000},
            "sequences": text if kind.name == "text" else {},
            "read": {"threads": threads},
            "launch": {"script": "none.py"},
        },
        origin="the benchmark",
    ).resolved(home)


def open_reader(home: Path, kind: Kind, *, shuffle: bool, threads: int = 2) -> BatchReader:
    """Return the reader of the only rank."""
    spec = job(home, kind, shuffle=shuffle, threads=threads)
    lakehouse = Lake(home).lakehouse
    leg = first_leg(spec, [make_plan(lakehouse, spec.source)])
    return open_leg(Plans(lakehouse), leg, spec).reader()


class Dlac:
    """The reader, in windows of batches."""

    def __init__(self, reader: BatchReader, kind: Kind) -> None:
        self._reader = reader
        self._kind = kind
        self._batches = iter(reader)
        self._seen = 0

    def warm_up(self, groups: int) -> None:
        """Read as much as this many row groups hold."""
        self.window(groups)

    def window(self, groups: int) -> int:
        """Read as much as this many row groups hold, and return its tokens."""
        self._seen = 0
        if self._kind.name == "text":
            return self._documents(groups)
        for batch in itertools.islice(self._batches, groups * self._kind.group_rows // self._kind.batch_size):
            self._seen += _tokens_of(batch)
        self._reader.prefetch.settle()
        return self._seen

    def _documents(self, groups: int) -> int:
        rows = 0
        while rows < groups * self._kind.group_rows:
            batch = next(self._batches)
            self._seen += _tokens_of(batch)
            rows += sum(advance.rows_consumed for _, _, advance in batch.moved)
        self._reader.prefetch.settle()
        return self._seen


def _tokens_of(batch: Batch) -> int:
    found = batch["tokens"]
    return found.numel() // (2 if found.element_size() == 1 else 1)


class Raw:
    """Row groups of the table's files, decoded in threads and discarded."""

    def __init__(self, files: list[str], tokenizer: Tokenizer | None, threads: int) -> None:
        groups = [(file, group) for file in files for group in range(pq.read_metadata(file).num_row_groups)]
        self._groups = itertools.cycle(groups)
        self._pool = ThreadPoolExecutor(threads)
        self._local = threading.local()
        self._tokenizer = tokenizer

    def window(self, groups: int) -> int:
        """Decode the next row groups, and return their tokens."""
        chosen = itertools.islice(self._groups, groups)
        return sum(self._pool.map(lambda place: self._decode(*place), chosen))

    def _decode(self, file: str, group: int) -> int:
        opened: dict[str, pq.ParquetFile] = self._local.__dict__
        if file not in opened:
            opened[file] = pq.ParquetFile(file)
        column = opened[file].read_row_group(group, columns=["tokens"], use_threads=False)["tokens"].chunk(0)
        if self._tokenizer is not None:
            return _laid_out(self._tokenizer, column)
        if pa.types.is_fixed_size_binary(column.type):
            return len(np.frombuffer(column.buffers()[1], np.uint16))
        return len(column.flatten().to_numpy(zero_copy_only=True))


def _laid_out(tokenizer: Tokenizer, texts: Any) -> int:
    encoded = tokenizer.encode_batch_fast(texts.to_pylist(), add_special_tokens=False)
    parts = [np.array([*encoding.ids, 0], dtype=np.int32) for encoding in encoded]
    tokens = np.concatenate(parts)
    sequences = tokens[: len(tokens) // T * T].reshape(-1, T)
    return sequences.size


# Measuring


@dataclass(frozen=True, slots=True)
class _Rate:
    """Tokens per second of wall clock and of CPU."""

    wall: float
    cpu: float


def _rate(window: Callable[[int], int], groups: int) -> _Rate:
    wall, cpu = time.perf_counter(), time.process_time()
    tokens = window(groups)
    return _Rate(tokens / (time.perf_counter() - wall), tokens / (time.process_time() - cpu))


def _compare(home: Path, kind: Kind, *, shuffle: bool, threads: int, pairs: int) -> dict[str, Figure]:
    tokenizer = Tokenizer.from_file(str(home / "tokenizer.json")) if kind.name == "text" else None
    raw = Raw(Lake(home).files(kind.name), tokenizer, threads)
    # One block of every key group: then all of them have the same position in their blocks as before.
    window = kind.key_groups * (kind.block_slices if shuffle else 1)
    if not shuffle:
        window = max(window, kind.groups // 2)
    rates: list[tuple[_Rate, _Rate, _Rate]] = []
    with closing(open_reader(home, kind, shuffle=shuffle, threads=threads)) as reader:
        ours = Dlac(reader, kind)
        ours.warm_up(window)
        raw.window(kind.groups)  # the page cache
        waited_s = reader.prefetch.waited_s
        inside = 0.0
        for _ in range(pairs):
            first = _rate(raw.window, window)
            begun = time.perf_counter()
            mine = _rate(ours.window, window)
            inside += time.perf_counter() - begun
            rates.append((first, mine, _rate(raw.window, window)))
        waited = (reader.prefetch.waited_s - waited_s) / inside
        counted = reader.prefetch.peak_bytes
    ratios = [round(mine.wall / first.wall, 3) for first, mine, _ in rates]
    print(json.dumps({"kind": kind.name, "shuffle": shuffle, "threads": threads, "window_groups": window,
                      "loadavg": os.getloadavg(), "ratios": ratios}), flush=True)  # fmt: skip
    tag = f"{kind.name}_{'shuffled' if shuffle else 'in_order'}{'_busy' if threads > 1 else ''}"
    same = np.array([again.wall / first.wall for first, _, again in rates])
    bar = kind.bars[shuffle] if kind.bars and threads == 1 else None
    cpu_bar = kind.cpu_bars[shuffle] if kind.cpu_bars and threads == 1 else None
    return {
        f"{tag}_over_raw": Figure(
            value=_median(2 * m.wall / (f.wall + a.wall) for f, m, a in rates), unit="ratio", bar=bar
        ),
        f"{tag}_over_raw_cpu": Figure(
            value=_median(2 * m.cpu / (f.cpu + a.cpu) for f, m, a in rates), unit="ratio of CPU seconds", bar=cpu_bar
        ),
        f"{tag}_raw_over_raw_spread": Figure(value=float(np.ptp(np.quantile(same, [0.25, 0.75]))), unit="ratio"),
        f"{tag}_mtokens_per_s": Figure(value=_median(m.wall / 1e6 for _, m, _ in rates), unit="million tokens/s"),
        f"{tag}_raw_mtokens_per_s": Figure(value=_median(f.wall / 1e6 for f, _, _ in rates), unit="million tokens/s"),
        f"{tag}_waiting_share": Figure(value=100 * waited, unit="% of the reader's time"),
        f"{tag}_counted_peak_mb": Figure(value=counted / 2**20, unit="MiB"),
    }


def _median(values: Iterator[float]) -> float:
    return statistics.median(values)


def _memory(home: Path, kind: Kind, *, shuffle: bool) -> dict[str, Figure]:
    """Return peak resident memory minus the process's memory before it opened the reader."""
    command = [sys.executable, str(_MEMORY), str(home), kind.name, str(int(shuffle)), str(kind.group_rows)]
    root = str(Path(__file__).parent.parent)
    done = subprocess.run(
        command, check=True, capture_output=True, text=True, cwd=root, env={**os.environ, "PYTHONPATH": root}
    )
    measured = json.loads(done.stdout.splitlines()[-1])
    tag = f"{kind.name}_{'shuffled' if shuffle else 'in_order'}"
    budget = job(home, kind, shuffle=shuffle).read.budget_mb
    return {f"{tag}_peak_memory_mb": Figure(value=measured["peak_bytes"] / 2**20, unit="MiB", bar=f"<= {budget}")}


if __name__ == "__main__":
    main()
