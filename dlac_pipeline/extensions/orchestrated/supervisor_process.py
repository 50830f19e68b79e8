"""A supervisor for an orchestrator: `python -m dlac_pipeline.extensions.orchestrated.supervisor_process < request`.

- Standard input: one line of JSON (the request). When it is closed, the run ends in order.
- Standard output: one event per line of JSON, among them `alive` every few seconds. Other output goes to standard error.
- Exit status: 0, or that of the error (dlac_pipeline/lakehouse/errors.py).
"""

import os
import sys
import threading
import time
from collections.abc import Callable

from pydantic import ValidationError

from dlac_pipeline.lakehouse.errors import DlacError, SpecInvalid, TrainingFailed
from dlac_pipeline.launchers.orchestrator import MARGIN_S, keep_events_apart, on_ending_signals, report
from dlac_pipeline.spec.launch_request import Request
from dlac_pipeline.supervise.ranks.rank_starter import RankStarter

_ALIVE_EVERY_S = 5.0


class Orchestrator:
    """Receiver of a heartbeat every few seconds. When it ends, the work for it ends."""

    def __init__(self) -> None:
        self._stop: Callable[[], None] | None = None
        self._grace_s = 0.0
        threading.Thread(target=self._report_alive, daemon=True).start()
        threading.Thread(target=self._watch_input, daemon=True).start()

    def on_end(self, stop: Callable[[], None], *, grace_s: float) -> None:
        """Call `stop` when it has ended, and give that this many seconds. Without `stop`, none."""
        self._grace_s, self._stop = grace_s + MARGIN_S, stop

    def _watch_input(self) -> None:
        """Read standard input to its end, which means that the other side is gone. Then exit, in order or not."""
        while os.read(sys.stdin.fileno(), 4096):
            continue
        if self._stop is not None:
            self._stop()
            time.sleep(self._grace_s)
        # It may be busy with something long, a verification perhaps; the ranks die with this process.
        os._exit(TrainingFailed.exit_code)

    def _report_alive(self) -> None:
        """Report that this process runs. The ranks' progress shows that they run."""
        while True:
            time.sleep(_ALIVE_EVERY_S)
            report({"event": "alive"})


def main() -> int:
    """Serve one request. Return the exit status."""
    keep_events_apart()
    starter = RankStarter()
    try:
        request = Request.model_validate_json(sys.stdin.readline())
    except ValidationError as err:
        from dlac_pipeline.launchers.serve import report_error

        return report_error(SpecInvalid(f"not a valid request: {err}"))
    orchestrator = Orchestrator()
    if request.spec.launch.on == "here":
        starter.begin(request.spec)
    from dlac_pipeline.launchers.protocol import launcher_for
    from dlac_pipeline.launchers.serve import report_error, run_and_report

    try:
        launcher = launcher_for(request, report, starter)
    except DlacError as err:
        return report_error(err)
    on_ending_signals(launcher.stop)
    orchestrator.on_end(launcher.stop, grace_s=request.spec.launch.orphaned_s)
    return run_and_report(launcher, request)


if __name__ == "__main__":
    sys.exit(main())
