"""Causes of a catalog's failure to answer: a wrong address, wrong credentials, or an outage."""

import re
import sqlite3
from urllib.parse import urlsplit

from pyiceberg.exceptions import RESTError
from sqlalchemy import make_url
from sqlalchemy.exc import ArgumentError, DBAPIError

from dlac_pipeline.lakehouse.config import LakehouseConfig, sqlite_file
from dlac_pipeline.lakehouse.errors import CatalogMisconfigured
from dlac_pipeline.lakehouse.iceberg.sqlite_locks import is_locked

_UNKNOWN_HOST = ("Name or service not known", "nodename nor servname", "No address associated with hostname")
_DAMAGED = ("not a database", "disk image is malformed")
_REFUSED = re.compile(
    "(password|Ident|Peer) authentication failed|no password supplied|is not permitted to log in|server does not support SSL|"
    "invalid (port number|connection option|URI query parameter|sslmode)|certificate verify failed|CERTIFICATE_VERIFY_FAILED|"
    "WRONG_VERSION_NUMBER|" + "|".join(_DAMAGED)
)
"""Messages of servers and drivers for requests that stay wrong, without a class of their own."""
_REFUSED_AT_FIRST = re.compile(
    r"no pg_hba\.conf entry|unable to open database file|RESTError 40[45]|RestError: (Not Found|Method Not Allowed)"
)
"""Answers to an address that never worked, and to a right one during a failover or without its mount."""
_NO_DATABASE = ('database "', 'role "')
_WANTED = {
    "sql": "an address such as postgresql+psycopg2://user@host:5432/database or sqlite:////folder/catalog.db",
    "rest": "an address such as https://host:8181",
    "hive": "an address such as thrift://host:9083",
}
_CLIENTS = ("botocore.", "thrift.", "google.api_core.", "google.auth.")
"""Packages of the clients of Glue, Hive and BigQuery, which are installed only where they are used."""
_CLIENT_REFUSED = re.compile(
    "AccessDenied|UnrecognizedClient|InvalidSignature|ExpiredToken|InvalidClientTokenId|InvalidEndpoint|NoCredentials|NoRegion|"
    "ProfileNotFound|PermissionDenied|Unauthenticated|DefaultCredentials"
)
"""Names of the errors of such clients for wrong or missing credentials."""


def check_address(config: LakehouseConfig, *, answered: bool = False) -> None:
    """Raise `CatalogMisconfigured` if no catalog can have the address, before it is opened or created.

    `answered`: the catalog has answered at this address before. A folder in place of its file is an outage then, such as a mount
    point without its mount.
    """
    wanted = _WANTED.get(config.kind)
    if wanted is None:
        return  # such a service has its address from its own client
    try:
        if config.kind != "sql":
            parts, schemes = urlsplit(config.uri), ("http", "https") if config.kind == "rest" else ("thrift",)
            if parts.scheme not in schemes or not parts.hostname or parts.port == 0:
                raise ValueError(f"no {' or '.join(schemes)}://host with a port from 1 to 65535")
            return
        url = make_url(config.uri)
        if url.port is not None and not 0 < url.port < 65536:
            raise ValueError("a port outside 1 to 65535")
        if url.get_backend_name() == "sqlite" and (url.host or url.database in (None, "", ":memory:")):
            raise ValueError("no file that several processes can open")
        if url.query.get("uri") == "true" and not str(url.database).startswith("file:"):
            raise ValueError("uri=true without file: before the path, as in sqlite:///file:/folder/catalog.db?uri=true")
        file = sqlite_file(config.uri)
        if file is not None and not answered and file.exists() and not file.is_file():
            raise ValueError("a folder or a device in place of the file")
    except (ValueError, ArgumentError) as err:
        reason = str(err).splitlines()[0]
        raise CatalogMisconfigured(
            f"expected {wanted}, found {config.address!r} ({reason}): correct lakehouse.uri"
        ) from err


def http_error() -> type[Exception]:
    """Return the error of HTTP clients. Its import takes long, and most commands see no such error."""
    from requests import RequestException

    return RequestException


def is_misconfigured(err: Exception, *, answered: bool = False) -> bool:
    """Return whether a new catalog fails for its address or credentials. `answered`: it has answered there before."""
    from requests.exceptions import InvalidSchema, InvalidURL

    if isinstance(err, ArgumentError | InvalidURL | InvalidSchema):
        return True
    if isinstance(err, http_error() | RESTError | DBAPIError):
        message = str(err)
        refused = _REFUSED.search(message) or (not answered and _REFUSED_AT_FIRST.search(message))
        no_database = any(name in message for name in _NO_DATABASE) and "does not exist" in message
        return no_database or bool(refused)
    if isinstance(err, sqlite3.Error | OSError):  # of the file itself
        damaged = any(each in str(err) for each in _DAMAGED)
        return damaged if answered else not is_locked(err)
    return isinstance(err, ValueError)


def is_client_error(err: Exception) -> bool:
    """Return whether an error comes from the client of a cloud's or a Hive catalog."""
    return any(f"{each.__module__}.".startswith(_CLIENTS) for each in type(err).__mro__)


def is_refused_client(err: Exception) -> bool:
    """Return whether such a client has wrong credentials, or none."""
    return is_client_error(err) and bool(_CLIENT_REFUSED.search(f"{type(err).__name__} {err}"))


def is_unknown_host(err: Exception) -> bool:
    """Return whether the name of the catalog's host does not resolve, and the name server has answered."""
    return any(each in str(err) for each in _UNKNOWN_HOST)
