"""The record of an exception that ends a rank: the line of the user's code, and the party to blame."""

import json
import runpy
from pathlib import Path
from typing import Any

import pytest

from dlac_pipeline.elastic.ranks.launch_folder import reason_file
from dlac_pipeline.elastic.ranks.rank import LAUNCH_VARIABLE, RESERVED_BYTES, leave_reason
from dlac_pipeline.elastic.ranks.script_errors import describe_exception


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The record of rank 0, with its bytes reserved as at the start of a rank."""
    monkeypatch.setenv(LAUNCH_VARIABLE, str(tmp_path))
    monkeypatch.setenv("RANK", "0")
    file = reason_file(tmp_path, 0)
    file.write_bytes(b" " * RESERVED_BYTES)
    return file


def fail(folder: Path, statement: str) -> BaseException:
    """Run a script of one function that ends with an exception, and return the exception."""
    script = folder / "train.py"
    script.write_text(f"import errno, json, os, requests, socket, sys\ndef train():\n    {statement}\n\ntrain()\n")
    with pytest.raises(BaseException) as found:  # noqa: PT011 - also those that end a process
        runpy.run_path(str(script), run_name="__main__")
    return found.value


@pytest.mark.parametrize(
    ("statement", "origin"),
    [
        ("raise ValueError('no')", "script"),
        ("raise RuntimeError('CUDA error: device-side assert triggered')", "script"),
        ("raise ConnectionRefusedError(errno.ECONNREFUSED, 'no')", "passing"),
        ("raise OSError(errno.ENOSPC, 'no')", "passing"),
        ("raise RuntimeError('CUDA error: uncorrectable ECC error encountered')", "passing"),
        ("raise OSError('When uploading part: AWS Error NETWORK_CONNECTION during UploadPart: no answer')", "passing"),
        ("raise __import__('urllib.error').error.HTTPError('u', 503, 'm', {}, None)", "passing"),
        ("answer = requests.Response(); answer.status_code = 502; answer.raise_for_status()", "passing"),
        ("raise RuntimeError('[gloo/transport/tcp/pair.cc:534] Connection closed by peer [::1]:9')", "peer"),
        ("from dlac_pipeline.plan.cut import choose_permutation; choose_permutation('three', 1, shuffle=True)", "dlac"),
        ("from dlac_pipeline.lakehouse.errors import Fenced; raise Fenced('no')", ""),
    ],
)
def test_origin_of_exception(tmp_path: Path, statement: str, origin: str) -> None:
    """A transient failure is not taken for a bug, even if the script wraps it."""
    record = describe_exception(fail(tmp_path, statement))
    assert record["origin"] == origin
    assert record["where"] == f"{tmp_path / 'train.py'}:3 in train"
    assert "<frozen" not in record["traceback"]
    assert "line 3, in train" in record["traceback"]


def test_place_ignores_message(tmp_path: Path) -> None:
    """Exceptions of one class from one line are the same, with any message. Another class or line is another exception."""
    statements = ["raise ValueError(1)", "raise ValueError(2)", "raise KeyError(1)", "pass; raise ValueError(1)"]
    places = [describe_exception(fail(tmp_path, each))["place"] for each in statements]
    assert places[0] == places[1] == places[3]
    moved = describe_exception(fail(tmp_path, "pass\n    raise ValueError(1)"))["place"]
    assert len({places[0], places[2], moved}) == 3


@pytest.mark.parametrize(
    "statement",
    [
        "raise ValueError('\\udcff' * 10**4)",
        "raise ExceptionGroup('many', [ValueError('é' * 10**3)] * 50)",
        "train()",
        "raise type('Odd', (Exception,), {'__str__': lambda self: 1 / 0})()",
        "err = ValueError(); err.__context__ = err; raise err",
    ],
)
def test_any_exception_fits_record(tmp_path: Path, file: Path, statement: str) -> None:
    """The record keeps its reserved size, so that it can be written to a full disk, and has the class name."""
    err = fail(tmp_path, statement)
    leave_reason(err)
    record: dict[str, Any] = json.loads(file.read_bytes())
    assert file.stat().st_size == RESERVED_BYTES
    assert record["kind"] == type(err).__name__
    assert record["where"].endswith(":3 in train")
    assert record["detail"] == {}


@pytest.mark.parametrize(
    "statement",
    [
        "raise ValueError('password=' + 'Hun-ter2'.replace('-', '') * 1000)",
        "err = ValueError(); err.detail = {'token': 'Hunter2Hunter2', 'rows': {'token=Hunter2Hunter2'}}; raise err",
        "err = ValueError('x'); err.add_note('token=Hunter2Hunter2'); raise err",
    ],
)
def test_record_shows_no_secret(tmp_path: Path, file: Path, statement: str) -> None:
    """Neither the message, the traceback, the detail nor the place has the secret."""
    leave_reason(fail(tmp_path, statement))
    record = json.loads(file.read_bytes())
    assert "Hunter2" not in json.dumps(record)
    assert "line 3, in train" in record["traceback"] or "* 1000" in statement


def test_first_record_keeps_time(file: Path) -> None:
    """An exception that passes two handlers is recorded once. `sys.exit(0)` is no failure."""
    leave_reason(SystemExit(0))
    leave_reason(SystemExit(None))
    assert not file.read_bytes().strip()
    err = SystemExit("no data")
    leave_reason(err)
    first = file.read_bytes()
    leave_reason(err)
    assert file.read_bytes() == first
    assert json.loads(first)["detail"] == {"status": 1}
