"""The lakehouse of this project: its connection profile, its source tables, and the saved queries of its auditors."""
