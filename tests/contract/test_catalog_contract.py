"""Promises about a catalog, on SQLite, PostgreSQL, SeaweedFS's Iceberg REST catalog with its S3 store, and moto's Glue."""

import secrets
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from typing import Any

import pytest
from pyiceberg.catalog import Catalog
from pyiceberg.exceptions import CommitFailedException
from pyiceberg.table import CommitTableResponse
from requests import ConnectionError as ConnectionAborted

from dlac_pipeline.extensions.upkeep.upkeep import run_upkeep
from dlac_pipeline.lakehouse.config import LakehouseConfig
from dlac_pipeline.lakehouse.errors import CommitConflict, Fenced, SteppedAside
from dlac_pipeline.lakehouse.iceberg.connect import Lakehouse, connect
from dlac_pipeline.lakehouse.iceberg.pins import hold
from dlac_pipeline.lakehouse.iceberg.snapshots import is_pinned, snapshot_of
from dlac_pipeline.lakehouse.ledger.commits import Attempt, claim, commit_checkpoint
from dlac_pipeline.lakehouse.ledger.ledger import Ledger
from dlac_pipeline.lakehouse.ledger.typed_rows import CheckpointRow
from tests.conftest import source_rows
from tests.object_store import object_store
from tests.postgres_server import needs_postgres, postgres
from tests.seaweedfs import needs_seaweedfs, seaweedfs
from tests.snapshots import check_readable

CATALOGS = [
    "sqlite",
    pytest.param("postgres", marks=needs_postgres),
    pytest.param("seaweedfs", marks=needs_seaweedfs),
    "glue",
]


@pytest.fixture(scope="module", params=CATALOGS)
def config(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LakehouseConfig]:
    """A catalog for all tests of this module."""
    folder = tmp_path_factory.mktemp("catalog")
    with ExitStack() as stack:
        if request.param == "seaweedfs":
            yield stack.enter_context(seaweedfs(folder)).lakehouse("dlac")
        elif request.param == "glue":
            yield stack.enter_context(object_store()).glue()
        else:
            uri = stack.enter_context(postgres()) if request.param == "postgres" else ""
            yield LakehouseConfig(uri=uri).at_home(folder / "home")


@pytest.fixture
def lakehouse(config: LakehouseConfig) -> Lakehouse:
    """The lakehouse of one test, in a new namespace."""
    return connect(config.model_copy(update={"namespace": f"dlac_{secrets.token_hex(4)}"}))


def checkpoint(ledger: Ledger, nonce: str = "n1") -> Any:
    """Commit the first checkpoint of the first attempt."""
    rows = [CheckpointRow(checkpoint_id="a")]
    attempt = Attempt(run="r", number=1, nonce=nonce)
    return commit_checkpoint(ledger, attempt, checkpoint_id="a", parent=None, rows=rows)


def skip_moto(lakehouse: Lakehouse) -> None:
    """Skip a test whose commits race, on a server that lets both land."""
    if lakehouse.config.kind == "glue":
        pytest.skip("moto ignores the VersionId by which AWS Glue refuses the second of two commits")


def committing_class(lakehouse: Lakehouse) -> Any:
    """PyIceberg's own class, under the guard, that commits."""
    bases: list[type[Catalog]] = [each for each in type(lakehouse.catalog).__mro__ if "commit_table" in vars(each)]
    return next(each for each in bases if each.__module__.startswith("pyiceberg."))


def replayed(commit: Any, request: Any) -> CommitTableResponse:
    """The answer is lost, and the transport sends the request again."""
    commit(*request)
    answer: CommitTableResponse = commit(*request)
    return answer


def unanswered(commit: Any, request: Any) -> CommitTableResponse:
    """The commit lands, and the connection breaks before the answer."""
    commit(*request)
    raise ConnectionAborted("the connection was closed")


def test_one_racing_claim_wins(lakehouse: Lakehouse) -> None:
    """The others step aside, and claims of other runs at the same time all land."""
    skip_moto(lakehouse)

    def claims(number: int) -> bool:
        ledger = Ledger(connect(lakehouse.config))
        claim(ledger, f"own-{number}", nonce="n", replaces=0)
        try:
            claim(ledger, "wanted", nonce=f"n{number}", replaces=0)
        except SteppedAside:
            return False
        return True

    with ThreadPoolExecutor(3) as pool:
        won = list(pool.map(claims, range(3)))
    assert won.count(True) == 1
    ledger = Ledger(lakehouse)
    assert ledger.runs() == ["own-0", "own-1", "own-2", "wanted"]
    assert len(ledger.rows("wanted")) == 1


def test_stale_append_is_refused(lakehouse: Lakehouse) -> None:
    """Two writers read one state: the second is refused, and the refusal deletes nothing."""
    claim(Ledger(lakehouse), "r", nonce="n1", replaces=0)
    stale = lakehouse.own("consumption")
    rows = stale.scan().to_arrow()
    claim(Ledger(lakehouse), "other", nonce="n1", replaces=0)
    with pytest.raises(CommitConflict, match="did not land"):
        stale.append(rows)
    check_readable(lakehouse)


@pytest.mark.parametrize("fault", [replayed, unanswered])
def test_lost_answer_is_resolved(lakehouse: Lakehouse, monkeypatch: pytest.MonkeyPatch, fault: Any) -> None:
    """A commit whose answer is lost, or whose request is repeated, is in the ledger once and can be read."""
    claim(Ledger(lakehouse), "r", nonce="n1", replaces=0)
    owner = committing_class(lakehouse)
    real, calls = owner.commit_table, 0

    def commit_table(self: Catalog, *request: Any) -> Any:
        nonlocal calls
        calls += 1
        commit = partial(real, self)
        return fault(commit, request) if calls == 1 else commit(*request)

    monkeypatch.setattr(owner, "commit_table", commit_table)
    assert checkpoint(Ledger(lakehouse)).fence.head == "a"
    assert len(Ledger(lakehouse).rows("r", kinds=[CheckpointRow])) == 1
    check_readable(lakehouse)


def test_replay_is_refused_by_server(lakehouse: Lakehouse) -> None:
    """The server itself refuses a request that it has answered before, on which the guard relies."""
    claim(Ledger(lakehouse), "r", nonce="n1", replaces=0)
    owner, requests = committing_class(lakehouse), []
    real = owner.commit_table

    def commit_table(self: Catalog, *request: Any) -> Any:
        requests.append(request)
        return real(self, *request)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, "commit_table", commit_table)
        claim(Ledger(lakehouse), "other", nonce="n1", replaces=0)
    with pytest.raises(CommitFailedException):
        owner.commit_table(lakehouse.catalog, *requests[-1])


def test_stale_attempt_is_fenced(lakehouse: Lakehouse) -> None:
    """An attempt that was replaced commits no checkpoint."""
    claim(Ledger(lakehouse), "r", nonce="n1", replaces=0)
    claim(Ledger(connect(lakehouse.config)), "r", nonce="n2", replaces=1)
    with pytest.raises(Fenced):
        checkpoint(Ledger(lakehouse))
    assert [row.kind for row in Ledger(lakehouse).rows("r")] == ["claim", "claim"]


def test_expiry_keeps_pins(lakehouse: Lakehouse) -> None:
    """A pinned snapshot is read after all others were expired."""
    namespace = f"src_{secrets.token_hex(4)}"
    lakehouse.create_namespace(namespace)
    name, rows = f"{namespace}.t", source_rows(0, 10)
    lakehouse.catalog.create_table(name, rows.schema).append(rows)
    first = snapshot_of(lakehouse.load(name), None).snapshot_id
    assert hold(lakehouse, name, first, "tag")
    for _ in range(2):
        lakehouse.load(name).append(rows)
    table = lakehouse.load(name)
    current = snapshot_of(table, None).snapshot_id
    others = [each.snapshot_id for each in table.snapshots() if each.snapshot_id not in (first, current)]
    table.maintenance.expire_snapshots().by_ids(others).commit()
    table = lakehouse.load(name)
    assert is_pinned(table, name, first)
    assert table.scan(snapshot_id=first).to_arrow().num_rows == 10


def test_upkeep_during_commits(lakehouse: Lakehouse) -> None:
    """Upkeep and commits run at the same time: no row is lost, and retained snapshots can be read."""
    skip_moto(lakehouse)
    claim(Ledger(lakehouse), "r", nonce="n1", replaces=0)
    with ThreadPoolExecutor(2) as pool:
        upkeep = pool.submit(run_upkeep, connect(lakehouse.config), keep=1)
        for number in range(3):
            claim(Ledger(lakehouse), f"more-{number}", nonce="n", replaces=0)
        upkeep.result()
    run_upkeep(lakehouse, keep=1)
    assert Ledger(lakehouse).runs() == ["more-0", "more-1", "more-2", "r"]
    check_readable(lakehouse)
