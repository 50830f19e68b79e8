"""Alternatives to DLAC, one small module per loader, all with one protocol.

A module of this package is a loader. It runs in its own environment, started by `host`, and has

    open_loader(job: Job, state: bytes | None) -> Loader    opened at the saved state, or at the beginning
    convert(job: Job) -> int                                optional: write the rows in the loader's own format into
                                                            `job.own_format`, and return the bytes written
    PACKAGES: list[str]                                     distributions whose versions are reported
    SHARED_STATE: bool                                      one state serves all ranks (else each rank has its own)
    NOT_OFFERED: dict[str, str]                             scenario -> why the loader has no such feature
    NOTES: list[str]                                        its use, for the reader of the table

`Job` and `Loader` are in `protocol`. The consumer in `consume` is the training loop: it drives any loader, logs its
batches, saves the loader's state every few steps, and dies at a given step. The benchmark computes all its counts
from that log.

DLAC's own loader, `dlac`, has the same protocol in the project's environment: `open_loader` makes a `JobSpec`
from `job` (home folder in `job.home`, table in `job.table`), and its `Loader` yields the batches of `DlacDataset`, returns
`batch.tensors["row_id"]` as ids, and packs `state_dict()` into bytes. It has no `convert`, because it reads the table.

A module imports at its top everything that the loader would import late: a launch is timed from `open_loader` on.
"""
