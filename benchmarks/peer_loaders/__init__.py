"""What a user would pick instead of DLAC, one small module per loader, all behind one protocol.

A module of this package is a loader. It runs in its own environment, below `host`, and has

    open_loader(job: Job, state: bytes | None) -> Loader    opened at the saved state, or at the beginning
    convert(job: Job) -> int                                optional: write the rows in the loader's own format into
                                                            `job.own_format`; the bytes written
    PACKAGES: list[str]                                     distributions whose versions are reported
    SHARED_STATE: bool                                      one state serves all ranks (else each rank has its own)
    NOT_OFFERED: dict[str, str]                             scenario -> why the loader has no such feature
    NOTES: list[str]                                        how it was used, for the reader of the table

`Job` and `Loader` are in `protocol`. The consumer in `consume` is the training loop: it drives any loader, logs what it
was given, saves the loader's state every few steps, and dies where it is told to. Everything that the benchmark counts
is computed from that log.

DLAC's own loader goes through the same door, as `dlac`, in the project's environment: `open_loader` makes a `JobSpec`
from `job` (home folder in `job.home`, table in `job.table`), and its `Loader` yields the batches of `DlacDataset`, gives
`batch.tensors["row_id"]` as ids, and packs `state_dict()` into bytes. `convert` is absent: it reads the table.

Import at the top of a module whatever the loader would import late: a launch is timed from `open_loader` on.
"""
