"""Passports: whether exported weights were trained on a document, from a file beside them, without the lakehouse."""

from __future__ import annotations

import json
import shutil
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from dlac_pipeline.lakehouse.errors import SpecInvalid
from dlac_pipeline.operations.documents.passport import OpenPassport, passport_of
from dlac_pipeline.operations.fork import fork_run
from tests.conftest import Arena, source_rows
from tests.integration.conftest import Command

KEYED: dict[str, Any] = {"row_keys": True, "identity_columns": ["row_id"]}


@dataclass
class Forked:
    """A run over rows 0 to 499 of a table, and a fork of its step 5 over rows 1000 to 1199 of another one."""

    arena: Arena
    here: Command
    parent_rows: set[int]
    """Rows that the parent had read at step 5."""

    def export(self, run: str, name: str = "weights.safetensors") -> tuple[Path, Any]:
        """Export the head of a run by the command. Return the file, and what the command says."""
        out = self.arena.home.parent / name
        spec = str(self.arena.home / f"{run}.yaml")
        done = self.here("export", run, str(out), "--spec", spec, "--json", home=self.arena.home)
        assert done.returncode == 0, done.stderr
        return out, json.loads(done.stdout)


@pytest.fixture
def forked(arena: Arena, here: Command) -> Forked:
    """Both runs record keys of rows."""
    arena.table(appends=(500,))
    rows = source_rows(1000, 200)
    arena.lakehouse.catalog.create_table("src.u", rows.schema).append(rows)
    seen = arena.train(arena.spec("a", world_size=1, passes=1, every_steps=5, **KEYED), until=9)
    child = arena.spec("b", table="src.u", world_size=1, passes=1, **KEYED)
    fork_run(arena.lakehouse, child, "a", step=5)
    arena.train(child)
    return Forked(arena, here, {row for step, rows in seen.items() if step <= 5 for row in rows})


def test_passport_has_what_both_runs_read(forked: Forked) -> None:
    """Every row that the fork and its parent had read is found after the lakehouse is gone, and few others are."""
    out, facts = forked.export("b")
    assert facts["passport"] == str(passport_of(out))
    shutil.rmtree(forked.arena.home)
    with closing(OpenPassport(out)) as passport:
        assert (passport.facts.documents, passport.facts.incomplete) == (len(forked.parent_rows) + 200, ())
        assert all(passport.has([str(row)]) for row in {*forked.parent_rows, *range(1000, 1200)})
        others = [row for row in range(0, 3000, 5) if row not in forked.parent_rows and not 1000 <= row < 1200]
        assert sum(passport.has([str(row)]) for row in others) < 0.02 * len(others)
    answers = [
        json.loads(forked.here("identify", str(out), "--document", row, "--json").stdout)["trained_on"]
        for row in ("1007", "999999")
    ]
    assert answers == ["probably (1 in 256 other documents is found, too)", "no"]


def test_passport_names_what_it_misses(forked: Forked) -> None:
    """A table without keys, which a later run reads."""
    arena = forked.arena
    arena.table("src.v", appends=(100,))
    child = arena.spec("c", table="src.v", world_size=1, passes=1)
    fork_run(arena.lakehouse, child, "a", step=5)
    arena.train(child)
    out, _ = forked.export("c")
    with closing(OpenPassport(out)) as passport:
        assert passport.facts.incomplete == ("1 data files of src.v have no keys",)
        assert passport.facts.documents == len(forked.parent_rows)


def test_run_without_keys_has_no_passport(arena: Arena, here: Command) -> None:
    """The export is written, and says that there is none."""
    arena.table(appends=(100,))
    arena.train(arena.spec("a", world_size=1, passes=1))
    out, facts = Forked(arena, here, set()).export("a")
    assert (out.exists(), facts["passport"], passport_of(out).exists()) == (True, None, False)
    with pytest.raises(SpecInvalid, match="expected a passport that `dlac export` wrote"):
        OpenPassport(out)


def test_wrong_passport_is_refused(forked: Forked) -> None:
    """One of other weights, one cut short, and one of another format."""
    first, _ = forked.export("a", "a.safetensors")
    second, _ = forked.export("b", "b.safetensors")
    content = passport_of(first).read_bytes()
    passport_of(second).write_bytes(content)
    with pytest.raises(
        SpecInvalid, match=r"expected weights of checkpoint 'a-.*', as their passport says, found weights of 'b-"
    ):
        OpenPassport(second)
    line, _, filtered = content.partition(b"\n")
    other = line.replace(b'"format_version": 1', b'"format_version": 9')
    for damaged in (line[:50], content[:-40], content + b"x", other + b"\n" + filtered):
        passport_of(first).write_bytes(damaged)
        with pytest.raises(SpecInvalid, match="expected a passport that `dlac export` wrote"):
            OpenPassport(first)


@pytest.mark.parametrize("document", [["seven"], ["7", "8"], [""]])
def test_document_has_the_columns_of_the_keys(forked: Forked, document: list[str]) -> None:
    """A text that is no integer, or two values for one column."""
    out, _ = forked.export("b")
    with closing(OpenPassport(out)) as passport, pytest.raises(SpecInvalid, match="expected the values of the columns"):
        passport.has(document)
