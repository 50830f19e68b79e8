"""List of mutants: each names a line of the code that exists, and tests that exist."""

from pathlib import Path

from tests.mutants import read_mutants

_TREE = Path(__file__).parents[2]


def test_mutants_name_existing_lines() -> None:
    """A line that was changed since would make its mutant test nothing."""
    for mutant in read_mutants():
        assert mutant.changed((_TREE / mutant.file).read_text()), mutant.name
        for test in mutant.tests:
            file, _, name = test.partition("::")
            assert f"def {name.partition('[')[0]}" in (_TREE / file).read_text(), (mutant.name, test)
