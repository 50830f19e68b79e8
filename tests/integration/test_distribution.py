"""The wheel: one package, which works beside another project's `catalog`, `assets` and `jobs`."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[2]
_QUICKSTART = _ROOT / "examples" / "quickstart"
_DLAC = Path(sys.executable).with_name("dlac")
_PROJECT = _ROOT / "examples" / "project"
"""Another project, whose module `jobs` is named as one of this repository."""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this checkout."""
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run([sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder], cwd=_ROOT, check=True)
    [built] = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def fresh(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of an environment with the wheel, and with the dependencies but not the checkout of this one."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False)
    paths = {name: sysconfig.get_path(name, "venv", {"base": str(folder)}) for name in ("purelib", "scripts")}
    # Lines of this file are added to the path. The .pth files of those folders, such as the checkout's, are not read.
    (Path(paths["purelib"]) / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    python = Path(paths["scripts"]) / "python"
    install = ["install", "--quiet", "--no-deps", "--no-index", "--ignore-installed", str(wheel)]
    subprocess.run([sys.executable, "-m", "pip", "--python", str(python), *install], check=True)
    return python.parent


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A folder with the files of the quickstart and with modules of its own."""
    for path in _QUICKSTART.iterdir():
        shutil.copy(path, tmp_path)
    script = tmp_path / "train.py"
    script.write_text(script.read_text().replace("time.sleep(0.05)", "pass"))  # no person kills it by hand
    maker = tmp_path / "make_table.py"
    maker.write_text(maker.read_text().replace("20_000", "4_000"))
    shutil.copytree(_PROJECT, tmp_path, dirs_exist_ok=True)
    return tmp_path


def run(folder: Path, *command: str | Path) -> subprocess.CompletedProcess[str]:
    """Run a command in a folder, with the embedded lakehouse there."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "DAGSTER_HOME")}
    environment["DLAC_HOME"] = str(folder / ".dlac")
    return subprocess.run(list(map(str, command)), cwd=folder, env=environment, capture_output=True, text=True)  # noqa: PLW1510


def test_wheel_has_one_package(wheel: Path) -> None:
    """The wheel has each tracked file of `dlac_pipeline`, and its own metadata."""
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    tracked = subprocess.run(
        ["git", "ls-files", "dlac_pipeline"], cwd=_ROOT, capture_output=True, text=True, check=True
    )
    files = {name for name in tracked.stdout.splitlines() if (_ROOT / name).exists()}
    assert {name for name in names if ".dist-info/" not in name} == files


def test_wheel_hides_no_module(fresh: Path, tmp_path: Path) -> None:
    """The installed package is found, and the folders of this repository's own project are not."""
    found = "map(importlib.util.find_spec, ('catalog', 'assets', 'jobs'))"
    code = f"import dlac_pipeline, importlib.util; print(dlac_pipeline.__file__, *{found})"
    shown = run(tmp_path, fresh / "python", "-c", code).stdout.split()
    assert shown[0].startswith(str(fresh.parent))
    assert shown[1:] == ["None"] * 3


def test_training_beside_own_modules_is_exact(fresh: Path, project: Path) -> None:
    """The installed package trains and audits a run, whatever modules the working directory has."""
    for module in ("catalog.py", "assets/__init__.py", "jobs/__init__.py"):
        (project / module).parent.mkdir(exist_ok=True)
        (project / module).write_text("raise AssertionError('only its own project imports this')")
    for command in (("python", "make_table.py"), ("dlac", "train", "job.toml")):
        done = run(project, fresh / command[0], *command[1:])
        assert done.returncode == 0, done.stderr
    report = json.loads(run(project, fresh / "dlac", "audit", "first", "--json").stdout)
    assert (report["exact"], report["rows_consumed"]) == (True, 4_000)


def test_project_of_components_is_valid(fresh: Path, project: Path) -> None:
    """Dagster loads another project, which consists of components, with the wheel."""
    command = (fresh / "python", "-m", "dagster", "definitions", "validate", "-m", "jobs.definitions", "-d", project)
    done = run(project, *command)
    assert done.returncode == 0, done.stderr


def test_dg_scaffolds_and_checks_run(project: Path) -> None:
    """`dg` lists the components, writes the files of another run, and names a wrong attribute with its line."""
    dg = _DLAC.with_name("dg")
    assert "dlac_pipeline.dagster.TrainingRun" in run(project, dg, "list", "components", "--json").stdout
    made = run(project, dg, "scaffold", "defs", "dlac_pipeline.dagster.TrainingRun", "second")
    assert made.returncode == 0, made.stderr
    checked = run(project, dg, "check", "defs")
    assert checked.returncode == 0, checked.stderr
    file = project / "jobs" / "defs" / "second" / "defs.yaml"
    file.write_text(file.read_text().replace("spec_file", "spec_fil"))
    wrong = run(project, dg, "check", "yaml")
    assert wrong.returncode != 0
    assert "'spec_fil' was unexpected" in wrong.stdout + wrong.stderr


def test_own_workspace_is_valid_anywhere(project: Path) -> None:
    """This repository's definitions load from a working directory whose modules have the same names."""
    (project / "jobs" / "__init__.py").write_text("raise AssertionError('another project')")
    command = (sys.executable, "-m", "dagster", "definitions", "validate", "-w", _ROOT / "workspace.yaml")
    done = run(project, *command)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.soak
def test_demo_needs_checkout(fresh: Path, project: Path) -> None:
    """An installed package has no demo. In a checkout the demo is its own, and not a module of the working directory."""
    refused = run(project, fresh / "dlac", "demo")
    assert (refused.returncode, "expected a checkout" in refused.stderr) == (64, True), refused.stderr
    assert "--report" in run(project, _DLAC, "demo", "--help").stdout


def test_audits_import_no_torch(tmp_path: Path) -> None:
    """Commands that only read the lakehouse start without torch, deepspeed and Dagster."""
    with tarfile.open(_ROOT / "tests" / "lakehouses" / "format-0.1.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    home = tmp_path / "home"
    commands = [
        ["runs"],
        ["status", "launched"],
        ["checkpoints", "launched"],
        ["incidents", "launched"],
        ["audit", "launched", "--explain"],
        ["sql", "FROM checkpoints"],
        ["pins"],
        ["identify", str(home / "weights.safetensors")],
    ]
    code = f"""import sys
from dlac_pipeline.cli.main import app
for command in {commands!r}:
    app([*command, "--home", {str(home)!r}], standalone_mode=False)
    loaded = {{"torch", "deepspeed", "dagster"}} & set(sys.modules)
    assert not loaded, (command, loaded)
"""
    done = run(tmp_path, sys.executable, "-c", code)
    assert done.returncode == 0, done.stderr
