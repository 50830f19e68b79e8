import inspect
from pathlib import Path

import dlac_pipeline
from dlac_pipeline.lakehouse import errors


def classes() -> dict[str, type[errors.DlacError]]:
    """Return all error classes by name."""
    found = {name: value for name, value in vars(errors).items() if inspect.isclass(value)}
    return {name: value for name, value in found.items() if issubclass(value, errors.DlacError)}


def test_public_surface_is_pinned() -> None:
    """Users import these sorted names, and each exists. A change here is a change for users."""
    classes = ["Batch", "TorchState", "TrainingRun"]
    names = [*classes, "training_run"]
    assert dlac_pipeline.__all__ == names
    assert all(getattr(dlac_pipeline, name).__name__ == name for name in dlac_pipeline.__all__)
    of_extensions = (
        *("DistributedState", "DlacDataset", "Shadow", "TorchFTState", "as_batch", "audit_since", "checkpoint_of_file"),
        *("explain_sql", "keep_checkpoint", "merge_states", "open_dataset", "record_exports", "remove_orphans"),
        *("retire_checkpoints", "rewind_run", "unname_checkpoint"),
    )
    assert all(getattr(dlac_pipeline, name).__name__ == name for name in of_extensions)
    assert not any(hasattr(dlac_pipeline, name) for name in ("no_such_name", "NoSuchName"))


def test_tree_of_errors_is_complete() -> None:
    """The page of errors names every class of dlac_pipeline.lakehouse.errors once, below its parent."""
    text = (Path(__file__).parents[2] / "docs" / "errors.md").read_text()
    drawing = text.partition("```text\nDlacError\n")[2].partition("```")[0]
    parents: list[str] = ["DlacError"]
    drawn = {"DlacError": "Exception"}
    for line in drawing.splitlines():
        if "── " in line:
            depth = line.index("── ") // 4 + 1
            names = [word.strip() for word in line.split("── ")[1].split("  ")[0].split(",")]
            del parents[depth:]
            drawn.update(dict.fromkeys(names, parents[-1]))
            parents.append(names[-1])
    assert drawn == {name: value.__bases__[0].__name__ for name, value in classes().items()}


def test_every_error_has_meaning_and_status() -> None:
    """Each class has a one-sentence docstring, and an exit status other than success and the statuses of signals."""
    for name, value in classes().items():
        assert value.__doc__, name
        assert 64 <= value.exit_code <= 113, name
