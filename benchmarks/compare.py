"""The bars of this commit beside another one's: `python -m benchmarks.compare REVISION [PROGRAM...] [--rounds N] [--quick]`.

The other commit gets a worktree, and a virtual environment that takes every package but the product from this one. In each
round both commits run each program with their own code, one after the other, in turns of who begins. A figure is the median
over the rounds of this commit's value over the other's. The last one counts the bars that the other commit met and this one
missed, by the medians of both. A PROGRAM may have arguments, such as "memory_recovery --sizes 98M".
"""

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.figures import Figure, report

PROGRAMS = (
    "overhead",
    "reader",
    "resume",
    "recovery",
    "memory_recovery --sizes 1.1M",
    "checkpoint",
    "commit",
    "control_plane --nodes 8 32 128 256",
)
"""Programs with bars that every change must hold."""
_WITHOUT_QUICK = ("control_plane",)
"""Programs whose `--quick` leaves out the sizes that a bar needs."""
_ROOT = Path(__file__).parents[1]


@dataclass(frozen=True, kw_only=True, slots=True)
class Side:
    """A commit that is measured."""

    name: str
    tree: Path
    python: Path

    def measure(self, program: str) -> dict[str, Figure]:
        """Run a program with the code of this commit, and return its figures. Without any: a program that failed, or none."""
        name, *arguments = shlex.split(program)
        if not (self.tree / "benchmarks" / f"{name}.py").exists():
            print(f"{self.name} has no benchmarks/{name}.py", flush=True)
            return {}
        command = [str(self.python), "-m", f"benchmarks.{name}", *arguments]
        environment = os.environ | {"PYTHONPATH": str(self.tree)}
        done = subprocess.run(command, cwd=self.tree, env=environment, stdout=subprocess.PIPE, text=True, check=False)
        try:
            found = json.loads(done.stdout.splitlines()[-1])["figures"]
        except (ValueError, KeyError, TypeError, IndexError):
            print(f"{self.name}: {program} ended with status {done.returncode} without figures", flush=True)
            return {}
        return {key: Figure(value=each["value"], unit=each["unit"], bar=each["bar"]) for key, each in found.items()}


def main() -> None:
    """Measure both commits in turns, and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("revision", help="commit to compare with")
    parser.add_argument("programs", nargs="*", metavar="PROGRAM", help=f"by default {', '.join(PROGRAMS)}")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="run the quick version of each program")
    asked = parser.parse_intermixed_args()
    figures, lost = dict[str, Figure](), list[str]()
    with other_commit(asked.revision) as other:
        here = Side(name="here", tree=_ROOT, python=Path(sys.executable))
        for program in asked.programs or PROGRAMS:
            is_quick = asked.quick and program.split()[0] not in _WITHOUT_QUICK
            ratios, missed = compare(here, other, f"{program} --quick" if is_quick else program, asked.rounds)
            figures |= ratios
            lost += missed
    print("bars lost:", ", ".join(lost) or "none", flush=True)
    report("compare", figures | {"bars_lost": Figure(value=len(lost), unit="", bar="<= 0")}, beside=asked.revision)
    sys.exit(1 if lost else 0)


def compare(here: Side, other: Side, program: str, rounds: int) -> tuple[dict[str, Figure], list[str]]:
    """Measure a program on both sides in turns.

    Return the ratio of each figure that both have, and the names of those whose bar the other commit met and this one missed.
    """
    values: dict[str, tuple[list[Figure], list[Figure]]] = defaultdict(lambda: ([], []))
    for number in range(rounds):
        for index in (0, 1) if number % 2 else (1, 0):
            for name, figure in (here, other)[index].measure(program).items():
                values[name][index].append(figure)
    ratios, lost = dict[str, Figure](), list[str]()
    for name, (ours, theirs) in values.items():
        if ours and theirs:
            key, new = f"{program.split(maxsplit=1)[0]}.{name}", _median(ours)
            old = replace(_median(theirs), bar=new.bar)
            ratios[key] = Figure(value=new.value / old.value if old.value else float(new.value == old.value), unit="x")
            is_lost = old.holds and not new.holds
            lost += [key] * is_lost
            verdict = (
                f"bar {new.bar}{': LOST' if is_lost else '' if new.holds else ': missed by both'}" if new.bar else ""
            )
            values_shown = f"{old.value:>10.4g} -> {new.value:>10.4g} {new.unit:<10} x {ratios[key].value:.3f}"
            print(f"{program:<24} {name:<44} {values_shown} {verdict}".rstrip(), flush=True)
    return ratios, lost


def _median(figures: list[Figure]) -> Figure:
    return replace(figures[-1], value=statistics.median(figure.value for figure in figures))


@contextmanager
def other_commit(revision: str) -> Iterator[Side]:
    """Check a commit out beside this one, with an environment that has its entry points."""
    with tempfile.TemporaryDirectory(prefix="dlac-compare-") as folder:
        tree, venv = Path(folder) / "tree", Path(folder) / "venv"
        git = ["git", "-C", str(_ROOT), "worktree"]
        subprocess.run([*git, "add", "--quiet", "--detach", str(tree), revision], check=True)
        try:
            subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
            python = venv / "bin" / "python"
            here, there = (_site_packages(Path(executable)) for executable in (sys.executable, str(python)))
            (there / "packages-of-the-other-environment.pth").write_text(f"{here}\n")
            _copy_scripts(Path(sys.executable).parent, venv / "bin")
            command = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps"]
            subprocess.run([*command, "--no-build-isolation", "--ignore-installed", str(tree)], check=True)
            yield Side(name=revision, tree=tree, python=python)
        finally:
            subprocess.run([*git, "remove", "--force", str(tree)], check=True)


def _site_packages(python: Path) -> Path:
    asked = "import sysconfig; print(sysconfig.get_path('purelib'))"
    return Path(
        subprocess.run([str(python), "-c", asked], check=True, stdout=subprocess.PIPE, text=True).stdout.strip()
    )


def _copy_scripts(source: Path, target: Path) -> None:
    """Copy the commands of an environment's packages, to run with another interpreter."""
    for path in source.iterdir():
        if path.name.startswith(("python", "pip", "activate")) or not path.is_file():
            continue
        text = path.read_bytes()
        (target / path.name).write_bytes(text.replace(f"#!{source}".encode(), f"#!{target}".encode(), 1))
        (target / path.name).chmod(0o755)


if __name__ == "__main__":
    main()
