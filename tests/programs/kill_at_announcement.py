"""`kill_at_announcement.py MARKER COMMAND...`: a supervisor that is killed, once, before it announces a resume point."""

import os
import signal
import sys
from contextlib import suppress
from pathlib import Path

from dlac_pipeline.elastic.round import RESUME, Round
from dlac_pipeline.elastic.sealed_store import Message
from dlac_pipeline.extensions.clusters import supervisor_process as supervisor

_announce = Round.announce


def _kill_once(round_: Round, subject: str, message: Message) -> None:
    if subject == RESUME:
        with suppress(FileExistsError):
            Path(sys.argv[1]).open("x").close()
            os.kill(os.getpid(), signal.SIGKILL)
    _announce(round_, subject, message)


if __name__ == "__main__":
    Round.announce = _kill_once  # type: ignore[method-assign, assignment]
    sys.exit(supervisor.main())
