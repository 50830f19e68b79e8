"""Connection to a catalog: `LakehouseConfig` in, `Lakehouse` out."""

import re
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from difflib import get_close_matches
from typing import Any, TypeVar

from pyiceberg import exceptions
from pyiceberg.catalog import Catalog
from pyiceberg.expressions import AlwaysTrue, BooleanExpression, EqualTo, GreaterThan, In, IsNull, LessThanOrEqual
from pyiceberg.io import FileIO, load_file_io
from pyiceberg.schema import Schema
from pyiceberg.table import Table
from sqlalchemy.exc import IntegrityError, OperationalError, ProgrammingError, SQLAlchemyError

from dlac_pipeline.lakehouse import errors, outages
from dlac_pipeline.lakehouse.config import CUSTOM_CATALOG, LakehouseConfig, sqlite_file
from dlac_pipeline.lakehouse.durable_io import make_folder_durably
from dlac_pipeline.lakehouse.iceberg import relocation as relocations
from dlac_pipeline.lakehouse.iceberg.metadata_files import metadata_files, version_of
from dlac_pipeline.lakehouse.iceberg.own_rows import read_rows
from dlac_pipeline.lakehouse.iceberg.safe_commit import MetadataMissing, guarded_catalog
from dlac_pipeline.lakehouse.iceberg.sqlite_locks import is_locked, locked_by
from dlac_pipeline.lakehouse.ledger.schemas import FORMAT_VERSION, FORMAT_VERSION_PROPERTY, TABLES, ledger_uuid_of
from dlac_pipeline.lakehouse.masking import mask_secrets
from dlac_pipeline.lakehouse.named_catalogs import configured, source_catalog
from dlac_pipeline.lakehouse.outages import check_address, is_misconfigured, is_refused_client
from dlac_pipeline.lakehouse.retrying import may_pass, rereading, retrying
from dlac_pipeline.lakehouse.source_names import mirror_name, split_identifier

_T = TypeVar("_T")
# The Iceberg expressions of a column and a value, whose pydantic bases hide the real signatures.
equals: Callable[[str, str], BooleanExpression] = EqualTo  # type: ignore[assignment]
at_most: Callable[[str, int], BooleanExpression] = LessThanOrEqual  # type: ignore[assignment]
more_than: Callable[[str, int], BooleanExpression] = GreaterThan  # type: ignore[assignment]
among: Callable[[str, Sequence[str] | Sequence[int]], BooleanExpression] = In  # type: ignore[assignment]
NO_KEY: BooleanExpression = IsNull("key")  # type: ignore[arg-type,call-arg]
"""The rows of `row_keys` that name a data file."""
TABLE_PROPERTIES = {
    "commit.retry.num-retries": "0",
    "commit.manifest-merge.enabled": "true",
    "write.metadata.delete-after-commit.enabled": "true",
    "write.metadata.previous-versions-max": "10",
    "write.metadata.metrics.default": "none",
    FORMAT_VERSION_PROPERTY: str(FORMAT_VERSION),
}
_OF_KEYS = {"write.parquet.row-group-limit": "131072", "write.parquet.dict-size-bytes": "65536"}
LOOKS_AT_OLDER_S = (0.2, 0.4, 0.8, 0.0)
"""Pauses after looks that find an own table older than before."""
_TABLES_ABSENT = re.compile(r"no such table|does not exist|UndefinedTable")
_REFUSALS = (exceptions.BadRequestError, exceptions.UnauthorizedError, exceptions.ForbiddenError, exceptions.OAuthError)


class Lakehouse:
    """An open catalog and DLAC's tables in it. `relocation` has the folders of a moved lakehouse."""

    def __init__(
        self,
        config: LakehouseConfig,
        catalog: Catalog,
        relocation: relocations.Relocation | None = None,
        *,
        named: LakehouseConfig | None = None,
    ) -> None:
        self.config = config
        """All settings, PyIceberg's configuration included: for this process only."""
        self.named = named or config
        """The settings as the job spec has them, which may be written."""
        self.catalog = catalog
        self._others: dict[str, Lakehouse] = {}
        """Further catalogs of source tables, by name."""
        self._seen: dict[str, tuple[str, int]] = {}
        """Uuid and last sequence number of each own table, as read last."""
        self.relocation = relocation or relocations.Relocation()

    def catalog_of(self, identifier: str) -> "tuple[Lakehouse, str]":
        """Return the catalog of a table, opened, and the table's name in it.

        A name such as "lake:docs.pages" means table docs.pages in the catalog that PyIceberg's configuration names lake.
        "delta:/data/pages" is a table of another format, whose mirror is in this catalog. Raises `CatalogMisconfigured`.
        """
        if split_identifier(identifier) is not None:
            return self, mirror_name(identifier, self.config.namespace)
        name, separator, table = identifier.partition(":")
        if not separator:
            return self, identifier
        if name not in self._others:
            config = source_catalog(name)
            check_address(config)
            with reachable(config.uri), opening(config.uri):  # it has source tables only: nothing is made in it
                self._others[name] = Lakehouse(config, open_catalog(config, relocations.Relocation(), create=False))
        return self._others[name], table

    def load(self, identifier: str) -> Table:
        """The table named `identifier` (namespace.table, or catalog:namespace.table) as it is now.

        Raises `NoSuchTable`, `CatalogUnreachable`, or `LakehouseError` if the table's metadata is not in the warehouse.
        """
        home, identifier = self.catalog_of(identifier)
        if home is not self:
            return home.load(identifier)
        if not all(part.strip() for part in identifier.split(".")) or "." not in identifier:
            raise errors.NoSuchTable(
                f"expected a table as namespace.table, found {identifier!r}: write its namespace before it"
            )
        with reachable(self.config.uri):
            try:
                return self._load(identifier)
            except exceptions.NoSuchTableError as err:
                raise _no_table(self.config, identifier, self._tables_beside(identifier)) from err
            except FileNotFoundError as err:
                raise self._metadata_problem(identifier, err) from err

    def _tables_beside(self, identifier: str) -> list[str]:
        with suppress(exceptions.NoSuchNamespaceError, exceptions.RESTError, NotImplementedError):
            return [".".join(each) for each in self.catalog.list_tables(identifier.rpartition(".")[0])]
        return []

    def _load(self, identifier: str) -> Table:
        try:
            return rereading()(self.catalog.load_table, identifier)  # many commits may have removed its metadata since
        except MetadataMissing as err:
            files: list[str] = []
            with suppress(errors.LakehouseError):
                files = metadata_files(self.file_io(err.location), err.location.rsplit("/", 1)[0])
            own = identifier in {f"{self.config.namespace}.{name}" for name in TABLES}
            if not own or not files or version_of(files[0]) <= version_of(err.location):
                raise
            raise errors.LedgerOlderThanStore(
                f"expected the newest state of table {identifier!r}, found that the catalog at {self.config.address!r} names "
                f"{err.location!r}, which is gone, while {files[0]!r} exists: the catalog was restored from an older backup; "
                f"nothing was deleted: {errors.HOW_TO_RENEW}"
            ) from err
        # pyiceberg's of a metadata file with other content
        except (exceptions.ValidationError, ValueError, KeyError, NotADirectoryError) as err:
            raise self._metadata_problem(identifier, err) from err

    def file_io(self, location: str) -> FileIO:
        """Return the file I/O of an address in the warehouse, for a table that the catalog does not have."""
        return load_file_io({**self.config.catalog_properties(), **self.relocation.properties()}, location)

    def _metadata_problem(self, identifier: str, err: Exception) -> errors.LakehouseError:
        reason = next(iter(str(err).splitlines()), "")
        return errors.MetadataLost(
            f"expected the metadata file of table {identifier!r}, which the catalog at {self.config.address!r} names, found "
            f"{type(err).__name__}: {reason}: mount the warehouse, restore the file from a backup of it, or, for a table of "
            "DLAC's own, stop all launches and run `dlac ledger rebuild`"
        )

    def has_ledger(self) -> bool:
        """Return whether the catalog has DLAC's ledger."""
        identifier = f"{self.config.namespace}.consumption"
        try:
            self._load(identifier)
        except (exceptions.NoSuchTableError, exceptions.NoSuchNamespaceError):
            return False
        except FileNotFoundError as err:
            raise self._metadata_problem(identifier, err) from err
        except (OperationalError, ProgrammingError) as err:
            if is_locked(err) or not _TABLES_ABSENT.search(str(err)):
                raise
            return False  # nor has it the tables of a catalog
        return True

    def own(self, name: str) -> Table:
        """Return DLAC's own table `name`, with the columns that an older version lacks. Raises `FormatTooNew`."""
        try:
            table = self._load_not_older(name)
        except errors.NoSuchTable:  # its maker was killed, or is still making it
            with reachable(self.config.uri):
                self._create(name)
            table = self._load_not_older(name)
        _check_format(name, table)
        if _lacks(table, TABLES[name][0]):
            with reachable(self.config.uri):
                self._evolve(f"{self.config.namespace}.{name}", TABLES[name][0])
            table = self._load_not_older(name)
        return table

    def uuid_of_own(self, name: str) -> str:
        """Return the identity of DLAC's own table `name`, which is read once: a later read never finds another table."""
        return self._seen[name][0] if name in self._seen else str(self.own(name).metadata.table_uuid)

    def _load_not_older(self, name: str) -> Table:
        """Load an own table. A history only ever grows: raises `LedgerOlderThanStore` for one of an older catalog."""
        known = self._seen.get(name, ("", 0))  # before the load, because other threads read newer tables during it
        for pause_s in LOOKS_AT_OLDER_S:
            try:
                table = self.load(f"{self.config.namespace}.{name}")
            except errors.NoSuchTable:
                if not known[0]:
                    raise
                found = ("", 0)
            else:
                found = _age_of(table)
                if found[0] == (known[0] or found[0]) and found[1] >= known[1]:
                    self.remember(name, table)
                    return table
            time.sleep(pause_s)  # a replica of the catalog may be late
        raise errors.LedgerOlderThanStore(
            f"expected table {name!r} with the {known[1]} commits that were read before, found "
            f"{f'{found[1]} commits' if found[0] == known[0] else 'another table, or none'}: the catalog at "
            f"{self.config.address!r} was replaced by an older backup while it was in use; nothing was deleted: "
            f"{errors.HOW_TO_RENEW}"
        )

    def remember(self, name: str, table: Table) -> None:
        """Remember DLAC's own table `name` as it was read, or committed: no later read may find an older one."""
        age = _age_of(table)
        self._seen[name] = max(self._seen.get(name, age), age, key=lambda each: each[1])

    def forget(self, name: str) -> None:
        """Forget the age of DLAC's own table `name`, after a commit that changes its identity."""
        self._seen.pop(name, None)

    def look(self, name: str, read: Callable[[Table], _T]) -> _T:
        """Return the result of `read` on DLAC's own table `name`. Read again if upkeep deletes files under it.

        Raises `CatalogUnreachable`, or `LakehouseError` if files that the table names are not in the warehouse.
        """
        try:
            with reachable(self.config.uri):
                return rereading()(lambda: read(self.own(name)))
        except FileNotFoundError as err:
            raise errors.LakehouseError(
                f"expected the files of table {name!r} in the warehouse, found {err}: retry if upkeep is running, else "
                "restore them, or stop all launches and run `dlac ledger rebuild`"
            ) from err

    def read_own(
        self,
        name: str,
        row_filter: BooleanExpression = AlwaysTrue(),  # noqa: B008 - a constant
        *,
        columns: Sequence[str] = ("*",),
    ) -> Any:
        """Return the current rows of DLAC's own table `name` as an Arrow table. Raises as `look` does."""
        return self.look(name, lambda table: read_rows(table, row_filter, columns=columns))

    def create_own_tables(self) -> None:
        """Create DLAC's missing tables. Safe to race. Raises `CommitConflict` if it loses."""
        with reachable(self.config.uri):
            self.create_namespace(self.config.namespace)
            for name in TABLES:
                if not self.catalog.table_exists(f"{self.config.namespace}.{name}"):
                    self._create(name)

    def _create(self, name: str) -> None:
        identifier, (schema, spec) = f"{self.config.namespace}.{name}", TABLES[name]
        try:
            with suppress(exceptions.TableAlreadyExistsError):
                self.catalog.create_table(identifier, schema, partition_spec=spec, properties=properties_of(name))
        except (FileNotFoundError, ValueError) as err:  # pyiceberg's of a setting, and of a folder that cannot be made
            kind = errors.LakehouseError if isinstance(err, OSError) else errors.CatalogMisconfigured
            raise kind(
                f"expected to make table {identifier!r} in the warehouse {mask_secrets(self.config.warehouse)!r}, found "
                f"{type(err).__name__}: {err}: correct lakehouse.warehouse or lakehouse.properties"
            ) from err

    def record_place(self) -> None:
        """Record where an SQLite catalog is made, once: by that it is known that it was moved or copied."""
        file, namespace = sqlite_file(self.config.uri), self.config.namespace
        if file is None or relocations.MADE_AT in self.catalog.load_namespace_properties(namespace):
            return
        place = self.relocation.to_recorded(str(file.resolve()))
        with suppress(IntegrityError, OperationalError):  # another process was faster, or the catalog may only be read
            self.catalog.update_namespace_properties(namespace, updates={relocations.MADE_AT: place})

    def _evolve(self, identifier: str, schema: Schema) -> None:
        """Add the columns and fields of structs that a table of an older version lacks, as optional ones."""

        def once() -> None:
            table = self._load(identifier)
            if _lacks(table, schema):
                with table.update_schema() as update:
                    update.union_by_name(schema)

        retrying(of=errors.CommitConflict)(once)

    def create_namespace(self, namespace: str) -> None:
        """Create `namespace` unless it exists. Safe to race."""
        with reachable(self.config.uri), suppress(exceptions.NamespaceAlreadyExistsError, IntegrityError):
            self.catalog.create_namespace_if_not_exists(namespace)


def properties_of(name: str) -> dict[str, str]:
    """Return the properties of DLAC's own table `name`."""
    return TABLE_PROPERTIES | (_OF_KEYS if name == "row_keys" else {})


def _check_format(name: str, table: Table) -> None:
    """Raise `FormatTooNew` for a newer format, or for columns of no format: its versions only add columns at the end."""
    found = int(table.properties.get(FORMAT_VERSION_PROPERTY, "1"))
    if found > FORMAT_VERSION:
        raise errors.FormatTooNew(
            f"table {name!r} has format version {found}, this DLAC reads up to {FORMAT_VERSION}: upgrade DLAC"
        )
    columns, known = ([each.name for each in schema.fields] for schema in (table.schema(), TABLES[name][0]))
    if any(one != other for one, other in zip(columns, known, strict=False)):
        raise errors.FormatTooNew(
            f"expected the columns of format version {FORMAT_VERSION} in table {name!r}, found columns {columns!r}: an "
            "unreleased DLAC wrote the table, so train its runs to their end with that DLAC, or name another lakehouse with "
            "--home or lakehouse.namespace"
        )


def _lacks(table: Table, schema: Schema) -> bool:
    """Return True if a table lacks a column, or a field of a struct."""
    return not set(schema.column_names) <= set(table.schema().column_names)


def last_sequence_number(table: Table) -> int:
    """Return the number of the table's last commit with a snapshot, or 0 if its format has none."""
    return int(getattr(table.metadata, "last_sequence_number", 0))


def _age_of(table: Table) -> tuple[str, int]:
    return ledger_uuid_of(table), last_sequence_number(table)


def connect(
    config: LakehouseConfig, *, create: bool = True, tables: Sequence[str] = (), answered: bool = False
) -> Lakehouse:
    """Open the catalog and make sure that DLAC's tables exist. Without a lakehouse, only `create` makes one.

    - `tables`: source tables without which none is made, because a lakehouse in the wrong folder would answer from then on.
    - `answered`: another process of the run has opened this catalog, so a transient failure is an outage.

    Raises `CatalogUnreachable`, `CatalogMisconfigured` for a wrong address, name or credentials, `NoSuchLakehouse`, or
    `NoSuchTable` for one of `tables`, of a catalog without DLAC's tables.
    """
    named, config = config, checked_config(config, answered=answered)
    recorded = read_places(config, answered=answered)
    if not create and recorded is not None and recorded.ledger_metadata is None:
        raise _no_lakehouse(config)
    if create:
        check_tables_may_exist(config, tables)
        _make_folder(config)
    relocation = relocations.Relocation() if recorded is None else relocations.find_relocation(config, recorded)
    with reachable(config.uri):
        with opening(config.uri, answered=answered):
            lakehouse = Lakehouse(config, open_catalog(config, relocation, create=create), relocation, named=named)
            exists = lakehouse.has_ledger()
            if not create and not exists:
                raise _no_lakehouse(config)
        if not exists:
            for each in tables:
                lakehouse.load(each)
            lakehouse.create_own_tables()
        lakehouse.record_place()
    return lakehouse


def checked_config(config: LakehouseConfig, *, answered: bool = False) -> LakehouseConfig:
    """Return all settings of a lakehouse. Raise `CatalogMisconfigured` if no catalog for DLAC's tables can have them."""
    config = configured(config)
    if config.kind in ("dynamodb", "bigquery"):
        raise errors.CatalogMisconfigured(
            f"expected a catalog for DLAC's tables to which PyIceberg can commit, found {config.address!r}, which it can only "
            'read: name another catalog for the lakehouse, and this one in source.table (catalog:NAME), with pin = "none"'
        )
    check_address(config, answered=answered)
    return config


def check_tables_may_exist(config: LakehouseConfig, tables: Sequence[str]) -> None:
    """Raise `NoSuchTable` for tables of a catalog whose file does not exist, or as `connect` if its folder cannot be made."""
    file = sqlite_file(config.uri)
    if tables and file is not None and not file.exists():
        missing = [each for each in file.parents if not each.exists()]
        _make_folder(config)
        with suppress(OSError):
            for each in missing:
                each.rmdir()
        raise _no_table(config, tables[0])


def _no_table(config: LakehouseConfig, identifier: str, known: Sequence[str] = ()) -> errors.NoSuchTable:
    close = get_close_matches(identifier, known, n=1)
    meant = f"did you mean {close[0]!r}? Else " if close else ""
    return errors.NoSuchTable(
        f"expected a table named {identifier!r} in the catalog at {config.address!r}, found none: {meant}run the command in the "
        "folder that has .dlac, or name another embedded lakehouse with --home or DLAC_HOME"
    )


def _no_lakehouse(config: LakehouseConfig) -> errors.NoSuchLakehouse:
    return errors.NoSuchLakehouse(
        f"expected a lakehouse of DLAC at {config.address!r}, found none: name its home with --home or DLAC_HOME, or its job "
        "spec with --spec; `dlac train SPEC` makes one"
    )


def _make_folder(config: LakehouseConfig) -> None:
    file = sqlite_file(config.uri)
    if file is None:
        return
    try:
        make_folder_durably(file.parent)
    except OSError as err:
        kind = errors.CatalogUnreachable if may_pass(err) else errors.CatalogMisconfigured
        raise kind(
            f"expected a folder for the catalog at {config.address!r}, found {err}: correct the address, or mount the folder"
        ) from err


def read_places(config: LakehouseConfig, *, answered: bool = False) -> relocations.Recorded | None:
    """Read the places that an SQLite catalog records. Wait while another process has it locked. None: another catalog."""
    file = sqlite_file(config.uri)
    if file is None:
        return None
    if answered and not file.is_file():
        raise errors.CatalogUnreachable(
            f"expected the SQLite catalog of this run at {str(file)!r}, found no such file any more: mount its folder, or "
            "restore the file"
        )
    try:
        return relocations.read_recorded(file, config)
    except (sqlite3.Error, OSError) as err:
        kind = errors.CatalogMisconfigured if is_misconfigured(err, answered=answered) else errors.CatalogUnreachable
        raise kind(
            f"expected an SQLite catalog that can be read at {str(file)!r}, found {err}; {locked_by(file)}"
            "correct the address, or restore the file from a backup"
        ) from err


def open_catalog(config: LakehouseConfig, relocation: relocations.Relocation, *, create: bool) -> Catalog:
    """Open the catalog. If two processes create an SQL catalog's tables at once, both succeed."""
    properties = {**config.catalog_properties(), **relocation.properties()}
    warehouse = relocations.raw_path(config.warehouse)
    if warehouse is not None:  # a table made now is recorded as those that were made before the move
        properties["warehouse"] = f"file://{relocation.to_recorded(warehouse)}"
    if not create and config.kind == "sql":
        properties.setdefault("init_catalog_tables", "false")
    kind, name = properties.pop(CUSTOM_CATALOG, config.kind), config.catalog_name
    for delay_s in (0.1, 0.5):
        try:
            return guarded_catalog(kind)(name, **properties)
        except ModuleNotFoundError as err:
            raise errors.SpecInvalid(
                f"the catalog at {config.address!r} needs the Python module {err.name!r}: install it"
            ) from err
        except SQLAlchemyError as err:
            if is_locked(err) or is_misconfigured(err):
                raise
            time.sleep(delay_s)
    return guarded_catalog(kind)(name, **properties)


@contextmanager
def opening(uri: str, *, answered: bool = False) -> Iterator[None]:
    """Turn failures of address and credentials, which do not pass, into `CatalogMisconfigured` while a catalog is opened.

    Later the same failures are an outage: a catalog that has answered has the right address.
    """
    shown = mask_secrets(uri) or "the service's own address"
    try:
        yield
    except Exception as err:
        opening = isinstance(err, SQLAlchemyError | outages.http_error() | exceptions.RESTError | ValueError)
        known = is_misconfigured(err, answered=answered) if opening else is_refused_client(err)
        if not isinstance(err, _REFUSALS) and not known:
            raise
        raise errors.CatalogMisconfigured(
            f"expected a catalog at {shown!r} that takes this address and these credentials, found {_describe_error(err, uri)}; "
            "correct lakehouse.uri, or lakehouse.properties"
        ) from err


@contextmanager
def reachable(uri: str) -> Iterator[None]:
    """Turn the failures of a catalog or its warehouse that do not answer into `CatalogUnreachable`.

    A failure that does not pass becomes a `LakehouseError`. A missing file is left to the caller: others may have removed it.
    """
    shown = mask_secrets(uri) or "the service's own address"
    try:
        yield
    except _REFUSALS as err:
        raise errors.LakehouseError(
            f"expected the catalog at {shown!r} to take a request, found {_describe_error(err, uri)}; "
            "check the address, the credentials and what they allow"
        ) from err
    except (SQLAlchemyError, outages.http_error(), exceptions.RESTError) as err:
        if outages.is_unknown_host(err):
            raise errors.CatalogHostUnknown(
                f"expected the host of the catalog at {shown!r} to have an address, found {_describe_error(err, uri)}; "
                "correct the name in lakehouse.uri"
            ) from err
        file = sqlite_file(uri)
        holder = "" if file is None or not is_locked(err) else locked_by(file)
        raise errors.CatalogUnreachable(
            f"expected the catalog at {shown!r} to answer, found {_describe_error(err, uri)}; {holder}"
            "check the address, the network and the credentials, then try again"
        ) from err
    except FileNotFoundError:
        raise
    except OSError as err:
        kind = errors.CatalogUnreachable if may_pass(err) else errors.LakehouseError
        raise kind(
            f"expected the warehouse of the catalog at {shown!r} to be read and written, found {type(err).__name__}: {err}; "
            "free, mount or reach it"
        ) from err
    except Exception as err:
        if not outages.is_client_error(err):
            raise
        kind = errors.LakehouseError if is_refused_client(err) else errors.CatalogUnreachable
        raise kind(
            f"expected the catalog at {shown!r} to answer, found {mask_secrets(_describe_error(err, uri))}; check its address, "
            "the credentials and what they allow, then try again"
        ) from err


def _describe_error(err: Exception, uri: str) -> str:
    """Return the class of an error and the first line of its message, without the catalog's password."""
    lines = str(err).splitlines() or [""]
    return f"{type(err).__name__}: {lines[0].replace(uri, mask_secrets(uri)) if uri else lines[0]}"
