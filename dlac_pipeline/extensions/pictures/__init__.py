"""Pictures of a run for pages: of its model in Dagster, and of a report."""
