"""A supervisor under an orchestrator, which reads its events and ends it."""
