"""What may be imported before a rank is forked: what its script imports before it does anything else.

In: a training script. Out: modules, imported. A script that sets the environment, or calls anything, may do so for what it
imports behind that: this is left to the rank, in the script's own order. So are libraries that are not known here, as one may
read at import which rank it is in, or start what survives no fork.
"""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Iterator
from importlib.machinery import PathFinder
from pathlib import Path

_LIGHT = {"torch": ("torch",), "dlac_pipeline": ("dlac_pipeline.worker", "dlac_pipeline.dataset")}
"""By the package that a script names."""
_HEAVY = {name: (name,) for name in ("deepspeed", "transformers", "accelerate", "datasets")}
"""Not beside accelerators: at import they may open the driver, which survives no fork; PyTorch does not."""
_ACCELERATORS = (
    *("nvidia[0-9]*", "dxg", "kfd", "dri/renderD*"),
    *("accel[0-9]*", "accel/accel[0-9]*", "davinci[0-9]*", "neuron[0-9]*", "vfio/[0-9]*"),
)
"""Device files; a container may have any one of a machine's."""
_DEAD = ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def import_ahead(script: Path) -> None:
    """Import what may be; what cannot be imported, the rank will meet where somebody reads it."""
    before = set(sys.modules)
    for name in modules_ahead(script, accelerated=accelerated(Path("/dev"))):
        try:
            importlib.import_module(name)
        except Exception as err:
            sys.stderr.write(f"{name} could not be imported ahead: {err}\n")
    _forget_shadowed(script.parent, before)


def accelerated(devices: Path) -> bool:
    """Whether there is an accelerator, or what may be one, among the device files of this folder."""
    return any(any(devices.glob(pattern)) for pattern in _ACCELERATORS)


def modules_ahead(script: Path, *, accelerated: bool) -> list[str]:
    """The modules to import ahead, in the order in which the script would."""
    known = _LIGHT if accelerated else _LIGHT | _HEAVY
    walk = _Walk(script.parent)
    walk.through(script, script=True)
    return [module for name in walk.met for module in known.get(name, ())]


class _Walk:
    """Follows the imports of a script, through modules beside it, until something acts."""

    def __init__(self, folder: Path) -> None:
        self.met: dict[str, None] = {}
        """Packages that are not the script's own, in order."""
        self._folder = folder
        self._seen: set[Path] = set()

    def through(self, file: Path, *, script: bool = False) -> bool:
        """Whether the file, to its end, only imports and defines."""
        if file in self._seen:
            return True
        self._seen.add(file)
        try:
            statements = ast.parse(file.read_bytes()).body
        except (OSError, ValueError, SyntaxError):
            return False
        dead = _DEAD if script else (*_DEAD, "__name__ == '__main__'")
        return all(self._passes(statement, file, dead) for statement in statements)

    def _passes(self, statement: ast.stmt, file: Path, dead: tuple[str, ...]) -> bool:
        if isinstance(statement, ast.Import):
            return all(self._imported(alias.name.split("."), []) for alias in statement.names)
        if isinstance(statement, ast.ImportFrom):
            path = statement.module.split(".") if statement.module else []
            names = [alias.name for alias in statement.names]
            if statement.level:
                return self._followed(path, names, file.parents[statement.level - 1])
            return self._imported(path, names)
        if isinstance(statement, ast.If) and ast.unparse(statement.test) in dead:
            return not any(map(_acts, statement.orelse))
        return not _acts(statement)

    def _imported(self, path: list[str], names: list[str]) -> bool:
        if _is_local(path[0], self._folder):
            return self._followed(path, names, self._folder)
        self.met.setdefault(path[0])
        return True

    def _followed(self, path: list[str], names: list[str], folder: Path) -> bool:
        """Whether modules of the script's own, from the outermost package inwards, only import and define."""
        files = [file for file in _files(path, names, folder) if file.is_file()]
        return bool(files) and all(map(self.through, files))


def _files(path: list[str], names: list[str], folder: Path) -> Iterator[Path]:
    """Where the modules of a dotted path may be, and those among the names that are imported from it."""
    for parts in (*(path[:depth] for depth in range(1, len(path) + 1)), *([*path, name] for name in names)):
        inner = folder.joinpath(*parts)
        yield from (inner.with_suffix(".py"), inner / "__init__.py")


def _is_local(package: str, folder: Path) -> bool:
    """Whether it is another package, or there only, when the folder is searched first, as it is for the script."""
    with_it = PathFinder.find_spec(package, [str(folder), *sys.path])
    without = PathFinder.find_spec(package, sys.path)
    return with_it is not None and (without is None or with_it.origin != without.origin)


def _acts(node: ast.AST) -> bool:
    """Whether running this may do more than define something: it calls, sets a part of something else, or may import.

    What functions and classes call while they are defined (decorators, defaults) makes them, and is passed over.
    """
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
        return False
    if isinstance(node, ast.Attribute | ast.Subscript) and not isinstance(node.ctx, ast.Load):
        return True
    acting = (ast.Call, ast.AugAssign, ast.Delete, ast.Import, ast.ImportFrom, ast.With, ast.Raise)
    return isinstance(node, acting) or any(map(_acts, ast.iter_child_nodes(node)))


def _forget_shadowed(folder: Path, before: set[str]) -> None:
    """What was imported by the libraries and has the name of a module of the script's: the script is to find its own."""
    met = set(sys.modules) - before
    shadowed = {name for name in {one.partition(".")[0] for one in met} - before if _is_local(name, folder)}
    for one in met:
        if one.partition(".")[0] in shadowed:
            del sys.modules[one]
