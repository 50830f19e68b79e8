"""`dlac init`: projects that train at once on the columns of a table, and refusals."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from dlac_pipeline.audit.audit import audit_run
from dlac_pipeline.extensions.registration.new_project import scaffold_job
from dlac_pipeline.lakehouse.config import LakehouseConfig, home_folder
from dlac_pipeline.lakehouse.iceberg.connect import connect
from dlac_pipeline.spec.job_spec import read_spec
from tests.fixtures import Command

_ROWS = 40
_REALS, _DAYS = [1.5, None, float("nan"), float("inf")] * 10, pa.array(range(_ROWS), pa.date32())
_TABLES = {
    "numbers": pa.table({"a": _REALS, 'b "c"': [True, False] * 20, "när": [2**62] * _ROWS, "name": ["x"] * _ROWS}),
    "tokens": pa.table({"id": range(_ROWS), "ids": [[99_999] * (row + 1) for row in range(_ROWS)]}),
    "text": pa.table({"id": range(_ROWS), "text": ["héllo wörld", None] * 20}),
    "times": pa.table({"day": _DAYS, "x": pa.array([0.5] * _ROWS)}),
}
_SHAPES = {
    "documents": (
        {
            **{"path": [f"/data/files/{row}.txt" for row in range(_ROWS)], "n_chars": range(_ROWS, 0, -1)},
            **{"tags": [[1, 2]] * _ROWS, "text": ["word " * 100] * _ROWS},
        },
        ["text"],
        "left out: path (a text), n_chars (a number), tags (a list)",
    ),
    "labelled": (
        {
            **{"user_id": range(_ROWS), "label": [0, 1, None, 1] * 10, "day": _DAYS},
            **{"seq": range(100, 100 + _ROWS), "x": [0.5] * _ROWS},
        },
        ["x", "label"],
        "predicts label (2 classes, by cross entropy)",
    ),
    "species": (
        {"a": [0.5] * _ROWS, "b": [1.5] * _ROWS, "species": ["setosa", "versicolor"] * 20},
        ["a", "b"],
        "predicts b (a quantity, by squared error) from the others",
    ),
    "digits": (
        {"image": [b"\x00\x01"] * _ROWS, "box": [{"x": 1, "y": 2}] * _ROWS, "label": list(range(10)) * 4},
        ["label"],
        "left out: image (binary), box (struct<",
    ),
}
"""Columns of a table, the chosen columns, and a part of the command's output."""
_DECIMALS = pa.table({"price": pa.array([1, 2], pa.decimal128(5, 2))})
_UNSIGNED = pa.table({"x": [1.0], "n": pa.array([1], pa.uint64())})
_CHOSEN = {
    "numbers": (["a", 'b "c"', "när"], "left out: name (a text)"),
    "tokens": (["ids"], "train.py reads ids of lake.tokens"),
    "text": (["text"], "to change that: --columns"),
    "times": (["day", "x"], "train.py reads day, x of lake.times"),
}
_FILES = (
    *("assets/__init__.py", "assets/my_run/defs.yaml", "catalog/__init__.py", "dagster.yaml", "dg.toml"),
    *("job.toml", "jobs/__init__.py", "jobs/definitions.py", "train.py", "workspace.yaml"),
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with a folder of Parquet files for each table."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DLAC_HOME", "")
    for name, table in _TABLES.items():
        (tmp_path / name).mkdir()
        pq.write_table(table, tmp_path / name / "a.parquet")
    return tmp_path


@pytest.mark.parametrize(
    "name",
    [name if name == "labelled" else pytest.param(name, marks=pytest.mark.slow) for name in [*_SHAPES, *_TABLES]],
)
def test_choice_is_explained_and_trains(folder: Path, here: Command, name: str) -> None:
    """Documents come before file names, ids are no features, a label has classes. The script consumes each row with a value."""
    columns, chosen, said = _SHAPES.get(name) or (_TABLES[name].to_pydict(), *_CHOSEN[name])
    if name in _SHAPES:
        Path(name).mkdir()
        pq.write_table(pa.table(columns), f"{name}/a.parquet")
    options = ("--columns", "day, x") if name == "times" else ()
    made = here("init", name, "--run", "my-run", "--into", "project", *options)
    assert made.returncode == 0, made.stderr
    assert said in made.stdout
    assert ("nulls of a read as 0, and a feature NAME.valid" in made.stdout) == (name == "numbers")
    assert ("left out: " in made.stdout) == (set(columns) != set(chosen))
    assert read_spec(Path("project/job.toml")).source.columns == chosen
    script = (folder / "project" / "train.py").read_text()
    exec(compile(script.replace("training_run()", 'training_run("project/job.toml")'), "train.py", "exec"), {})
    report = audit_run(connect(LakehouseConfig().at_home(".dlac")), "my-run")
    assert (report.exact, report.rows_consumed) == (True, {"labelled": 30, "text": 20}.get(name, _ROWS))


def test_partition_keys_are_left_out(folder: Path, here: Command) -> None:
    """The key of Hive folders is no target, unless it is named."""
    for year in (2023, 2024):
        Path(f"hive/year={year}").mkdir(parents=True)
        pq.write_table(_TABLES["times"].append_column("y", pa.array([1.5] * _ROWS)), f"hive/year={year}/a.parquet")
    made = here("init", "hive", "--into", "unnamed"), here("init", "hive", "--columns", "x,year", "--into", "named")
    assert [each.returncode for each in made] == [0, 0], made[0].stderr
    assert read_spec(Path("unnamed/job.toml")).source.columns == ["x", "y"]
    assert read_spec(Path("named/job.toml")).source.columns == ["x", "year"]


def test_project_has_expected_files(folder: Path, here: Command) -> None:
    """The project of a table in the lakehouse has these files, and the instance's settings of this repository's own."""
    here("table", "register", "demo.points", "numbers")
    made = here("init", "demo.points", "--run", "my-run", "--into", "project", "--home", ".dlac")
    project = folder / "project"
    assert made.returncode == 0, made.stderr
    assert tuple(sorted(str(path.relative_to(project)) for path in project.rglob("*.*"))) == _FILES
    own = Path(__file__).parents[2] / "jobs" / "dagster.yaml"
    assert yaml.safe_load((project / "dagster.yaml").read_text()) == yaml.safe_load(own.read_text())
    assert "dlac train project/job.toml" in made.stdout


def test_quickstart_shows_written_files(folder: Path, here: Command) -> None:
    """The quickstart's job file and script equal the command's output for its points."""
    example = Path(__file__).parents[2] / "examples" / "quickstart"
    Path("points").mkdir()
    pq.write_table(pa.table({name: pa.array([1.5] * _ROWS, pa.float32()) for name in "xy"}), "points/0.parquet")
    made = here("init", "points", "--run", "first")
    assert made.returncode == 0, made.stderr
    for name in ("job.toml", "train.py"):
        assert (folder / name).read_text() == (example / name).read_text()


def test_existing_files_are_kept(folder: Path, here: Command) -> None:
    """A folder with one of the files is refused by its name, and nothing is written or registered."""
    (folder / "job.toml").write_text("mine")
    refused = here("init", "numbers")
    assert refused.returncode == 64
    assert "found job.toml in '.': nothing was written; name another folder with --into" in refused.stderr
    assert sorted(path.name for path in folder.iterdir()) == sorted([*_TABLES, "job.toml"])
    assert (folder / "job.toml").read_text() == "mine"


def test_refused_project_leaves_no_file(folder: Path, here: Command) -> None:
    """If a file cannot be written, those before it are removed, and so is the new table."""
    project = folder / "project"
    project.mkdir()
    (project / "workspace.yaml").symlink_to("nothing")  # which cannot be written, and is no file that is found before
    refused = here("init", "numbers", "--into", "project")
    assert (refused.returncode, "expected a folder to write into" in refused.stderr) == (64, True)
    assert "registered" not in refused.stderr
    assert not [*connect(LakehouseConfig().at_home(".dlac")).catalog.list_tables("lake")]
    assert [path.name for path in project.rglob("*") if not path.is_dir()] == ["workspace.yaml"]


def test_own_tokenizer_is_used(folder: Path, here: Command) -> None:
    """A tokenizer.json in the folder is used, and not written. The job file finds it from any working directory."""
    Path("project").mkdir()
    Path("project/tokenizer.json").write_text("mine")
    made = here("init", "text", "--into", "project")
    assert made.returncode == 0, made.stderr
    assert 'tokenizer = "tokenizer.json"' in Path("project/job.toml").read_text()
    assert read_spec(Path("project/job.toml")).sequences.tokenizer == str(folder / "project" / "tokenizer.json")
    assert Path("project/tokenizer.json").read_text() == "mine"


def test_catalog_is_named_in_project(folder: Path, here: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a catalog of PyIceberg's configuration, job file and Dagster project name it."""
    monkeypatch.setenv("PYICEBERG_CATALOG__PROD__URI", f"sqlite:///{folder}/prod.db")
    monkeypatch.setenv("PYICEBERG_CATALOG__PROD__WAREHOUSE", f"file://{folder}/prod")
    made = here("init", "numbers/*.parquet", "--catalog", "prod", "--table", "demo.points", "--into", "project")
    assert made.returncode == 0, made.stderr
    job = read_spec(folder / "project" / "job.toml")
    assert (job.run, job.source.table, job.lakehouse.name) == ("points", "demo.points", "prod")
    assert 'LAKEHOUSE = {"name": "prod"}' in Path("project/catalog/__init__.py").read_text()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("nothing", "expected a table as namespace.table, or a folder or bucket of Parquet files, found 'nothing'"),
        ("empty", "expected Parquet files at 'file://"),
        (
            "decimals",
            "expected a column of numbers, of texts or of lists of integers, found only {'price': 'decimal(5, 2)'}",
        ),
        ("unsigned --columns x,n", "left out column 'n': Iceberg has no type for uint64, in 'file://"),
        ("norows", "expected rows in table 'lake.norows', found none"),
        ("numbers --columns other", "in --columns, of table 'lake.numbers', found 'other'"),
        ("numbers --run a/b", "expected the name of a run"),
        ("numbers --into numbers/a.parquet", "expected a folder to write into, found [Errno 17]"),
        ("numbers --mesh tp=2", "expected tokens or a text to train a GPT on a mesh, found ['a', 'b \"c\"', 'när']"),
        ("tokens --mesh tp=2,dp=2", "expected numbers of ranks in --mesh, such as tp=2,pp=2, found 'tp=2,dp=2'"),
    ],
)
def test_refusal_names_next_step(folder: Path, here: Command, arguments: str, expected: str) -> None:
    """What cannot be trained on or written is refused with what to do, and leaves no project."""
    Path("empty").mkdir()
    for name, table in (("decimals", _DECIMALS), ("unsigned", _UNSIGNED), ("norows", _TABLES["times"].slice(0, 0))):
        Path(name).mkdir()
        pq.write_table(table, f"{name}/a.parquet")
    refused = here("init", *arguments.split())
    assert (refused.returncode, refused.stdout) == (64, "")
    assert expected in " ".join(refused.stderr.split())
    assert not Path("job.toml").exists()
    assert "registered" not in refused.stderr
    assert not Path(".dlac").exists() or not [*connect(LakehouseConfig().at_home(".dlac")).catalog.list_tables("lake")]


@pytest.mark.slow
def test_mesh_project_trains(folder: Path, here: Command) -> None:
    """The script of examples/mesh trains on packed tokens, and ranks of one replica on each row once."""
    made = here("init", "tokens", "--mesh", "tp=2,pp=2", "--run", "my-run")
    assert made.returncode == 0, made.stderr
    assert read_spec(Path("job.toml")).launch.mesh.replica_ranks == read_spec(Path("job.toml")).launch.world_size == 4
    trained = here("train", "job.toml")
    assert trained.returncode == 0, trained.stderr
    report = audit_run(connect(LakehouseConfig().at_home(".dlac")), "my-run")
    assert (report.exact, report.rows_consumed) == (True, _ROWS)


def test_second_run_is_a_second_file(folder: Path, here: Command) -> None:
    """`dlac new-run` copies the job file under another name and adds a Dagster asset. What exists is refused."""
    here("init", "numbers", "--into", "project", "--run", "first")
    made = here("new-run", "second", "project/job.toml")
    assert made.returncode == 0, made.stderr
    assert "dlac train project/second.toml" in made.stdout
    first, second = (read_spec(Path(f"project/{name}.toml")) for name in ("job", "second"))
    assert (second.run, second.model_copy(update={"run": "first"})) == ("second", first)
    assert "spec_file: ../../second.toml" in Path("project/assets/second/defs.yaml").read_text()
    refused = [
        here("new-run", *more.split())
        for more in ("second project/job.toml", "a/b project/job.toml", "third project/none.toml", "third", "")
    ]
    assert [each.returncode for each in refused] == [64, 64, 64, 64, 2], [each.stderr for each in refused]
    assert sorted(path.name for path in Path("project").glob("*.toml")) == ["dg.toml", "job.toml", "second.toml"]


def test_lakehouse_is_found_from_below(folder: Path, here: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """A command in the folder of a project uses the lakehouse above it."""
    assert here("init", "numbers", "--into", "project", "--run", "first").returncode == 0
    monkeypatch.chdir(folder / "project")
    found = here("plan", "job.toml")
    assert found.returncode == 0, found.stderr
    assert not Path(".dlac").exists()
    monkeypatch.setattr("os.getuid", lambda: 12_345)  # who owns none of these folders
    assert home_folder() == Path(".dlac")


@pytest.mark.parametrize(
    "command",
    [
        *("train job.toml", "table register points numbers", "table register lake.points numbers --dry-run"),
        *("init empty --into project", "chaos job.toml --kill rank@step=3 --steps 9", "runs"),
    ],
)
def test_failed_command_leaves_no_lakehouse(folder: Path, here: Command, command: str) -> None:
    """A command in the wrong folder is refused, or only reads. The next one in it finds no empty lakehouse."""
    Path("empty").mkdir()
    Path("train.py").touch()
    Path("job.toml").write_text(scaffold_job("first").replace("namespace.table", "lake.points"))
    refused = here(*command.split())
    assert (refused.returncode == 0) == command.endswith("--dry-run"), refused.stderr
    assert not Path(".dlac").exists()
    if command.startswith(("train", "plan", "chaos")):
        assert "run the command in the folder that has .dlac" in " ".join(refused.stderr.split())
