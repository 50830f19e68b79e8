"""A replica group of DLAC, for benchmarks/per_step.py."""

import time
from typing import Any

import torchft
from per_step_model import FORWARD_S, losses, make  # type: ignore[import-not-found]  # the rank puts this folder on the path

import dlac_pipeline as dlac
from benchmarks.per_step_lab.journal import GroupJournal
from dlac_pipeline.extensions.sharded.torchft_state import TorchFTState


class WatchedState(TorchFTState):
    """State whose process may be killed while it is saved or loaded."""

    journal: GroupJournal

    def save(self, *arguments: Any) -> None:
        """Save, and perhaps die before the checkpoint is committed."""
        super().save(*arguments)
        self.journal.reaches("checkpoint")

    def load_peer_state(self, state: Any) -> None:
        """Load the state of a peer, and perhaps die before."""
        self.journal.reaches("healing")
        super().load_peer_state(state)


def main() -> None:
    """Train to the end of the order."""
    with dlac.training_run() as run:
        journal = GroupJournal(run.spec.params["journal"], run.rank)
        model, optimizer = make()
        state = WatchedState(model=model, optimizer=optimizer)
        state.journal = journal
        allreduce, should_commit = torchft.Manager.allreduce, torchft.Manager.should_commit
        torchft.Manager.allreduce = journal.die_in_second_call(allreduce, "all_reduce", per=lambda: run.step)

        def dying_commit(*arguments: Any, **options: Any) -> bool:
            committed: bool = should_commit(*arguments, **options)
            journal.reaches("should_commit")
            return committed

        torchft.Manager.should_commit = dying_commit
        run.restore(state)
        for batch in run.batches():
            loss = batch.mean(losses(model, batch["x"]))
            time.sleep(FORWARD_S)
            journal.reaches("forward")
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
            rows = batch["row_id"][batch.valid].tolist()
            journal.write("share", step=batch.step, rows=rows, groups=batch.readers)
            if state.reduce(loss):
                optimizer.step()
                journal.write("committed", step=batch.step, rows=rows, groups=batch.readers)
            run.step_done(loss)


if __name__ == "__main__":
    main()
