"""The supervisor as a process: for an orchestrator (`__main__.py`), or on each node of a cluster job (`node.py`)."""
