"""The only place where everything meets: what workspace.yaml loads.

Each Dagster run imports this module, also a recovery. So assets, ops and sensors import pyiceberg, DuckDB and PyTorch inside
functions (tests/process/test_imports.py).
"""

import dagster as dg

from assets.sources import OWNERS, corpus, tokens
from catalog import PROFILE
from dlac_pipeline.dagster import Recovery
from dlac_pipeline.dagster.components.training_run import FOLDER, build_runs_of
from dlac_pipeline.lakehouse.config import home_folder

ingest_job = dg.define_asset_job(
    "ingest_job",
    selection=dg.AssetSelection.assets(corpus, tokens),
    description="Ingest the standard library's sources and tokenize them.",
)

defs = dg.Definitions.merge(
    build_runs_of(home_folder() / FOLDER, source_assets={"sources.tokens": "tokens"}, owners=OWNERS),
    Recovery(lakehouse=PROFILE.model_dump()).build_defs(),
    dg.Definitions(
        assets=[corpus, tokens],
        jobs=[ingest_job],
        executor=dg.in_process_executor,  # the process that Dagster watches is the one that holds the supervisor
    ),
)
