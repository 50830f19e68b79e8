"""Names of runs and of checkpoints that people choose."""

from collections.abc import Callable

import pytest

from dlac_pipeline.extensions.erasure.explain import explain_sql
from dlac_pipeline.extensions.kept_checkpoints.commands import check_checkpoint_name
from dlac_pipeline.lakehouse.config import LakehouseConfig
from dlac_pipeline.lakehouse.errors import SpecInvalid
from dlac_pipeline.lakehouse.iceberg.connect import Lakehouse, connect
from dlac_pipeline.lakehouse.ledger.commits import claim
from dlac_pipeline.lakehouse.ledger.ledger import Ledger
from dlac_pipeline.lakehouse.ledger.run_rows import check_run_name, no_such_run

BAD_RUNS = [
    *("", " ", "..", "../../x", "/tmp/x", "a/b", "a\\b", ".hidden", "-x", "a b", "a\n", "a\nDROP TABLE t; --", "a\x00"),
    *("a\x1b[2J", "a\u202e", "é", "a" * 101, "'; --", "[/b]"),
]
BAD_NAMES = [
    *("", " ", "\t", " x", "x ", "a\nb", "a\x1b[2J", "a\x9b", "a\u202eb", "\x00", "fork:b", "fork:b:1", "export:h:/x"),
    *("EXPORT:h", "x" * 201),
]


@pytest.mark.parametrize(
    ("check", "expected", "name"),
    [
        *((check_run_name, "name of a run", name) for name in BAD_RUNS),
        *((check_checkpoint_name, "expected a tag", name) for name in BAD_NAMES),
    ],
)
def test_bad_name_is_refused(check: Callable[[str], str], expected: str, name: str) -> None:
    """A run's is a folder elsewhere, or words of a script. A checkpoint's is blank, invisible, or as those of DLAC's pins."""
    with pytest.raises(SpecInvalid, match=expected):
        check(name)
    for good in ("a", "0", "a.b_c-d", "a" * 100, "A..b", "release-1", "forked"):
        assert check(good) == good
    for good in ("best so far", "é", "v1:final"):
        assert check_checkpoint_name(good) == good


def test_missing_run_names_close_ones() -> None:
    """The error lists names that are similar to a mistyped one, or the first names of very many runs."""
    assert "did you mean 'night-3'" in str(no_such_run("nigth-3", ["day-1", "night-3"]))
    assert "did you mean 'Base'" in str(no_such_run("bASE", ["Base"]))
    assert "and 990 more" in str(no_such_run("zzz", [f"r{number}" for number in range(1000)]))


@pytest.fixture(scope="module")
def lakehouse(tmp_path_factory: pytest.TempPathFactory) -> Lakehouse:
    """Return a ledger with a claim of run "night-3"."""
    found = connect(LakehouseConfig().at_home(tmp_path_factory.mktemp("home")))
    claim(Ledger(found), "night-3", nonce="n", replaces=0)
    return found


def test_ledger_refuses_bad_run(lakehouse: Lakehouse) -> None:
    """The ledger refuses a bad name from every caller, as a row is permanent."""
    before = Ledger(lakehouse).runs()
    with pytest.raises(SpecInvalid):
        claim(Ledger(lakehouse), "../../x", nonce="n", replaces=0)
    assert Ledger(lakehouse).runs() == before
    with pytest.raises(SpecInvalid):  # a line break would end the comment of the script with the name
        explain_sql(lakehouse, "night-3\nCOPY x TO 'y';")
