"""Questions about a large ledger: `python -m benchmarks.provenance [--quick] [--units N] [--checkpoints N]`.

The plan has 655,360 row groups of 8,192 rows (10 TB in row groups of 16 MB). 20 runs, 19 of them forked, have 10,000 checkpoints
together, each with a row per key group (1,024) and block. The first run has 81 % of the checkpoints. Units, slices and ledger are
synthetic, and written to a lakehouse. Each question is asked by a fresh process (seconds and peak memory), and again in a process
that has asked it once. The audit is that of the tables: the data files, and so their footers, do not exist. The audit of what
came since is by the record of an audit 100 checkpoints before.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import duckdb

from benchmarks.figures import Figure, report
from dlac_pipeline.audit import audit
from dlac_pipeline.audit.audit import audit_run
from dlac_pipeline.audit.lakehouse_sql import open_audit
from dlac_pipeline.extensions.auditors.record import audit_since
from dlac_pipeline.extensions.erasure.explain import explain_sql
from dlac_pipeline.lakehouse.config import LakehouseConfig
from dlac_pipeline.lakehouse.iceberg.connect import Lakehouse, connect
from dlac_pipeline.lakehouse.ledger.ledger import Ledger
from dlac_pipeline.lakehouse.ledger.typed_rows import CheckpointRow

_ROW_QUESTION = "SELECT run, checkpoint_id, step FROM checkpoints WHERE consumed('{file}', {row}, checkpoint_id)"
_FILE_QUESTION = (
    "SELECT count(*), sum(row) FROM consumed_rows "
    "WHERE run = '{run}' AND file_path = '{file}' AND checkpoint_id = '{checkpoint}'"
)
_SEEN_QUESTION = (
    "SELECT count(*), sum(row) FROM consumed_rows WHERE file_path = '{file}' "
    "AND checkpoint_id IN (SELECT checkpoint_id FROM ancestors('{checkpoint}'))"
)


def main() -> None:
    """Write the lakehouse, ask each question, and report."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--units", type=int, default=655_360)
    parser.add_argument("--checkpoints", type=int, default=10_000)
    parser.add_argument("--home", type=Path, help="A folder for the lakehouse, which is kept and used again.")
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--ask", help="One question, in this process.")
    chosen = parser.parse_args()
    if chosen.ask:
        _ask_here(chosen.home, chosen.ask)
        return
    units, checkpoints = (6_553, 100) if chosen.quick else (chosen.units, chosen.checkpoints)
    with _folder(chosen.home) as home:
        if not (home / "questions.json").exists():
            # processes that ask do without its imports
            from benchmarks.provenance_lakehouse import write_lakehouse

            write_lakehouse(home, units, checkpoints)
        size = json.loads((home / "questions.json").read_text())
        figures = {
            name: Figure(value=size[name], unit=name.replace("_", " ")) for name in ("row_groups", "checkpoints")
        }
        for question in chosen.only or _QUESTIONS:
            figures |= _ask(home, question)
    figures["load_average_1min"] = Figure(value=os.getloadavg()[0], unit="processes")
    report("provenance", figures)


@contextmanager
def _folder(kept: Path | None) -> Iterator[Path]:
    if kept is not None:
        kept.mkdir(parents=True, exist_ok=True)
        yield kept
        return
    with tempfile.TemporaryDirectory(prefix="dlac-provenance-") as folder:
        yield Path(folder)


# The questions


def _ask(home: Path, question: str) -> dict[str, Figure]:
    """Ask a question in a fresh process. Return its seconds, its peak memory, and what it reports."""
    started = time.perf_counter()
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.provenance", "--home", str(home), "--ask", question]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    text = child.stdout.read()
    _, status, used = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        raise subprocess.CalledProcessError(child.returncode, command)
    seconds = time.perf_counter() - started
    last = json.loads(text.splitlines()[-1])
    bars = _BARS.get(question, {})
    found = {
        "cold_s": (seconds - last["again_s"], "s"),
        "warm_s": (last["again_s"], "s"),
        "cold_cpu_s": (used.ru_utime + used.ru_stime - last["again_cpu_s"], "s"),
        "warm_cpu_s": (last["again_cpu_s"], "s"),
        "peak_mb": (used.ru_maxrss / 1024, "MiB"),
    }
    print(json.dumps({"question": question, "answer": last["answer"], "loadavg": os.getloadavg()}), flush=True)
    figures = {
        f"{question}_{name}": Figure(value=value, unit=unit, bar=bars.get(name))
        for name, (value, unit) in found.items()
    }
    print(json.dumps({name: round(figure.value, 3) for name, figure in figures.items()}), flush=True)
    return figures


def _ask_here(home: Path, question: str) -> None:
    """Ask a question twice, and print the seconds of the second time."""
    asked = json.loads((home / "questions.json").read_text())
    lakehouse = connect(LakehouseConfig().at_home(home))
    answer = _QUESTIONS[question](lakehouse, asked)
    started, cpu = time.perf_counter(), time.process_time()
    if question in _TWICE:
        _QUESTIONS[question](lakehouse, asked)
    again = {"again_s": time.perf_counter() - started, "again_cpu_s": time.process_time() - cpu}
    print(json.dumps({"answer": answer, **again}))


def _sql(text: str) -> Callable[[Lakehouse, dict[str, Any]], Any]:
    def ask(lakehouse: Lakehouse, asked: dict[str, Any]) -> Any:
        query = text.format(**asked)
        with open_audit(lakehouse, query=query) as connection:
            found = connection.execute(query).fetchall()
        return [len(found), [str(each) for each in found[0]] if found else None]

    return ask


def _plain(lakehouse: Lakehouse, asked: dict[str, Any]) -> Any:
    """Ask a DuckDB that has the views of `--explain` and nothing else. Its script is written before."""
    folder = Path(lakehouse.config.warehouse.removeprefix("file://")).parent
    script = folder / "explained.sql"
    if not script.exists():
        script.write_text(explain_sql(lakehouse, asked["run"]))
    with duckdb.connect() as connection:
        connection.execute(script.read_text().partition("-- 3. An example")[0])
        return len(connection.execute(_ROW_QUESTION.format(**asked)).fetchall())


def _audit(lakehouse: Lakehouse, asked: dict[str, Any], **more: Any) -> Any:
    audit._file_problems = lambda *_: []  # there are no data files
    report = (audit_since if "record" in more else audit_run)(lakehouse, asked["run"], **more)
    return [report.rows_consumed, report.rows_missing, report.problems, report.recorded_checkpoint]


def _record(lakehouse: Lakehouse, asked: dict[str, Any]) -> Any:
    """Record an audit of the run as it was 100 checkpoints ago."""
    heads = [row.checkpoint_id for row in Ledger(lakehouse).head_rows(asked["run"]) if isinstance(row, CheckpointRow)]
    return _audit(lakehouse, asked, checkpoint=heads[-1 - min(_SINCE, len(heads) // 2)], record=_record_of(lakehouse))


def _audit_since(lakehouse: Lakehouse, asked: dict[str, Any]) -> Any:
    path = _record_of(lakehouse)
    path.with_suffix(".now").write_bytes(path.read_bytes())  # so that it can be asked again
    return _audit(lakehouse, asked, record=path.with_suffix(".now"))


def _record_of(lakehouse: Lakehouse) -> Path:
    return Path(lakehouse.config.warehouse.removeprefix("file://")).parent / "run.audit"


def _status(lakehouse: Lakehouse, asked: dict[str, Any]) -> Any:
    from dlac_pipeline.extensions.look.run_state import run_status

    return run_status(lakehouse, asked["run"])["checkpoints"]


def _claim(lakehouse: Lakehouse, asked: dict[str, Any]) -> Any:
    ledger = Ledger(lakehouse)
    ledger.state(asked["run"])
    return len(ledger.head_rows(asked["run"]))


_QUESTIONS: dict[str, Callable[[Lakehouse, dict[str, Any]], Any]] = {
    "row": _sql(_ROW_QUESTION),
    "file": _sql(_FILE_QUESTION),
    "file_seen": _sql(_SEEN_QUESTION),
    "explain": lambda lakehouse, asked: len(explain_sql(lakehouse, asked["run"])),
    "plain": _plain,
    "status": _status,
    "claim": _claim,
    "audit": _audit,
    "record": _record,
    "audit_since": _audit_since,
}
_SINCE = 100
"""Checkpoints since the recorded audit."""
_TWICE = ("row", "file", "file_seen", "plain", "status", "claim")
_BARS = {
    "row": {"warm_s": "<= 1", "cold_s": "<= 3", "peak_mb": "<= 1024"},
    "file": {"warm_s": "<= 2"},
    "plain": {"warm_s": "<= 1"},
    "audit": {"cold_s": "<= 60", "peak_mb": "<= 2048"},
    "audit_since": {"cold_s": "<= 5"},
    "status": {"warm_s": "<= 1"},
    "claim": {"warm_cpu_s": "<= 0.3"},
    "explain": {"cold_s": "<= 3"},
}

if __name__ == "__main__":
    main()
