"""Limits of a certificate: places that DLAC does not see, and that may keep the rows, or weights that were trained on them.

docs/extensions/erasure.md lists the same places.
"""

import duckdb

LIMITS = (
    "The weights are those of a training without the rows, for the same world size, kernels and versions: others may round "
    "differently.",
    "In packed sequences, later documents have other positions and neighbors than with the rows.",
    "The rows in the source table are not deleted, nor are its older snapshots.",
    "The ledger keeps traces: the filters in rewinds, plans and legs, and until dlac forget traces, digests of keys of the rows "
    "and the losses of the steps with them.",
    "Exports and passports are not deleted. Each run lists those that DLAC made. Copies of them are not known.",
    "Backups of the catalog, the warehouse or a checkpoint store, copies of checkpoints outside of the stores, and deleted "
    "files of a versioned bucket are not known.",
    "Memory states and local copies of checkpoints on other nodes are not known, until the next attempt of the run there "
    "removes them.",
    "Rows that were read by open_dataset, by another program, or by a training that Shadow recorded are not in the ledger.",
    "Events, losses and metrics that listeners sent to other systems, launch folders, logs and sandboxes are not covered.",
    "Runs of other lakehouses, and models that were trained from the weights outside of DLAC, are not known.",
    "A new run, or a new leg with another snapshot, reads the rows, unless its job spec excludes them.",
)
"""Limits of every certificate."""
_ADOPTED = """
SELECT format('Run {} began with weights from {}, of unknown origin: they, and so the checkpoints and forks of the run, may have '
    || 'seen the rows.', run, adopted)
FROM checkpoints
WHERE adopted IS NOT NULL AND forked_from IS NULL
ORDER BY run
"""


def certificate_limits(connection: duckdb.DuckDBPyConnection) -> list[str]:
    """Return the limits of a certificate over the ledger of a connection, limits of adopted weights in its runs included."""
    return [*LIMITS, *(text for (text,) in connection.execute(_ADOPTED).fetchall())]
