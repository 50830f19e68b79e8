"""Alternatives to DLAC, one small module per loader, all with one protocol.

A module of this package is a loader of `dlac check-loader`, whose protocol is in `dlac_pipeline.extensions.loader_check`.
Each runs in its own environment, and also has

    PACKAGES: list[str]    distributions whose versions are reported
    NOTES: list[str]       its use, for the reader of the table

DLAC's own loader, `dlac`, has the same protocol in the project's environment: `open_loader` makes a `JobSpec`
from `job` (home folder in `job.home`, table in `job.table`), and its `Loader` yields the batches of `DlacDataset`, returns
`batch.tensors["row_id"]` as ids, and packs `state_dict()` into bytes. It has no `convert`, because it reads the table.

A module imports at its top everything that the loader would import late: a launch is timed from `open_loader` on.
"""
