"""Record of a replica group that takes part again, without a supervisor: the group writes its row of `recoveries` itself."""

import psutil

from dlac_pipeline.elastic.ranks.this_process import was_restarted
from dlac_pipeline.lakehouse.iceberg.connect import Lakehouse
from dlac_pipeline.spec.job_spec import JobSpec
from dlac_pipeline.spec.launch_request import OPERATOR
from dlac_pipeline.supervise.liveness.heartbeat import RankHeartbeat
from dlac_pipeline.supervise.ranks.local_ranks import Rejoined
from dlac_pipeline.supervise.ranks.rank_events import EventWriter
from dlac_pipeline.supervise.recovery_recorder import BackgroundRecorder


class OwnRejoin:
    """Record of one group's return in the attempt of `nonce`. `last` is the last heartbeat of the dead process."""

    def __init__(self, spec: JobSpec, nonce: str, *, group: int, last: RankHeartbeat) -> None:
        self._spec, self._nonce, self._group, self._last = spec, nonce, group, last
        self._recorder: BackgroundRecorder | None = None

    def step_done(self, lakehouse: Lakehouse, heartbeat: RankHeartbeat, events: EventWriter) -> None:
        """Begin to write the row once the group has finished a step, and the event once the row is written."""
        if self._recorder is not None:
            self._recorder.publish_written()
            return
        self._recorder = BackgroundRecorder(lakehouse, self._spec)
        started = psutil.Process().create_time()
        rejoined = Rejoined(
            event={"event": "group_rejoined", "group": self._group},
            cause=f"group {self._group} died, while {self._last.doing}",
            noticed_by="torchrun" if was_restarted() else OPERATOR,
            failed_at=min(started, self._last.at),
            noticed_at=started,
            had_batch=self._last.spent.in_hand > 0,
            heartbeat=heartbeat,
        )
        self._recorder.record_rejoined(rejoined, self._nonce, events.write)

    def close(self) -> None:
        """Wait for the row, as `BackgroundRecorder.close` does."""
        if self._recorder is not None:
            self._recorder.close()
