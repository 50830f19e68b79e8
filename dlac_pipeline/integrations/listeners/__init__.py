"""Listeners of a run: OpenLineage, MLflow, Weights & Biases, OpenTelemetry, Prometheus, and those of other distributions.

A listener is an object with a method `on_event(event)`, and perhaps `close()`. An entry point of the group `dlac.listeners` names
a function or class that returns it, and gets the options of the spec's table [listeners.NAME] as keyword arguments. Import events
from `dlac_pipeline.integrations.listeners.events`.
"""
