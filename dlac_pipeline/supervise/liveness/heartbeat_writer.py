"""Writer of a rank's heartbeat: its phase, and its own time in each phase, without measurable waits for other ranks."""

import json
import os
import time
from dataclasses import replace
from pathlib import Path

from dlac_pipeline.elastic.ranks.launch_folder import in_hand_file
from dlac_pipeline.read.batch import Batch
from dlac_pipeline.read.reader import Waits
from dlac_pipeline.supervise.liveness.heartbeat import HeartbeatFile, Phase, RankHeartbeat, Spent, read_heartbeat


class HeartbeatWriter:
    """Writer of the heartbeat of one rank in its launch folder, if any."""

    def __init__(self, folder: Path | None, rank: int, waits: Waits | None = None, *, rows: int = 0) -> None:
        """`rows`: those that dead processes of this rank had worked on in the same attempt."""
        self._writer = HeartbeatFile(folder, rank)
        self.waits = waits or Waits()
        """Waits of reading for other ranks."""
        self._step, self._loss_step, self._loss = 0, 0, 0.0
        self._phase = Phase.STARTING
        self._since = self._forward_s = 0.0
        self._rows_in_hand = 0
        self._spent = Spent(rows=rows)
        self._descriptor: int | None = None
        if folder is not None:
            self._descriptor = os.open(in_hand_file(folder, rank), os.O_WRONLY | os.O_CREAT, 0o644)
        self._write()

    def moved_to(self, folder: Path | None, rank: int) -> "HeartbeatWriter":
        """Close this writer, and return one in a launch folder. Rows that a dead process of the rank worked on there count."""
        self.close()
        last = None if folder is None else read_heartbeat(folder, rank)
        return HeartbeatWriter(folder, rank, self.waits, rows=0 if last is None else last.spent.rows)

    def doing(self, phase: Phase, step: int) -> None:
        """Note that the rank is in a phase, after `step`."""
        self._phase, self._step = phase, step
        if phase == Phase.TRAINING and not self._spent.began:
            self._spent.began = time.time()
        self._write()

    def loaded(self, *, convert_s: float, load_s: float) -> None:
        """Note that the state is loaded: seconds until it was converted, and seconds of its own loading."""
        self._spent.convert_us += int(convert_s * 1e6)
        self._spent.loading_us += int(load_s * 1e6)
        self._write()

    def reading(self) -> None:
        """Note that the rank requests a batch."""
        self._spent.in_hand = 0
        self._since, self.waits.seconds = time.monotonic(), 0.0
        self._write()

    def handed(self, batch: Batch, *, counted: bool, speaks: bool = True) -> Batch:
        """Note that the rank has a batch until its step is done. `counted`: its samples are rows.

        Rows count where a rank `speaks` for all ranks with the same batch.
        """
        now = time.monotonic()
        self._spent.reading_us += int(max(0.0, now - self._since - self.waits.seconds) * 1e6)
        self._since, self._forward_s = now, 0.0
        self._spent.in_hand = batch.step
        moved = sum(advance.rows_consumed for _, _, advance in batch.moved)
        self._rows_in_hand = speaks * (int(batch.valid.sum()) if counted else moved)
        if batch.moved and self._descriptor is not None:  # else the step determines the ranges
            ranges = [
                [source, group, each.pass_index, each.block, each.position_start, each.position_end]
                for source, group, each in batch.moved
            ]
            os.pwrite(self._descriptor, json.dumps([batch.step, ranges]).encode() + b"\n", 0)
        self._write()
        return replace(batch, on_mean=self._forward_done)

    def record_loss(self, loss_step: int, loss: float) -> None:
        """Note the global loss of a step. The next heartbeat contains it."""
        self._loss_step, self._loss = loss_step, loss

    def step_done(self, step: int) -> None:
        """Note that this rank has finished the step."""
        self._spent.computing_us += int((self._forward_s or time.monotonic() - self._since) * 1e6)
        self._spent.rows += self._rows_in_hand
        self._spent.in_hand, self._rows_in_hand, self._step = -1, 0, step
        self._write()

    @property
    def rows(self) -> int:
        """Rows that the rank has worked on in finished steps of its attempt."""
        return self._spent.rows

    def checkpoints(self, *, own_s: float, own_bytes: int) -> None:
        """Note the total time of this rank's part of all checkpoints."""
        self._spent.checkpoint_us, self._spent.checkpoint_bytes = int(own_s * 1e6), own_bytes

    def close(self) -> None:
        """Close the files."""
        self._writer.close()
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _forward_done(self, losses: object) -> None:
        self._forward_s = self._forward_s or time.monotonic() - self._since

    def now(self, phase: Phase) -> RankHeartbeat:
        """Return the heartbeat of this rank now, in a phase."""
        return RankHeartbeat(self._step, phase, time.time(), self._loss_step, self._loss, replace(self._spent))

    def _write(self) -> None:
        self._writer.write(self._step, self._phase, loss_step=self._loss_step, loss=self._loss, spent=self._spent)
