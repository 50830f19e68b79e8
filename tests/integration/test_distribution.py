"""The wheel: one package, with which the quickstart works beside the `catalog`, `assets` and `jobs` of its project."""

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from contextlib import closing
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dlac_pipeline.audit.audit import audit_run
from dlac_pipeline.lakehouse.config import LakehouseConfig
from dlac_pipeline.lakehouse.iceberg.connect import connect
from dlac_pipeline.lakehouse.ledger.recoveries import recoveries_of
from tests.integration.quickstart_page import POINTS, Reader, page_parts

_ROOT = Path(__file__).parents[2]
_EXAMPLE = _ROOT / "examples" / "quickstart"
_DLAC = Path(sys.executable).with_name("dlac")


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


def run(folder: Path, *command: str | Path) -> subprocess.CompletedProcess[str]:
    """Run a command in a folder, with the embedded lakehouse there."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "DAGSTER_HOME")}
    environment["DLAC_HOME"] = str(folder / ".dlac")
    return subprocess.run(list(map(str, command)), cwd=folder, env=environment, capture_output=True, text=True)  # noqa: PLW1510


@pytest.mark.slow
def test_wheel_has_one_package(wheel: Path, fresh: Path, tmp_path: Path) -> None:
    """It has each tracked file of `dlac_pipeline`, and metadata. Installed, it hides no folder of this repository's project."""
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    tracked = subprocess.run(
        ["git", "ls-files", "dlac_pipeline"], cwd=_ROOT, capture_output=True, text=True, check=True
    )
    files = {name for name in tracked.stdout.splitlines() if (_ROOT / name).exists()}
    assert {name for name in names if ".dist-info/" not in name} == files
    found = "map(importlib.util.find_spec, ('catalog', 'assets', 'jobs'))"
    code = f"import dlac_pipeline, importlib.util; print(dlac_pipeline.__file__, *{found})"
    shown = run(tmp_path, fresh / "python", "-c", code).stdout.split()
    assert shown[0].startswith(str(fresh.parent))
    assert shown[1:] == ["None"] * 3


@pytest.mark.parametrize(
    "points", [pytest.param("600_000", marks=pytest.mark.slow), pytest.param(POINTS, marks=pytest.mark.soak)]
)
def test_quickstart_works_word_for_word(wheel: Path, fresh: Path, tmp_path: Path, points: str) -> None:
    """A person who follows the page kills a run twice, and has an exact audit and a Dagster project that is valid."""
    shutil.copy(wheel, tmp_path)
    with closing(Reader(tmp_path, fresh)) as person:
        person.follow(points)
    lakehouse = connect(LakehouseConfig().at_home(tmp_path / ".dlac"))
    report = audit_run(lakehouse, "first")
    assert (report.exact, report.rows_consumed, report.passes_finished) == (True, 3 * int(points), 1)
    assert [each.outcome for each in recoveries_of(lakehouse, "first")] == ["resumed"] * 2


def test_quickstart_stays_short() -> None:
    """A person enters at most ten commands. The page shows each file of the example. One file is written by hand."""
    parts = list(page_parts())
    assert sum(not name for name, _ in parts) <= 10
    files = {name: text for name, text in parts if name}
    assert files == {path.name: path.read_text() for path in _EXAMPLE.glob("*.*")}
    assert files["make_points.py"].count("\n") < 20


@pytest.mark.soak
def test_dg_scaffolds_and_checks_run(tmp_path: Path) -> None:
    """`dg` lists the components, writes the files of another run, and names a wrong attribute with its line."""
    pq.write_table(pa.table({"x": [1.0], "y": [2.0]}), tmp_path / "points.parquet")
    made = run(tmp_path, _DLAC, "init", "points.parquet", "--into", "project")
    assert made.returncode == 0, made.stderr
    project = tmp_path / "project"
    dg = _DLAC.with_name("dg")
    assert "dlac_pipeline.dagster.TrainingRun" in run(project, dg, "list", "components", "--json").stdout
    made = run(project, dg, "scaffold", "defs", "dlac_pipeline.dagster.TrainingRun", "second")
    assert made.returncode == 0, made.stderr
    checked = run(project, dg, "check", "defs")
    assert checked.returncode == 0, checked.stderr
    file = project / "assets" / "second" / "defs.yaml"
    file.write_text(file.read_text().replace("spec_file", "spec_fil"))
    wrong = run(project, dg, "check", "yaml")
    assert wrong.returncode != 0
    assert "'spec_fil' was unexpected" in wrong.stdout + wrong.stderr
