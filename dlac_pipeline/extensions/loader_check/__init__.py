"""The scenarios that show whether a loader resumes exactly, for any loader.

In: a file that defines a loader. It runs in another process (`host`), whose ranks are killed, resized and resumed
(`scenarios`) over generated tables (`tables`). Out: the rows repeated and missing, from the logs of the ranks (`consume`).
"""

from dlac_pipeline.extensions.loader_check.row_log import Shadow

__all__ = ["Shadow"]
