"""The lakehouse of this project: its connection profile, its source tables in tables.py, its auditors' queries in queries/."""

import os

from dlac_pipeline.lakehouse.config import LakehouseConfig

PROFILE = LakehouseConfig(name=os.environ.get("DLAC_CATALOG"))
"""The catalog that PyIceberg's configuration names $DLAC_CATALOG. Unset: the embedded lakehouse of $DLAC_HOME.

Ingestion and maintenance use it. Training uses `[lakehouse]` of its job spec: keep both equal.
"""
