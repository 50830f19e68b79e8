"""The faults, each done to real processes and files. A temporary fault has ended when its function returns."""

import random
import shutil
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial

import psutil

from benchmarks.soak_faults.lab import Lab
from benchmarks.soak_faults.store import full
from benchmarks.soak_faults.trainee import Trainee
from dlac_pipeline.checkpoint.store import folder_of
from dlac_pipeline.extensions.chaos.strikes import (
    Struck,
    damage_file,
    lock_catalog,
    move_catalog,
    send_signal,
    struck_now,
    suspend,
)
from dlac_pipeline.lakehouse.errors import CatalogUnreachable
from dlac_pipeline.memory_states.states import memory_folder

AWAY_S = 8.0
"""Seconds for which catalog and store are unavailable."""
_FROZEN_AT_MOST_S = 90.0
"""Seconds after which a stopped process continues. It may hold the lock of the catalog's file and so block a takeover."""
_RESTARTED_AFTER_S = 2.0


Strike = Callable[[Lab, Trainee, random.Random], Struck | None]
"""A function that strikes a run, and returns None if there is no target yet."""


def _ranks_signalled(
    lab: Lab, trainee: Trainee, chance: random.Random, *, number: signal.Signals, all_of_them: bool = False
) -> Struck | None:
    ranks = trainee.ranks()
    chosen = range(len(ranks)) if all_of_them else [chance.randrange(len(ranks))] if ranks else []
    if not chosen:
        return None
    at = send_signal((ranks[rank] for rank in chosen), number)
    return struck_now(f"{number.name} to rank {', '.join(map(str, chosen))}", at, *(ranks[rank] for rank in chosen))


def _above_signalled(
    lab: Lab, trainee: Trainee, chance: random.Random, *, who: str, number: signal.Signals
) -> Struck | None:
    """Signal one of the processes between Dagster and the ranks."""
    ranks = trainee.ranks()
    supervisor = trainee.live.supervisor()
    server = ranks[0].parent() if ranks else None
    if supervisor is None or server is None:
        return None
    one = {"supervisor": supervisor, "run worker": supervisor.parent(), "fork server": server}[who]
    if one is None or (who == "fork server" and "fork server" not in " ".join(one.cmdline())):
        return None
    pid = one.pid
    return struck_now(f"{number.name} to the {who}, process {pid}", send_signal([one], number), one, *ranks)


def _code_server_killed(lab: Lab, trainee: Trainee, chance: random.Random) -> Struck | None:
    servers = [one for one in lab.daemon.children() if "grpc" in " ".join(one.cmdline())]
    if not servers:
        return None
    return struck_now("SIGKILL to the code server", send_signal(servers, signal.SIGKILL), *servers)


def _daemon_killed(lab: Lab, trainee: Trainee, chance: random.Random) -> Struck:
    at = send_signal([lab.daemon], signal.SIGKILL)
    time.sleep(_RESTARTED_AFTER_S)
    lab.start_daemon()
    return Struck(what="SIGKILL to the daemon, then a new one", at=at, lifted_at=time.time())


def _everything_killed(lab: Lab, trainee: Trainee, chance: random.Random) -> Struck | None:
    training = lab.training()
    if trainee not in training:
        return None
    processes = [process for one in training for process in one.processes()]
    everything = [lab.daemon, *lab.daemon.children(recursive=True), *processes]
    at = send_signal(everything, signal.SIGKILL)
    time.sleep(_RESTARTED_AFTER_S)
    lab.start_daemon()
    what = f"SIGKILL to {len(everything)} processes"
    return Struck(what=what, at=at, lifted_at=time.time(), processes=tuple(processes))


def _checkpoint_damaged(lab: Lab, trainee: Trainee, chance: random.Random, *, flip: bool) -> Struck | None:
    """Damage the head while the supervisor is stopped, so that it resumes from damage. A parent to resume from remains."""
    ranks, supervisor = trainee.ranks(), trainee.live.supervisor()
    if not ranks or supervisor is None or trainee.restorable() < 2:
        return None
    memory = memory_folder(trainee.spec)
    with suspend([supervisor]):
        at = send_signal(ranks, signal.SIGKILL)
        psutil.wait_procs(ranks, timeout=10)
        if memory is not None:  # or no checkpoint would be read
            shutil.rmtree(memory, ignore_errors=True)
        head = trainee.lineage()[-1]
        what = damage_file(folder_of(head.manifest_uri), chance, flip=flip)
    return struck_now(f"{what} of step {head.step}, SIGKILL to all ranks", at, *ranks)


def _store_filled(lab: Lab, trainee: Trainee, chance: random.Random) -> Struck | None:
    at = time.time()
    with full(lab.store):
        time.sleep(AWAY_S)
    return Struck(what=f"no byte free for {AWAY_S:.0f} s", at=at, lifted_at=time.time())


def _catalog_locked(lab: Lab, trainee: Trainee, chance: random.Random) -> Struck | None:
    at = time.time()
    with lock_catalog(lab.catalog):
        time.sleep(AWAY_S)
    return Struck(what=f"locked for {AWAY_S:.0f} s", at=at, lifted_at=time.time())


def _catalog_moved(lab: Lab, trainee: Trainee, chance: random.Random) -> Struck | None:
    """Move the catalog while no run begins: one that finds a folder in its place before its first claim ends for good."""
    ranks = trainee.ranks()
    if not ranks or not lab.all_have_claimed():
        return None
    with move_catalog(lab.catalog):
        at = send_signal([ranks[-1]], signal.SIGKILL)
        time.sleep(AWAY_S)
    what = f"away for {AWAY_S:.0f} s, SIGKILL to rank {len(ranks) - 1}"
    return Struck(what=what, at=at, lifted_at=time.time(), processes=(ranks[-1],))


def _launch_stopped(lab: Lab, trainee: Trainee, chance: random.Random) -> Struck | None:
    processes = trainee.processes()
    if not processes:
        return None
    before, at = trainee.seen().attempt, time.time()
    with suspend(processes):
        while not _is_taken_over(trainee, before) and time.time() < at + _FROZEN_AT_MOST_S:
            lab.tend()
    frozen_s = time.time() - at
    what = f"SIGSTOP to {len(processes)} processes, SIGCONT after {frozen_s:.0f} s"
    return Struck(what=what, at=at, lifted_at=time.time(), processes=tuple(processes))


STRIKES: dict[str, Strike] = {
    "rank killed": partial(_ranks_signalled, number=signal.SIGKILL),
    "all ranks killed": partial(_ranks_signalled, number=signal.SIGKILL, all_of_them=True),
    "rank stopped": partial(_ranks_signalled, number=signal.SIGSTOP),
    "fork server killed": partial(_above_signalled, who="fork server", number=signal.SIGKILL),
    "supervisor killed": partial(_above_signalled, who="supervisor", number=signal.SIGKILL),
    "run worker killed": partial(_above_signalled, who="run worker", number=signal.SIGKILL),
    "code server killed": _code_server_killed,
    "daemon killed": _daemon_killed,
    "everything killed": _everything_killed,
    "rank preempted": partial(_ranks_signalled, number=signal.SIGUSR1),
    "supervisor preempted": partial(_above_signalled, who="supervisor", number=signal.SIGTERM),
    "run worker preempted": partial(_above_signalled, who="run worker", number=signal.SIGTERM),
    "checkpoint deleted": partial(_checkpoint_damaged, flip=False),
    "checkpoint flipped": partial(_checkpoint_damaged, flip=True),
    "store full": _store_filled,
    "catalog locked": _catalog_locked,
    "catalog away": _catalog_moved,
    "launch stopped": _launch_stopped,
}


def _is_taken_over(trainee: Trainee, attempt: int) -> bool:
    """Return whether another attempt has claimed the run. While the catalog is locked none has."""
    with suppress(CatalogUnreachable):
        return trainee.seen().attempt > attempt
    return False
