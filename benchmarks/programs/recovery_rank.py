"""The rank of benchmarks/recovery.py with DLAC."""

from recovery_model import make_engine, stamp, train_step  # type: ignore[import-not-found]  # the rank puts this folder on the path

import dlac_pipeline as dlac


def main() -> None:
    """Train until a signal ends it."""
    with dlac.training_run() as run:
        engine = make_engine(run.world_size)
        run.restore(engine)
        for batch in run.batches():
            loss = train_step(engine, batch["x"])
            stamp(run.spec.params["stamps"], batch.step)
            run.step_done(loss)


if __name__ == "__main__":
    main()
