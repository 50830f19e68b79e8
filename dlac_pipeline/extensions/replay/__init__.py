"""Replays of committed steps: rehearsals, single steps, and spikes of the loss."""
