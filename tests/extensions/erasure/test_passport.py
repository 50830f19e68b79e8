"""Passports: whether exported weights were trained on a document, from a file beside them, without the lakehouse."""

import json
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from blake3 import blake3
from safetensors import safe_open
from safetensors.torch import save_file

from dlac_pipeline.extensions.erasure.passport import OpenPassport, passport_of
from dlac_pipeline.extensions.exchange.fork import fork_run
from dlac_pipeline.lakehouse.errors import SpecInvalid
from tests.conftest import Arena, source_rows
from tests.fixtures import Command

KEYED: dict[str, Any] = {"row_keys": True, "identity_columns": ["row_id"]}


@dataclass
class Forked:
    """A run over rows 0 to 499 of a table, and a fork of its step 5 over rows 1000 to 1199 of another one."""

    arena: Arena
    parent_rows: set[int]
    """Rows that the parent had read at step 5."""

    def export(self, here: Command, run: str, name: str = "weights.safetensors") -> tuple[Path, Any]:
        """Export the head of a run by the command. Return the file, and the command's output."""
        out = self.arena.home.parent / name
        spec = str(self.arena.home / f"{run}.yaml")
        done = here("checkpoint", "export", run, str(out), "--spec", spec, home=self.arena.home)
        assert done.returncode == 0, done.stderr
        written = here("passport", "write", str(out), "--json", home=self.arena.home)
        assert written.returncode == 0, written.stderr
        return out, json.loads(written.stdout)


@pytest.fixture(scope="module")
def forked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forked]:
    """Both runs record keys of rows."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        arena = Arena(tmp_path_factory.mktemp("forked") / "home", monkeypatch)
        arena.table(appends=(500,))
        rows = source_rows(1000, 200)
        arena.lakehouse.catalog.create_table("src.u", rows.schema).append(rows)
        seen = arena.train(arena.spec("a", world_size=1, passes=1, every_steps=5, **KEYED), until=9)
        child = arena.spec("b", table="src.u", world_size=1, passes=1, **KEYED)
        fork_run(arena.lakehouse, child, "a", step=5)
        arena.train(child)
        yield Forked(arena, {row for step, rows in seen.items() if step <= 5 for row in rows})


def test_passport_has_what_both_runs_read(forked: Forked, here: Command) -> None:
    """Every row that the fork and its parent had read is found without the lakehouse, and few others are."""
    out, facts = forked.export(here, "b")
    assert facts["passport"] == str(passport_of(out))
    answers = []
    for row, home in (("1007", forked.arena.home), ("999999", forked.arena.home.parent / "nowhere")):
        answer = json.loads(here("passport", "check", str(out), row, "--json", home=home).stdout)
        answers.append((answer["trained_on"], answer["passport"]))
    assert answers == [
        ("probably (1 in 256 other documents is found, too)", "as in the ledger"),
        ("no", "not compared with the ledger, which is not here"),
    ]
    with closing(OpenPassport(out)) as passport:
        assert (passport.facts.documents, passport.facts.incomplete) == (len(forked.parent_rows) + 200, ())
        assert all(passport.has([str(row)]) for row in {*forked.parent_rows, *range(1000, 1200, 5)})
        others = [row for row in range(0, 3000, 20) if row not in forked.parent_rows and not 1000 <= row < 1200]
        assert sum(passport.has([str(row)]) for row in others) < 0.02 * len(others)
        for document in (["seven"], ["7", "8"], [""]):  # no integer, and two values for one column
            with pytest.raises(SpecInvalid, match="expected the values of the columns"):
                passport.has(document)


@pytest.mark.slow
def test_passport_names_what_it_misses(forked: Forked, here: Command) -> None:
    """A table without keys, which a later run reads."""
    arena = forked.arena
    arena.table("src.v", appends=(100,))
    child = arena.spec("c", table="src.v", world_size=1, passes=1)
    fork_run(arena.lakehouse, child, "a", step=5)
    arena.train(child)
    out, _ = forked.export(here, "c", "c.safetensors")
    with closing(OpenPassport(out)) as passport:
        assert passport.facts.incomplete == ("1 data files of src.v have no keys",)
        assert passport.facts.documents == len(forked.parent_rows)
    answer = json.loads(here("passport", "check", str(out), "999999", "--json", home=arena.home).stdout)
    assert (answer["trained_on"], answer["unknown"]) == ("unknown", "1 data files of src.v have no keys")


def test_wrong_passport_is_refused(forked: Forked, here: Command) -> None:
    """One of other weights, one cut short, one without documents whose digest fits, and weights that name the checkpoint."""
    first, _ = forked.export(here, "a", "a.safetensors")
    second, _ = forked.export(here, "b", "b.safetensors")
    own, content = passport_of(second).read_bytes(), passport_of(first).read_bytes()
    passport_of(second).write_bytes(content)
    with pytest.raises(
        SpecInvalid, match=r"expected the weights of checkpoint 'a-.*', as their passport says, found others"
    ):
        OpenPassport(second)
    line, _, filtered = content.partition(b"\n")
    seed = json.loads(line)
    seed["seed"] += 1
    for damaged in (content[:-40], line + b"\n" + bytes(len(filtered)), json.dumps(seed).encode() + b"\n" + filtered):
        passport_of(first).write_bytes(damaged)
        with pytest.raises(SpecInvalid, match="expected a passport that `dlac passport write` wrote"):
            OpenPassport(first)
    line, _, filtered = own.partition(b"\n")
    facts = json.loads(line)
    del facts["digest"]
    digest = blake3(json.dumps(facts, sort_keys=True).encode() + b"\n" + bytes(len(filtered))).hexdigest()
    passport_of(second).write_bytes(json.dumps(facts | {"digest": digest}).encode() + b"\n" + bytes(len(filtered)))
    refused = here("passport", "check", str(second), "1007", "--json", home=forked.arena.home)
    assert (refused.returncode, "found a changed one" in refused.stderr) == (64, True)
    passport_of(second).write_bytes(own)
    with safe_open(second, framework="pt") as opened:
        save_file({"weight": torch.ones(1)}, second, opened.metadata())
    with pytest.raises(SpecInvalid, match=r"found others in .*b.safetensors"):
        OpenPassport(second)
