"""The smallest complete project with a training run that recovers without a person: its definitions are in defs/."""

from pathlib import Path

import dagster as dg

# The process that Dagster watches is the one that holds the supervisor.
defs = dg.Definitions.merge(
    dg.load_from_defs_folder(path_within_project=Path(__file__).parent),
    dg.Definitions(executor=dg.in_process_executor),
)
