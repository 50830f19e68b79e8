"""The start of an attempt in three steps: resolve the leg, claim the run, restore the state. `start_attempt` takes them."""
