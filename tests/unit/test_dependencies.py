"""Private names of other libraries, and the versions and extras that `pyproject.toml` declares."""

import ast
import importlib
import pkgutil
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import dlac_pipeline

_ROOT = Path(__file__).parents[2]
_OURS = ("catalog", "dlac_pipeline", "assets", "jobs", "examples")
_PROJECT = tomllib.loads((_ROOT / "pyproject.toml").read_text())["project"]
_PRIVATE = re.compile(r"_[^_]")
PRIVATE_NAMES = {
    "dagster": {
        *("dagster._core.definitions.data_version.DATA_VERSION_TAG", "dagster._core.events.EngineEventData"),
        *("dagster._core.remote_origin.RemoteJobOrigin", "dagster._core.remote_origin.RemoteRepositoryOrigin"),
        "dagster._core.workspace.load.location_origins_from_yaml_paths",
    },
    "deepspeed": {"_get_all_ckpt_names"},
    "pyiceberg": {
        *("_added_data_files", "_buffer_size", "_build_delete_files_partition_predicate", "_build_manifest_evaluator"),
        *("_compression", "_convert_orm_to_iceberg", "_deleted_data_files", "_inherit_from_manifest", "_meta"),
        *("_parent_snapshot_id", "_process_manifests", "_summary", "_transaction", "_update_and_stage_table"),
        *("_updates", "_get_default_warehouse_location", "pyiceberg.io.pyarrow._dataframe_to_data_files"),
        "pyiceberg.io.pyarrow._pyarrow_to_schema_without_ids",
        "pyiceberg.table.update.snapshot._OverwriteFiles",
    },
    "python": {"_HANDLER", "_exit", "_forkserver", "_run_exitfuncs", "_shutdown"},
    "torch": {
        *("_get_backend", "_load_state_dict_pre_hooks", "_set_default_timeout", "_version"),
        *("torch._weights_only_unpickler", "torch.distributed.checkpoint._traverse.set_element"),
        "torch.distributed.checkpoint.default_planner._EmptyStateDictLoadPlanner",
        "torch.distributed.checkpoint.filesystem._StorageInfo",
        "torch.distributed.checkpoint.state_dict_loader._load_state_dict",
        "torch.numa.binding._maybe_apply_numa_binding_to_current_process",
        "torch.utils._python_dispatch.is_traceable_wrapper_subclass",
    },
    "torchft": {"_create_pg", "torchft.checkpointing._serialization._streaming_load"},
}
"""Distribution -> its private names that the product imports, reads or overrides."""


def _trees() -> Iterator[ast.Module]:
    for folder in _OURS:
        yield from (ast.parse(file.read_text()) for file in sorted((_ROOT / folder).rglob("*.py")))


def _defined_names(tree: ast.AST) -> set[str]:
    """Return the names that the statements of a module or class define."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Attribute | ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.attr if isinstance(node, ast.Attribute) else node.id)
    return found


def _imported_names(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{each.name}" for each in node.names)
        elif isinstance(node, ast.Import):
            yield from (each.name for each in node.names)


def _is_foreign(module: str) -> bool:
    return module.partition(".")[0] not in {*_OURS, *sys.stdlib_module_names}


def _product_classes() -> Iterator[type]:
    for module in pkgutil.walk_packages(dlac_pipeline.__path__, "dlac_pipeline."):
        if not module.name.endswith("__main__"):
            found = vars(importlib.import_module(module.name)).values()
            yield from (each for each in found if isinstance(each, type) and each.__module__ == module.name)


def _attributes(tree: ast.AST) -> set[str]:
    return {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and _PRIVATE.match(node.attr)}


def _inherited_names(trees: list[ast.Module]) -> Iterator[str]:
    """Yield the private names of foreign base classes that a class of the product overrides or reads."""
    used = {node.name: _attributes(node) for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    for owner in _product_classes():
        bases = [base for base in owner.__mro__ if _is_foreign(base.__module__)]
        theirs = {name for base in bases for name in vars(base) if _PRIVATE.match(name)}
        yield from theirs & (vars(owner).keys() | used.get(owner.__name__, set())) - {"_abc_impl"}


def _private_names() -> set[str]:
    """Return the private names of other libraries: imported, inherited, or used as attributes that the product never defines."""
    trees = list(_trees())
    ours = {name for tree in trees for name in _defined_names(tree)}
    imported = {name for tree in trees for name in _imported_names(tree) if _is_foreign(name)}
    read = {name for tree in trees for name in _attributes(tree) - ours}
    return read | {name for name in imported if any(map(_PRIVATE.match, name.split(".")))} | {*_inherited_names(trees)}


def test_private_names_are_listed() -> None:
    """A new private name of another library is a risk at each of its releases, so this list names it."""
    assert _private_names() == set().union(*PRIVATE_NAMES.values())


@pytest.mark.parametrize("distribution", sorted(PRIVATE_NAMES.keys() - {"python"}))
def test_private_names_bound_versions(distribution: str) -> None:
    """A dependency whose private names the product uses has a minimum version and a first unsupported version."""
    declared = [
        *_PROJECT["dependencies"],
        *(each for extra in _PROJECT["optional-dependencies"].values() for each in extra),
    ]
    wanted = [each for each in declared if re.match(rf"{distribution}\b(?!-)", each)]
    assert wanted
    assert all(re.search(r">=\d.*,<\d", each) for each in wanted), wanted


def test_messages_name_existing_extras() -> None:
    """The name `dlac` belongs to another project. Messages name extras of `dlac-pipeline`."""
    files = [file for folder in ("dlac_pipeline", "docs") for file in (_ROOT / folder).rglob("*.*")]
    texts = [file.read_text() for file in [*files, _ROOT / "README.md"] if file.suffix in (".py", ".md")]
    found = [line for text in texts for line in re.findall(r"pip install [^ `\n]*dlac[^ `)\n]*", text)]
    found = [re.sub(r"\./dlac_pipeline-[0-9.]+-py3-none-any\.whl", _PROJECT["name"], line) for line in found]
    named = {re.sub(r"pip install ['\\\"]*", "", line).rstrip("'\\\"") for line in found}
    assert named <= {f"{_PROJECT['name']}[{extra}]" for extra in _PROJECT["optional-dependencies"]}
    assert f"{_PROJECT['name']}[dagster]" in named


def test_install_lines_bound_torch() -> None:
    """Each page that installs PyTorch names the range of `pyproject.toml`, or pip downloads it twice, and the CPU variant."""
    (wanted,) = [each for each in _PROJECT["dependencies"] if each.startswith("torch>")]
    files = [*(_ROOT / "docs").glob("*.md"), *(_ROOT / "dlac_pipeline").rglob("*.py")]
    files += [_ROOT / name for name in ("README.md", "Makefile", "Containerfile")]
    found = {file: re.findall(r"pip install [^`\n]*?\b(torch\b[^\"' \n`]*)", file.read_text()) for file in files}
    assert {line for lines in found.values() for line in lines} == {wanted}
    pages = [_ROOT / "README.md", _ROOT / "docs" / "index.md", _ROOT / "docs" / "quickstart.md"]
    assert [file for file in found if found[file] and file.suffix == ".md"] == sorted(pages, key=files.index)
    assert all("--index-url https://download.pytorch.org/whl/cpu" in file.read_text() for file in pages)
    paragraphs = [re.search(r"^Or: .*?$", page.read_text(), re.M) for page in pages[:2]]
    assert len({each[0] for each in paragraphs if each}) == 1
