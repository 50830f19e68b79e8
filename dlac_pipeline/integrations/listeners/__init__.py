"""Listeners of a run: OpenLineage, MLflow, Weights & Biases, OpenTelemetry, Prometheus, and those of other distributions.

An entry point of the group `dlac.listeners` names what makes an object with `on_event(event)` and perhaps `close()`. It gets the
options of the spec's table [listeners.NAME] as keyword arguments.
"""
