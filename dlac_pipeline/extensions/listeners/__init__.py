"""Listeners of a run: OpenLineage, MLflow, W&B, OpenTelemetry, Prometheus, and listeners of other distributions.

See docs/extensions/listeners.md.
"""
