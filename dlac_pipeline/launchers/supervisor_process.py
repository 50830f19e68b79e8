"""The supervisor as a process of its own, for an orchestrator: `python -m dlac_pipeline.launchers.supervisor_process < request`.

Standard input: one line of JSON (the request), then nothing until the orchestrator closes it or dies, which ends the run in
good order. Standard output: one event per line of JSON, among them a sign of life (`alive`) every few seconds; what libraries
and users' code print goes to standard error. Exit status: 0, or that of the error
(dlac_pipeline/lakehouse/errors.py). A supervisor whose run was taken over by another launch leaves, and does not wait until
its next commit is refused. A request for a cluster (`launch.on`) is
submitted from here, and the job followed, in the same way.

Little is imported before the request is read: what the ranks need is imported beside what the supervisor needs.
"""

from __future__ import annotations

import sys

from pydantic import ValidationError

from dlac_pipeline.lakehouse.errors import SpecInvalid
from dlac_pipeline.launchers.orchestrator import Orchestrator, keep_events_apart
from dlac_pipeline.spec.launch_request import Request
from dlac_pipeline.supervise.start_ranks import RankStarter


def main() -> int:
    """Serve one request; returns the exit status."""
    keep_events_apart()
    starter = RankStarter()
    try:
        request = Request.model_validate_json(sys.stdin.readline())
    except ValidationError as err:
        from dlac_pipeline.launchers.serve import say_error

        return say_error(SpecInvalid(f"not a valid request: {err}"))
    orchestrator = Orchestrator()
    if request.spec.launch.on == "here":
        starter.begin(request.spec)
    from dlac_pipeline.launchers.serve import serve

    return serve(request, starter, orchestrator)


if __name__ == "__main__":
    sys.exit(main())
