"""Sealed messages in a store of torch: without the key none can be read or forged. See docs/design/0011-nodes.md."""

import base64
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cryptography.fernet import Fernet, InvalidToken

from dlac_pipeline.lakehouse.errors import SpecInvalid
from dlac_pipeline.lakehouse.masking import note_secrets
from dlac_pipeline.spec.launch_spec import LaunchSpec

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]  # torch's __init__ does not re-export by name

Message = dict[str, Any]
KEY_VARIABLE = "DLAC_RENDEZVOUS_KEY"
"""Environment variable with the secret that all nodes of a run share."""
_SHORTEST_KEY = 16
_WAIT_S = 1.0
"""A call waits no longer for a key that a stranger deleted a moment ago."""
_ABSENT = "absent"
"""Never a sealed message: comparing with it reads a value without waiting for one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sealed:
    """Content of a name in the store."""

    raw: bytes = b""
    """The stored bytes. Empty: nothing is stored."""
    message: Message | None = None
    """None: nothing is stored, or it was not sealed with this key under this name."""


class SealedStore:
    """Messages under the prefix of one run."""

    def __init__(self, store: "Store", secret: str, prefix: str) -> None:
        store.set_timeout(timedelta(seconds=_WAIT_S))
        self._store = store
        self._prefix = prefix
        self._last_opened: dict[str, Sealed] = {}
        """Last content of each name of `read_all`: most content has not changed since."""
        self._fernet = Fernet(base64.urlsafe_b64encode(hashlib.sha256(secret.encode()).digest()))

    def publish(self, name: str, message: Message) -> None:
        """Write a message over whatever is stored under this name."""
        self._store.set(self._key(name), self._seal(name, message))

    def publish_all(self, messages: Mapping[str, Message]) -> None:
        """Write many messages as `publish` does, with one question to the store."""
        keys = [self._key(name) for name in messages]
        sealed = [self._seal(name, message) for name, message in messages.items()]
        self._store.multi_set(keys, sealed)  # type: ignore[attr-defined]  # torch's declarations lack it

    def replace(self, name: str, found: Sealed, message: Message) -> Sealed:
        """Write a message if `found` is still stored. Return the content that is stored then."""
        key, raw = self._key(name), self._seal(name, message)
        stored = self._store.compare_set(key, found.raw, raw)  # type: ignore[arg-type]  # bytes as well
        if found.raw and stored == found.raw:  # that is how a store answers that the key was deleted
            stored = self._store.compare_set(key, "", raw)
        return self._unseal(name, stored)

    def read(self, name: str) -> Sealed:
        """Return the content of this name, without waiting for it."""
        return self._unseal(name, self._store.compare_set(self._key(name), _ABSENT, ""))

    def read_all(self, names: Sequence[str]) -> list[Sealed]:
        """Return the content of each name, with two requests to the store if all of them exist."""
        keys = [self._key(name) for name in names]
        with suppress(RuntimeError):  # a key was deleted since it was looked for
            if not keys or self._store.check(keys):
                found = self._store.multi_get(keys) if keys else []
                for name, raw in zip(names, found, strict=True):
                    if name not in self._last_opened or self._last_opened[name].raw != raw:
                        self._last_opened[name] = self._unseal(name, raw)
                return [self._last_opened[name] for name in names]
        return [self.read(name) for name in names]

    def _key(self, name: str) -> str:
        return f"{self._prefix}/{name}"

    def _seal(self, name: str, message: Message) -> str:
        return self._fernet.encrypt(json.dumps([self._key(name), message]).encode()).decode()

    def _unseal(self, name: str, raw: bytes) -> Sealed:
        if raw == _ABSENT.encode():
            return Sealed()
        try:
            key, message = json.loads(self._fernet.decrypt(raw))
        except (InvalidToken, ValueError):
            return Sealed(raw=raw)
        return Sealed(raw=raw, message=message if key == self._key(name) else None)


def shared_secret(launch: LaunchSpec) -> str:
    """Return the secret in the environment, or in the file that the job spec names. Raise `SpecInvalid` without a long one."""
    file = launch.rendezvous_key_file
    try:
        secret = Path(file).read_text().strip() if file else os.environ.get(KEY_VARIABLE, "").strip()
    except (OSError, ValueError) as err:
        raise SpecInvalid(f"expected a readable file at launch.rendezvous_key_file = {file!r}, found {err}") from err
    if len(secret) >= _SHORTEST_KEY:
        note_secrets({"secret": secret})
        return secret
    where = f"in {file!r}" if file else f"in the environment variable {KEY_VARIABLE}"
    raise SpecInvalid(
        f"expected a secret of at least {_SHORTEST_KEY} characters that all nodes of the run share, found {len(secret)} {where}: "
        f"make one with `openssl rand -hex 32`, and give it to every node in {KEY_VARIABLE}, or in a file that "
        "launch.rendezvous_key_file names"
    )
