"""The lakehouse of this project: its connection profile, its source tables in tables.py, its auditors' queries in queries/."""

from dlac_pipeline.lakehouse.config import LakehouseConfig

PROFILE = LakehouseConfig()
"""The embedded lakehouse of $DLAC_HOME. A shared one is, for example, `LakehouseConfig(type="rest", uri="https://...")`.

Job specs name theirs in `[lakehouse]`.
"""
