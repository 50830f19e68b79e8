"""Reader as a PyTorch dataset: `open_dataset()` in, batches for any `DataLoader` and a small state to resume from out.

    dataset = open_dataset(table="src.documents", columns=["tokens"], batch_size=256)
    for batch in dataset.loader(num_workers=2):
        ...                                    # forward, backward, optimizer step
        state = dataset.state_dict()           # after this batch, even if workers have read ahead

A batch is a plain dict, through which pin_memory and the collators of other libraries walk: column -> tensor, and under "dlac"
its other facts. `as_batch` makes a `Batch` of it.

The position is the last batch that the consumer received: call `state_dict()` after its optimizer step. The dataset sees the
batches of worker processes through `loader()`, or by `observe(batch)`. A consumer that reads ahead without worker processes
(Accelerate does, by one batch) calls it after each step. Consumption is not recorded in the ledger: use `training_run` for that.
"""

from dlac_pipeline.extensions.dataset.batches import ABOUT, DictBatch, as_batch
from dlac_pipeline.extensions.dataset.dataset import DlacDataset, DlacLoader
from dlac_pipeline.extensions.dataset.opening import open_dataset
from dlac_pipeline.extensions.dataset.state import STATE_FILE, State, merge_states, read_state

__all__ = [
    "ABOUT",
    "STATE_FILE",
    "DictBatch",
    "DlacDataset",
    "DlacLoader",
    "State",
    "as_batch",
    "merge_states",
    "open_dataset",
    "read_state",
]
