"""Distributions of other authors for tests: a folder for PYTHONPATH with modules and entry points."""

from collections.abc import Mapping, Sequence
from pathlib import Path


def install_distribution(
    folder: Path, name: str, modules: Mapping[str, str], points: Mapping[str, Sequence[str]]
) -> Path:
    """Make a distribution of modules (name -> source) and entry points (group -> lines) in `folder`, and return it."""
    for module, source in modules.items():
        (folder / f"{module}.py").write_text(source)
    about = folder / f"{name.replace('-', '_')}-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    lines = [line for group, entries in points.items() for line in (f"[{group}]", *entries)]
    (about / "entry_points.txt").write_text("\n".join([*lines, ""]))
    return folder


def install_launcher(folder: Path) -> Path:
    """Make a folder for PYTHONPATH in which a distribution has the launcher `marked` and the section `mark`."""
    folder.mkdir()
    source = (Path(__file__).parent / "programs" / "strange_launcher.py").read_text()
    points = {
        "dlac.launchers": ["marked = strange_launcher:Marked"],
        "dlac.settings": ["mark = strange_launcher:MarkSpec"],
    }
    return install_distribution(folder, "strange-launcher", {"strange_launcher": source}, points)
