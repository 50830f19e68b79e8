"""PyTorch's own interfaces: `open_dataset()` in; batches for any `DataLoader`, and a small state to resume from, out.

    dataset = open_dataset(table="src.documents", columns=["tokens"], batch_size=256)
    for batch in dataset.loader(num_workers=2):
        ...                                    # forward, backward, optimizer step
        state = dataset.state_dict()           # behind this batch, whatever the workers have read ahead

A batch is a plain dict: column -> tensor, and under "dlac" what else there is to say of it. A dict, because pin_memory, the
collators of Hugging Face and Accelerate's moves between devices all walk through dicts, and pass an unknown class by in
silence; nested, because a table may have columns of any name. `as_batch` makes a `Batch` of it.

The position is the last batch that the consumer was given: `state_dict()` belongs behind that batch's optimizer step. In the
process that reads, the dataset sees what it hands out; what comes from worker processes it sees through `loader()`, or by
`observe(batch)`. Who reads ahead in the consumer's own process (Accelerate does, by one batch) calls `observe` behind each step.

What is consumed is not recorded in the ledger: for that there is `training_run`.
"""

from dlac_pipeline.dataset.batches import ABOUT, DictBatch, as_batch
from dlac_pipeline.dataset.dataset import DlacDataset
from dlac_pipeline.dataset.huggingface import last_checkpoint, trainer_callback
from dlac_pipeline.dataset.loader import DlacLoader
from dlac_pipeline.dataset.opening import open_dataset
from dlac_pipeline.dataset.state import STATE_FILE, State, merge_states, read_state

__all__ = [
    "ABOUT",
    "STATE_FILE",
    "DictBatch",
    "DlacDataset",
    "DlacLoader",
    "State",
    "as_batch",
    "last_checkpoint",
    "merge_states",
    "open_dataset",
    "read_state",
    "trainer_callback",
]
