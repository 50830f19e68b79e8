"""The doors of tokenizers and of packing: those of this distribution, and another author's, keep one contract."""

from dataclasses import replace
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from dlac_pipeline.lakehouse import doors
from dlac_pipeline.lakehouse.doors import Door
from dlac_pipeline.lakehouse.errors import BadInput, ResumeMismatch
from dlac_pipeline.plan.legs import choice
from dlac_pipeline.plan.plan import Plans
from dlac_pipeline.read import packing
from dlac_pipeline.read.opening.open_leg import open_leg
from dlac_pipeline.spec.job_spec import JobSpec, parse_spec
from tests.contract.runs import Run
from tests.extensions.history.history_lake import Lake
from tests.installed import install_distribution

_BYTES = """
import numpy as np
from dlac_pipeline.read.packing import ItemLine, join_pieces
from dlac_pipeline.read.samples import source_rows

class Bytes:
    digest = "bytes"

    def token_id(self, token):
        return ord(token)

def load(name):
    return Bytes()

class Content:
    def __init__(self, values, rows):
        self.values, self.rows, self.nbytes = values, rows, values.nbytes

class Sequences(ItemLine):
    def _columns(self, pieces, items):
        tokens = join_pieces([each.values[low:high] for each, low, high in pieces]).astype(np.int32)
        whole = np.append(tokens, np.zeros(-items % self._length, np.int32)).reshape(-1, self._length)
        return {name: whole for name in ("tokens", "document", "position")}

class Packing:
    def __init__(self, sequences, tokenizer):
        self.length, self.end = sequences.length, bytes([sequences.end_id])

    def prepare(self, live, positions, *, column, transform, reject, check):
        texts = [text.encode() + self.end for text in live[column].to_pylist()]
        ends = np.cumsum([len(text) for text in texts])
        rows = source_rows(positions, np.arange(len(texts)), (), ends)
        return Content(np.frombuffer(b"".join(texts), np.uint8), rows)

    def line(self, blocks, *, start, drain, close):
        return Sequences(blocks, length=self.length, start=start, drain=drain, close=close)
"""
TEXT_BYTES = sum(len(f"row {k}.") for k in range(16))


def packed(folder: Path, length: int = 7) -> JobSpec:
    """Return a spec of texts in sequences, in which each byte is a token. With length 0 the rows are samples."""
    tokenizer = Tokenizer(models.WordLevel({letter: place for place, letter in enumerate("row .0123456789?")}, "?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.save(str(folder / "tokenizer.json"))
    sequences = {"length": length, "tokenizer": str(folder / "tokenizer.json"), "end_token": "."}
    sections = {
        "source": {"table": "src.t", "columns": ["name" if length else "k"]},
        "sequences": sequences if length else {},
        "order": {"batch_size": 2, "key_groups": 2, "passes": 1},
        "launch": {"script": "x", "world_size": 1},
    }
    return parse_spec({"run": "r", **sections}, origin="the test")


@pytest.fixture(params=["own", "bytes"])
def spec(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> JobSpec:
    """A spec of packed texts, in which each byte is a token."""
    if request.param == "bytes":
        points = {"test.tokenizers": ["fast = of_bytes:load"], "test.packings": ["documents = of_bytes:Packing"]}
        (site := tmp_path / "site").mkdir()
        monkeypatch.syspath_prepend(str(install_distribution(site, "of-bytes", {"of_bytes": _BYTES}, points)))
        monkeypatch.setattr(choice, "TOKENIZERS", Door("test.tokenizers", "tokenizer library"))
        monkeypatch.setattr(packing, "PACKINGS", Door("test.packings", "packing"))
    return packed(tmp_path)


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    """A table of 16 texts."""
    lake = Lake(tmp_path / "home").create("src.t")
    lake.append(*range(16))
    return lake


def test_resumed_run_gives_same_sequences(spec: JobSpec, lake: Lake) -> None:
    """A run that resumes after each step gives the batches of a run without a stop, with each token once."""
    whole = Run.begin(lake.lakehouse, spec).attempt(steps=None)
    run = Run.begin(lake.lakehouse, spec)
    while run.attempt(steps=2, commit=1):
        pass
    assert [batch.digest for batch in run.batches] == [batch.digest for batch in whole]
    assert sum(batch.tokens for batch in whole) == TEXT_BYTES
    assert all(batch.tensors["tokens"].shape == (2, 7) for batch in whole)


def test_leg_binds_tokenizer(spec: JobSpec, lake: Lake) -> None:
    """A leg has the tokenizer's digest and the number of its end token. It is not read with another tokenizer."""
    leg = Run.begin(lake.lakehouse, spec).leg
    tokenizer = choice.open_tokenizer(spec.sequences.tokenizer)
    assert (leg.sequences.tokenizer, leg.sequences.end_id) == (tokenizer.digest, tokenizer.token_id("."))
    other = replace(leg, sequences=replace(leg.sequences, tokenizer="another"))
    with pytest.raises(ResumeMismatch, match="expected the tokenizer with which the leg was planned"):
        open_leg(Plans(lake.lakehouse), other, spec)


@pytest.mark.parametrize("missing", ["dlac.tokenizers", "dlac.packings"])
def test_missing_extension_is_named(missing: str, lake: Lake, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Texts need both doors. Rows that are samples need none."""

    def points(**selected: str) -> Any:
        return () if selected["group"] == missing else entry_points(**selected)

    monkeypatch.setattr(doors, "entry_points", points)
    assert Run.begin(lake.lakehouse, packed(tmp_path, length=0)).attempt(steps=1)
    with pytest.raises(BadInput, match=r"in sequences\.(tokenizer|length), found '\w+': installed are none"):
        Run.begin(lake.lakehouse, packed(tmp_path))
