"""A supervisor for an orchestrator: `python -m dlac_pipeline.extensions.clusters.supervisor_process < request`.

- Standard input: one line of JSON (the request). When it is closed, the run ends in order.
- Standard output: one event per line of JSON, among them `alive` every few seconds. Other output goes to standard error.
- Exit status: 0, or that of the error (dlac_pipeline/lakehouse/errors.py).
"""

import sys

from pydantic import ValidationError

from dlac_pipeline.extensions.clusters.orchestrator import Orchestrator, keep_events_apart, report
from dlac_pipeline.lakehouse.errors import DlacError, SpecInvalid
from dlac_pipeline.launchers.signals import on_ending_signals
from dlac_pipeline.spec.launch_request import Request
from dlac_pipeline.supervise.ranks.rank_starter import RankStarter


def main() -> int:
    """Serve one request. Return the exit status."""
    keep_events_apart()
    starter = RankStarter()
    try:
        request = Request.model_validate_json(sys.stdin.readline())
    except ValidationError as err:
        from dlac_pipeline.extensions.clusters.serve import report_error

        return report_error(SpecInvalid(f"not a valid request: {err}"))
    orchestrator = Orchestrator()
    if request.spec.launch.on == "here":
        starter.begin(request.spec)
    from dlac_pipeline.extensions.clusters.serve import report_error, run_and_report
    from dlac_pipeline.launchers.protocol import launcher_for

    try:
        launcher = launcher_for(request, report, starter)
    except DlacError as err:
        return report_error(err)
    on_ending_signals(launcher.stop)
    orchestrator.on_end(launcher.stop, grace_s=request.spec.launch.orphaned_s)
    return run_and_report(launcher, request)


if __name__ == "__main__":
    sys.exit(main())
