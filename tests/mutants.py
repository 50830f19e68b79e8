"""Mutation test of the most important code: `python -m tests.mutants [--jobs N] [--only WORD]`, or `make mutants`.

`tests/mutants.toml` lists mutants: a line of code, its replacement, and the tests that must fail then. Each is applied to a
copy of the tree, never to the checkout. The named tests first run without any mutant. The program fails if these fail, if a
line is not found exactly once, if a mutant is not valid Python, or if one survives. Its last line is a JSON object like that
of the benchmarks.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

from benchmarks.figures import Figure, report

_TREE = Path(__file__).parents[1]
_LIST = Path(__file__).with_name("mutants.toml")
_LIMIT_S = 1200
_FAILED, _PASSED = 1, 0
"""Exit codes of pytest with a verdict. Any other means that no test gave one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Mutant:
    """One changed line of code."""

    name: str
    file: str
    text: str
    instead: str
    tests: tuple[str, ...]

    def changed(self, content: str) -> str:
        """Return the content of its file with the line changed.

        Raises:
            SystemExit: the line is not found exactly once.
        """
        if content.count(self.text) != 1:
            sys.exit(
                f"expected {self.text!r} once in {self.file}, found it {content.count(self.text)} times: correct mutant "
                f"{self.name!r} in tests/mutants.toml"
            )
        return content.replace(self.text, self.instead)


def read_mutants(only: str = "") -> list[Mutant]:
    """Return the mutants of the list whose name contains `only`."""
    listed = tomllib.loads(_LIST.read_text())["mutant"]
    mutants = [Mutant(**{**each, "tests": tuple(each["tests"])}) for each in listed]
    if len({each.name for each in mutants}) != len(mutants):
        sys.exit(f"expected mutants with different names in {_LIST}, found {sorted(each.name for each in mutants)!r}")
    return [each for each in mutants if only in each.name]


def copy_tree(folder: Path) -> Path:
    """Copy the tracked and untracked files of this tree, except ignored ones, and return the copy."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=_TREE,
        check=True,
        capture_output=True,
    )
    for name in listed.stdout.decode().split("\0"):
        if name and (_TREE / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(_TREE / name, folder / name)
    return folder


def run_tests(tree: Path, tests: Sequence[str]) -> tuple[int, str]:
    """Run tests in a copy of the tree, on its own code. Return pytest's exit code and its last lines."""
    env = {**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    where = f"import dlac_pipeline, sys; sys.exit(not dlac_pipeline.__file__.startswith({str(tree)!r}))"
    subprocess.run([sys.executable, "-c", where], cwd=tree, env=env, check=True)
    options = ["-x", "-q", "-n", "0", "-p", "no:cacheprovider", "--timeout", "300", "--no-header", "--tb=line"]
    try:
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *options, *tests],
            check=False,
            cwd=tree,
            env=env,
            capture_output=True,
            text=True,
            timeout=_LIMIT_S,
        )
    except subprocess.TimeoutExpired:
        return _FAILED, f"no end within {_LIMIT_S} s"
    return done.returncode, "\n".join((done.stdout.rstrip() or done.stderr).splitlines()[-15:])


def check_mutant(mutant: Mutant, trees: SimpleQueue[Path]) -> str:
    """Run a mutant's tests on one of the copies. Return `caught`, `survived`, or the reason for no verdict."""
    tree = trees.get()
    path = tree / mutant.file
    original = path.read_text()
    try:
        path.write_text(mutant.changed(original))
        code, output = run_tests(tree, mutant.tests)
    finally:
        path.write_text(original)
        trees.put(tree)
    verdict = {_FAILED: "caught", _PASSED: "survived"}.get(code, f"no verdict, pytest ended with {code}:\n{output}")
    print(f"{verdict.splitlines()[0]:<10} {mutant.name:<42} {mutant.file}", flush=True)
    return verdict


def main() -> None:
    """Check the mutants, and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=2, help="mutants that are tested at once")
    parser.add_argument("--only", default="", help="test the mutants whose name contains this")
    asked = parser.parse_args()
    mutants = read_mutants(asked.only)
    for mutant in mutants:  # an outdated list is reported before any test runs
        mutant.changed((_TREE / mutant.file).read_text())
    with tempfile.TemporaryDirectory(prefix="dlac-mutants-") as folder:
        trees: SimpleQueue[Path] = SimpleQueue()
        for number in range(asked.jobs):
            trees.put(copy_tree(Path(folder).resolve() / f"{number}"))
        clean = copy_tree(Path(folder).resolve() / "clean")
        code, output = run_tests(clean, sorted({test for mutant in mutants for test in mutant.tests}))
        if code != _PASSED:
            sys.exit(f"expected the tests to pass without a mutant, found exit code {code}:\n{output}")
        with ThreadPoolExecutor(asked.jobs) as pool:
            verdicts = list(pool.map(lambda mutant: check_mutant(mutant, trees), mutants))
    for mutant, verdict in zip(mutants, verdicts, strict=True):
        if verdict != "caught":
            print(f"\n{mutant.name}: {verdict}\n  {mutant.file}: {mutant.text!r} -> {mutant.instead!r}")
    caught = verdicts.count("caught")
    figures = {
        "mutants": Figure(value=len(mutants), unit="mutants"),
        "survivors": Figure(value=len(mutants) - caught, unit="mutants", bar="<= 0"),
    }
    report("mutants", figures)
    sys.exit(caught != len(mutants))


if __name__ == "__main__":
    main()
