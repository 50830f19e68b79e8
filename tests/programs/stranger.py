"""A stranger at the store of a run: it knows address, port and prefix, and has no key. It reads, forges, replays and deletes.

Usage: stranger.py HOST PORT PREFIX REPORT STRIKE. Each second it attacks every key in another way, until a file `enough`
exists next to REPORT. It then writes its attacks and all values of nodes that it read as JSON to REPORT. A process that
unpickles one of its values makes the folder STRIKE.
"""

from __future__ import annotations

import base64
import json
import os
import pickle
import re
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from itertools import cycle
from pathlib import Path
from typing import Any

from cryptography.fernet import Fernet
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch's __init__ does not re-export by name

PACE_S = 1.0
"""Seconds between two attacks. Many more of them would be a flood, which may keep nodes apart."""
SLOTS = range(1, 6)
END = {
    "id": "0123456789abcdef",
    "to": ["0123456789abcdef"],
    "message": {"ending": "finished", "attempt": 1, "step": 3, "again": None, "error": None},
}
LEASE = {
    **{"slot": 0, "id": "", "slots": 9, "beat": 10**15, "round": 10**15, "formed_by": 9, "message": {"asks": True}},
    **{"announced": {"verdict": 9, "resume": 9}, "training": False, "ended": END},
}
OFFER = {"host": "stranger", "address": "10.77.0.99", "ranks": 64, "interface": "", "attempt": 10**6, "config": ""}
NODE = {"id": "0123456789abcdef", "beat": 10**15, "knows_end": None, "offer": OFFER, "gone": True}
PLAN = {"number": 9, "port": 1, "members": [{"slot": 9, "id": "", "offer": OFFER, "first_rank": 0, "ranks": 64}]}
RESUME = {
    **{
        "kind": "FromCheckpoint",
        "attempt": 9,
        "nonce": "0",
        "replaces": 0,
        "leg": "{}",
        "leg_is_new": False,
        "step": 3,
    },
    **{"checkpoint_id": "c", "folder": "/tmp", "host": "stranger", "manifest_uri": "", "manifest_digest": ""},
    **{"world_size": 1, "engine": "torch", "reader_state": []},
}


class Enough(Exception):
    """The stranger should stop, and no store answers."""


class Strike:
    """A pickle that makes a folder when it is loaded."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __reduce__(self) -> tuple[object, ...]:
        return (os.makedirs, (self._path, 0o777, True))


class Stranger:
    """One connection, and the values read through it."""

    def __init__(self, host: str, port: int, prefix: str, strike: str, enough: Path) -> None:
        """`enough` is a file. Once it exists, an unanswering store is not waited for."""
        self._where = (host, port)
        self._enough = enough
        self._prefix = prefix
        self._strike = pickle.dumps(Strike(strike)).decode("latin-1")
        self._cipher = Fernet(base64.urlsafe_b64encode(b"another key, of thirty-two bytes"))
        self._of_store_before: dict[str, list[bytes]] = {}
        self._store = self._connect()
        self.seen: dict[str, list[bytes]] = {}
        """Values by key, in reading order, of all stores that have had this address."""
        self.done: dict[str, int] = {}

    def _connect(self) -> TCPStore:
        host, port = self._where
        while not self._enough.exists():
            with suppress(OSError, RuntimeError):
                socket.create_connection((host, port), 1.0).close()
                patience = timedelta(seconds=2)
                return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=patience)
            time.sleep(0.1)
        raise Enough

    def attacks(self) -> list[Callable[[], None]]:
        """Return the attacks in order."""
        return [
            self.write_garbage,
            self.write_pickles,
            self.write_plain_messages,
            self.write_messages_of_another_key,
            self.replay_first_values,
            self.replay_last_values,
            self.exchange_values,
            self.delete_keys,
            self.count_and_append,
            self.break_protocol,
        ]

    def record_values(self) -> None:
        """Record the value of each key that the store lists."""
        for key in self._store.list_keys():
            with suppress(RuntimeError):  # it was deleted since
                raw = self._store.get(key) if self._store.check([key]) else b""
                if raw and raw not in self.seen.setdefault(key, []):
                    self.seen[key].append(raw)

    def attack_once(self, attack: Callable[[], None]) -> None:
        """Attack once, and count it. Reconnect if the store closes the connection."""
        try:
            self.record_values()
            attack()
            self.done[attack.__name__] = self.done.get(attack.__name__, 0) + 1
        except (OSError, RuntimeError):
            self._store = self._connect()
            if not any(key.startswith(self._prefix) for key in self._store.list_keys()):
                self._of_store_before = self._sealed()

    def write_garbage(self) -> None:
        """Write bytes that are no text."""
        for key in self._keys():
            self._store.set(key, b"\xff\xfe garbage")  # type: ignore[arg-type]  # bytes as well

    def write_pickles(self) -> None:
        """Write pickles that make a folder when they are loaded."""
        for key in self._keys():
            self._store.set(key, self._strike)

    def write_plain_messages(self) -> None:
        """Write messages of the right form: another leader, an end, a verdict, a round and a resume point."""
        for name, message in self._forged().items():
            key = f"{self._prefix}/{name}"
            self._store.set(key, json.dumps([key, message]))

    def write_messages_of_another_key(self) -> None:
        """Write the same messages, encrypted and authenticated with another key."""
        for name, message in self._forged().items():
            key = f"{self._prefix}/{name}"
            self._store.set(key, self._cipher.encrypt(json.dumps([key, message]).encode()).decode())

    def replay_first_values(self) -> None:
        """Write the first value of each key that a node wrote."""
        for key, found in self._sealed().items():
            self._store.set(key, found[0].decode())

    def replay_last_values(self) -> None:
        """Write the last values that nodes wrote to the earlier store, or to this one if there was none."""
        for key, found in {**self._sealed(), **self._of_store_before}.items():
            self._store.set(key, found[-1].decode())

    def exchange_values(self) -> None:
        """Write the last value of each key under the next one's name."""
        found = self._sealed()
        for key, other in zip(found, [*found][1:] + [*found][:1], strict=True):
            self._store.compare_set(key, found[key][-1].decode(), found[other][-1].decode())
            self._store.set(key, found[other][-1].decode())

    def delete_keys(self) -> None:
        """Delete every key."""
        for key in self._keys():
            self._store.delete_key(key)

    def count_and_append(self) -> None:
        """Use the store's other operations on every key."""
        for key in self._keys():
            with suppress(RuntimeError):
                self._store.append(key, "more")  # type: ignore[attr-defined]  # torch's stubs lack it
            with suppress(RuntimeError, OSError):
                self._connect().add(key, 1)

    def break_protocol(self) -> None:
        """Send bytes that no client of a store sends."""
        for sent in (b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 4096, b"\x00" + b"\xff" * 64, b"\x01" + b"\x7f" * 64):
            with suppress(OSError), socket.create_connection(self._where, 1.0) as connection:
                connection.sendall(sent)
                connection.settimeout(0.2)
                connection.recv(64)

    def _keys(self) -> list[str]:
        """Return the run's keys, with keys that it may use soon."""
        found = [key for key in self._store.list_keys() if key.startswith(self._prefix)]
        return [*found, *(key for name in self._forged() if (key := f"{self._prefix}/{name}") not in found)]

    def _sealed(self) -> dict[str, list[bytes]]:
        """Return the values that nodes wrote with the key, which this stranger cannot have made."""
        found = {key: [raw for raw in values if self._is_foreign(raw)] for key, values in self.seen.items()}
        return {key: values for key, values in found.items() if values}

    def _is_foreign(self, raw: bytes) -> bool:
        if not raw.startswith(b"gAAAA") or raw.endswith(b"more"):
            return False
        with suppress(Exception):
            self._cipher.decrypt(raw)
            return False
        return True

    def _forged(self) -> dict[str, Any]:
        """Return messages by name that would end, mislead or steal the run."""
        forged: dict[str, Any] = {"lease": LEASE, "slots": {"last": 9, "by": "stranger"}}
        forged |= {f"node/{slot}": NODE for slot in SLOTS}
        found = (re.search(r"/round/(\d+)/(\d+)", key) for key in self._store.list_keys())
        for number, slot in {(*each.groups(),) for each in found if each is not None}:
            forged[f"round/{number}/{slot}"] = {**PLAN, "number": int(number)}
            forged[f"round/{number}/{slot}/resume/1"] = RESUME
            forged[f"round/{number}/{slot}/verdict/1"] = END["message"]
        return forged

    def report(self) -> dict[str, Any]:
        """Return its attacks, and the values of nodes that it read."""
        read = {key: [raw.decode("latin-1") for raw in values] for key, values in self._sealed().items()}
        return {"done": self.done, "read": read}


def main() -> None:
    """Attack once a second until it should stop."""
    host, port, prefix, report, strike = sys.argv[1:]
    enough = Path(report).with_name("enough")
    stranger = Stranger(host, int(port), prefix, strike, enough)
    with suppress(Enough):
        for attack in cycle(stranger.attacks()):
            if enough.exists():
                break
            stranger.attack_once(attack)
            time.sleep(PACE_S)
    Path(report).write_text(json.dumps(stranger.report()))


if __name__ == "__main__":
    main()
