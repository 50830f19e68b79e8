"""The class of a catalog as users write their own: py-catalog-impl names it."""

from pyiceberg.catalog.sql import SqlCatalog


class OwnCatalog(SqlCatalog):
    """A catalog of a user's own."""
