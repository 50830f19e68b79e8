"""From a lakehouse's settings to an open catalog: `LakehouseConfig` in, `Lakehouse` out."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import requests
from pyiceberg.catalog import Catalog
from pyiceberg.exceptions import (
    BadRequestError,
    ForbiddenError,
    NamespaceAlreadyExistsError,
    NoSuchTableError,
    OAuthError,
    RESTError,
    TableAlreadyExistsError,
    UnauthorizedError,
)
from pyiceberg.expressions import AlwaysTrue, BooleanExpression, EqualTo, GreaterThan, In, LessThanOrEqual
from pyiceberg.schema import Schema
from pyiceberg.table import Table
from sqlalchemy.exc import IntegrityError, SQLAlchemyError

from catalog.errors import CatalogUnreachable, CommitConflict, FormatTooNew, LakehouseError, NoSuchTable, SpecInvalid
from catalog.guarded import GUARDED
from catalog.lakehouse_config import LakehouseConfig, without_password
from catalog.retrying import may_pass, rereading, retrying
from catalog.schemas import FORMAT_VERSION, FORMAT_VERSION_PROPERTY, TABLES

_T = TypeVar("_T")
_TABLE_PROPERTIES = {
    "commit.retry.num-retries": "0",
    "commit.manifest-merge.enabled": "true",
    "write.metadata.delete-after-commit.enabled": "true",
    "write.metadata.previous-versions-max": "10",
    "write.metadata.metrics.default": "none",
    FORMAT_VERSION_PROPERTY: str(FORMAT_VERSION),
}
_REFUSALS = (BadRequestError, UnauthorizedError, ForbiddenError, OAuthError)


class Lakehouse:
    """An open catalog and DLAC's tables in it."""

    def __init__(self, config: LakehouseConfig, catalog: Catalog) -> None:
        self.config = config
        self.catalog = catalog

    def load(self, identifier: str) -> Table:
        """The table named `identifier` (namespace.table) as it is now.

        Raises:
            NoSuchTable: there is none.
            CatalogUnreachable: the catalog does not answer.
            LakehouseError: the table's metadata is not in the warehouse.
        """
        with reachable(self.config.uri):
            try:
                return self._load(identifier)
            except NoSuchTableError as err:
                raise NoSuchTable(
                    f"expected a table named {identifier!r} in the catalog at {self.config.address!r}, found none; "
                    "another embedded lakehouse is named with --home or DLAC_HOME"
                ) from err
            except FileNotFoundError as err:
                raise LakehouseError(
                    f"expected the metadata of table {identifier!r} in the warehouse, found {err}: is it mounted?"
                ) from err

    def _load(self, identifier: str) -> Table:
        for _ in range(5):
            with suppress(FileNotFoundError):  # others committed so often meanwhile that these metadata are removed
                return self.catalog.load_table(identifier)
        return self.catalog.load_table(identifier)

    def own(self, name: str) -> Table:
        """DLAC's own table `name`, one of `schemas.TABLES`, as it is now.

        Raises:
            FormatTooNew: it was written by a newer DLAC.
        """
        table = self.load(f"{self.config.namespace}.{name}")
        found = int(table.properties.get(FORMAT_VERSION_PROPERTY, "1"))
        if found > FORMAT_VERSION:
            raise FormatTooNew(
                f"table {name!r} has format version {found}, this DLAC reads up to {FORMAT_VERSION}: upgrade DLAC"
            )
        return table

    def look(self, name: str, read: Callable[[Table], _T]) -> _T:
        """What `read` finds in DLAC's own table `name` as it is now; when upkeep deletes files under it, it reads again.

        Raises:
            CatalogUnreachable: the catalog does not answer.
            LakehouseError: files that the table names are not in the warehouse.
        """
        try:
            with reachable(self.config.uri):
                return rereading()(lambda: read(self.own(name)))
        except FileNotFoundError as err:
            raise LakehouseError(
                f"expected the files of table {name!r} in the warehouse, found {err}: ask again if upkeep is at work, else "
                "restore them"
            ) from err

    def read_own(
        self,
        name: str,
        row_filter: BooleanExpression = AlwaysTrue(),  # noqa: B008 - a constant
        *,
        columns: Sequence[str] = ("*",),
        limit: int | None = None,
    ) -> Any:
        """The rows of DLAC's own table `name` as it is now, as an Arrow table; raises as `look` does."""
        return self.look(
            name,
            lambda table: table.scan(row_filter=row_filter, selected_fields=tuple(columns), limit=limit).to_arrow(),
        )

    def create_own_tables(self) -> None:
        """Create those of DLAC's tables that do not exist, and give older ones the columns that came since; safe to race.

        Raises:
            CommitConflict: others changed the columns of one all the time.
        """
        with reachable(self.config.uri):
            self.create_namespace(self.config.namespace)
            for name, (schema, spec) in TABLES.items():
                identifier = f"{self.config.namespace}.{name}"
                try:
                    self._evolve(identifier, schema)
                except NoSuchTableError:
                    with suppress(TableAlreadyExistsError):
                        self.catalog.create_table(identifier, schema, partition_spec=spec, properties=_TABLE_PROPERTIES)

    def _evolve(self, identifier: str, schema: Schema) -> None:
        """Add the columns that a table of an older version lacks; columns are only ever added, as optional ones."""

        def once() -> None:
            table = self._load(identifier)
            known = {field.name for field in table.schema().fields}
            missing = [field for field in schema.fields if field.name not in known]
            if missing:
                with table.update_schema() as update:
                    for field in missing:
                        update.add_column(field.name, field.field_type)

        retrying(of=CommitConflict)(once)

    def create_namespace(self, namespace: str) -> None:
        """Create `namespace` unless it exists; safe to race."""
        with reachable(self.config.uri), suppress(NamespaceAlreadyExistsError, IntegrityError):  # pyiceberg's own race
            self.catalog.create_namespace_if_not_exists(namespace)


def connect(config: LakehouseConfig) -> Lakehouse:
    """Open the catalog and make sure that DLAC's tables exist.

    Raises:
        CatalogUnreachable: the catalog does not answer.
    """
    if config.uri.startswith("sqlite:///"):
        folder = Path(config.uri.removeprefix("sqlite:///").split("?")[0]).parent
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as err:
            raise CatalogUnreachable(
                f"expected a folder for the catalog at {config.address!r}, found {err}: correct the address, or mount the folder"
            ) from err
    with reachable(config.uri):
        lakehouse = Lakehouse(config, _open(config))
        lakehouse.create_own_tables()
    return lakehouse


def _open(config: LakehouseConfig) -> Catalog:
    """Open the catalog; two processes that create an SQL catalog's tables at once both get there."""
    for delay_s in (0.1, 0.5):
        try:
            return GUARDED[config.type](config.name, **config.catalog_properties())
        except ModuleNotFoundError as err:
            raise SpecInvalid(
                f"the catalog at {config.address!r} needs the Python module {err.name!r}: install it"
            ) from err
        except SQLAlchemyError:
            time.sleep(delay_s)
    return GUARDED[config.type](config.name, **config.catalog_properties())


def equals(column: str, value: str) -> BooleanExpression:
    """The Iceberg expression `column = value`."""
    return EqualTo(column, value)  # type: ignore[call-arg,arg-type]  # its pydantic base hides the real signature


def at_most(column: str, value: int) -> BooleanExpression:
    """The Iceberg expression `column <= value`."""
    return LessThanOrEqual(column, value)  # type: ignore[call-arg,arg-type]  # its pydantic base hides the real signature


def more_than(column: str, value: int) -> BooleanExpression:
    """The Iceberg expression `column > value`."""
    return GreaterThan(column, value)  # type: ignore[call-arg,arg-type]  # its pydantic base hides the real signature


def among(column: str, values: Sequence[str]) -> BooleanExpression:
    """The Iceberg expression `column IN values`."""
    return In(column, set(values))  # type: ignore[call-arg,arg-type]  # its pydantic base hides the real signature


@contextmanager
def reachable(uri: str) -> Iterator[None]:
    """Turn the failures of a catalog or its warehouse that do not answer into `CatalogUnreachable`.

    What waiting does not mend becomes a `LakehouseError`. A file that is not there is the caller's: others may have removed it.
    """
    shown = without_password(uri)
    try:
        yield
    except _REFUSALS as err:
        raise LakehouseError(
            f"expected the catalog at {shown!r} to take a request, found {_said(err, uri)}; "
            "check the address, the credentials and what they allow"
        ) from err
    except (SQLAlchemyError, requests.RequestException, RESTError) as err:
        raise CatalogUnreachable(
            f"expected the catalog at {shown!r} to answer, found {_said(err, uri)}; "
            "check the address, the network and the credentials, then try again"
        ) from err
    except FileNotFoundError:
        raise
    except OSError as err:
        kind = CatalogUnreachable if may_pass(err) else LakehouseError
        raise kind(
            f"expected the warehouse of the catalog at {shown!r} to be read and written, found {type(err).__name__}: {err}; "
            "free, mount or reach it"
        ) from err


def _said(err: Exception, uri: str) -> str:
    """The class of an error and the first line of what it says, without the catalog's password."""
    return f"{type(err).__name__}: {str(err).splitlines()[0].replace(uri, without_password(uri))}"
