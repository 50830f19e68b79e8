"""Listeners of a run: OpenLineage, MLflow, W&B, OpenTelemetry, Prometheus, and those of others.

See docs/extensions/listeners.md.
"""
