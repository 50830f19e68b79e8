"""Transfer of memory states between the nodes of a run: authenticated connections, and files with their seals over them.

Both ends prove that they have the run's key, by a challenge to which the server's address and the operation belong. Content is
neither encrypted nor authenticated, like messages of Gloo and NCCL between ranks. A message is a msgpack map after its length. A
part of a state is sent as its seal, the blocks of its files, and a message with their checksum, if the seal is still the same.
Blocks that the receiver has of an earlier state in this slot, as those of frozen weights, are not sent again.
"""

import hashlib
import hmac
import io
import os
import secrets
import socket
import struct
import time
from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

import msgpack
from blake3 import blake3

from dlac_pipeline.memory_states import states
from dlac_pipeline.memory_states.states import RankState

Address = tuple[str, int]
"""Address and port at which a node serves its memory states."""
Guard = Callable[[], AbstractContextManager[object]]
"""Context of each write to this node's memory. It raises `TransferRefused` once another transfer may write there."""
_CHALLENGE_BYTES = 32
_OPERATION_BYTES = 8
_LENGTH = struct.Struct(">Q")
_BLOCK_LENGTH = struct.Struct(">I")
_BLOCK_BYTES = 1 << 20
_MOST_MESSAGE_BYTES = 1 << 28
_MOST_FILES = 100_000
_BUFFER_BYTES = 1 << 20
_LEAST_WAIT_S = 0.001


class TransferRefused(OSError):
    """The other node does not take, or does not have, a state."""


@dataclass(frozen=True, slots=True)
class Sent:
    """Parts of a state that another node has."""

    seals: bytes
    """Digest of their seals."""
    blocks: Mapping[str, Sequence[bytes]]
    """Digests of the blocks of each file."""


def key_of(secret: str, run: str) -> bytes:
    """Return the key of a run's nodes."""
    return hmac.digest(secret.encode(), f"dlac memory states of {run}".encode(), hashlib.sha256)


class Connection:
    """An authenticated connection to another node, for one operation."""

    def __init__(self, connected: socket.socket, operation: str) -> None:
        self.operation = operation
        self.content_bytes = 0
        """Bytes of files that this end has sent."""
        self._socket = connected
        self._checksum = blake3()
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    @classmethod
    def open(cls, address: Address, key: bytes, operation: str, *, timeout_s: float) -> "Connection":
        """Connect to a node. Raise `OSError` if it does not answer, or has another key."""
        connected, until = socket.create_connection(address, timeout_s), time.monotonic() + timeout_s
        try:
            mine, named = secrets.token_bytes(_CHALLENGE_BYTES), operation.encode().ljust(_OPERATION_BYTES)
            agreed = _receive_exactly(connected, _CHALLENGE_BYTES, until=until) + mine + named
            connected.sendall(mine + named + proof_of(key, b"client", address, agreed))
            proof = _receive_exactly(connected, hashlib.sha256().digest_size, until=until)
            if not hmac.compare_digest(proof, proof_of(key, b"server", address, agreed)):
                raise TransferRefused(f"expected a node of this run at {address!r}, found one with another key")
            connected.settimeout(timeout_s)
        except BaseException:
            connected.close()
            raise
        return cls(connected, operation)

    @classmethod
    def accept(cls, connected: socket.socket, address: Address, key: bytes, *, timeout_s: float) -> "Connection":
        """Answer a node that has connected to this address. Raise `OSError` if it does not show the key in time."""
        connected.settimeout(timeout_s)
        mine, until = secrets.token_bytes(_CHALLENGE_BYTES), time.monotonic() + timeout_s
        connected.sendall(mine)
        answer = _receive_exactly(connected, _CHALLENGE_BYTES + _OPERATION_BYTES, until=until)
        proof = _receive_exactly(connected, hashlib.sha256().digest_size, until=until)
        if not hmac.compare_digest(proof, proof_of(key, b"client", address, mine + answer)):
            raise TransferRefused("another node has connected with another key")
        connected.settimeout(timeout_s)
        connected.sendall(proof_of(key, b"server", address, mine + answer))
        return cls(connected, answer[_CHALLENGE_BYTES:].decode().strip())

    def __enter__(self) -> "Connection":
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def send(self, **message: Any) -> None:
        """Send a message."""
        content = msgpack.packb(message)
        self._socket.sendall(_LENGTH.pack(len(content)) + content)

    def receive(self) -> dict[str, Any]:
        """Return a message. Raise `TransferRefused` if it has the reason of a refusal, or `OSError`."""
        (length,) = _LENGTH.unpack(_receive_exactly(self._socket, _LENGTH.size))
        if length > _MOST_MESSAGE_BYTES:
            raise OSError(f"expected a message of at most {_MOST_MESSAGE_BYTES} bytes, found {length}")
        try:
            message: dict[str, Any] = msgpack.unpackb(_receive_exactly(self._socket, length))
            refused = message.get("refused", "")
        except (ValueError, AttributeError, msgpack.UnpackException) as err:
            raise OSError(f"expected a message of another node, found {type(err).__name__}: {err}") from err
        if refused:
            raise TransferRefused(str(refused))
        return message

    def checksum(self) -> bytes:
        """Return the checksum of all blocks that were sent or received."""
        return self._checksum.digest()

    def send_file(self, folder: int, name: str, size: int, known: Sequence[bytes] = ()) -> list[bytes]:
        """Send the first `size` bytes of a file in an open folder, without blocks whose digest is the `known` one.

        Return the digests of all blocks. Raise `OSError` if the file is shorter.
        """
        buffer, digests = memoryview(bytearray(min(size, _BLOCK_BYTES))), list[bytes]()
        with open(name, "rb", buffering=0, opener=partial(os.open, dir_fd=folder)) as file:
            for begin in range(0, size, _BLOCK_BYTES):
                block = buffer[: size - begin]
                if (found := _read_block(file, block)) < len(block):
                    raise OSError(f"expected {size} bytes in {name!r}, found {begin + found}")
                digest = blake3(block).digest()
                is_known = digest in known[len(digests) : len(digests) + 1]
                self._socket.sendall(_BLOCK_LENGTH.pack(0 if is_known else len(block)))
                if not is_known:
                    self._socket.sendall(block)
                    self._checksum.update(digest)
                    self.content_bytes += len(block)
                digests.append(digest)
        return digests

    def receive_file(self, path: Path, size: int, guard: Guard, *, has_base: bool = False) -> None:
        """Write `size` bytes over a file, whose pages are used again. With `has_base` blocks that are not sent stay."""
        buffer = memoryview(bytearray(min(size, _BLOCK_BYTES)))
        with guard():
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        try:
            for begin in range(0, size, _BLOCK_BYTES):
                block = buffer[: size - begin]
                (length,) = _BLOCK_LENGTH.unpack(_receive_exactly(self._socket, _BLOCK_LENGTH.size))
                is_here = has_base and os.fstat(descriptor).st_size >= begin + len(block)  # it may be removed just now
                if length != len(block) and (length or not is_here):
                    raise OSError(f"expected a block of {len(block)} bytes, found one of {length}")
                if length:
                    self._receive_block(descriptor, begin, block, guard)
                    self._checksum.update(blake3(block).digest())
            with guard():
                os.ftruncate(descriptor, size)
        finally:
            os.close(descriptor)

    def _receive_block(self, descriptor: int, begin: int, block: memoryview, guard: Guard) -> None:
        """Receive a block, and write each piece at its place."""
        done = 0
        while done < len(block):
            count = self._socket.recv_into(block[done:])
            if not count:
                raise ConnectionError(f"the other node closed the connection after {begin + done} bytes of a file")
            with guard():
                written = done
                while written < done + count:
                    written += os.pwrite(descriptor, block[written : done + count], begin + written)
            done += count


def _read_block(file: io.RawIOBase, block: memoryview) -> int:
    """Fill a block from a file, and return the bytes that it has."""
    done = 0
    while done < len(block) and (count := file.readinto(block[done:])):
        done += count
    return done


def send_parts(
    connection: Connection,
    slot: Path,
    ranks: Sequence[int],
    *,
    seals_only: Container[int] = (),
    base: Sent | None = None,
) -> Sent:
    """Send the parts of some ranks in a slot, and return what the other node has then.

    Of the ranks in `seals_only` no files are sent, and the seals name none. Blocks that are as in `base` are not sent, if the
    other node still has it. Raise `OSError` if a part was written since then, or `TransferRefused`.
    """
    found = states.read_seals(slot, ranks)
    sent = [replace(each, files=[]) if each.rank in seals_only else each for each in found]
    connection.send(seals=[states.pack_seal(each) for each in sent], base=b"" if base is None else base.seals)
    has_base = connection.receive().get("has_base", False)
    known = base.blocks if has_base and base is not None else {}
    with states.opened(slot) as here:
        blocks = {
            name: connection.send_file(here, name, size, known.get(name, ()))
            for each in sent
            for name, size in each.files
        }
    is_same = states.are_same(states.read_seals(slot, ranks), found)
    connection.send(refused="" if is_same else "the state was overwritten", checksum=connection.checksum())
    if not is_same:
        raise OSError(f"expected the state in {str(slot)!r} to stay, found that it was overwritten")
    return Sent(_digest_of(sent), blocks)


def receive_parts(
    connection: Connection, slot: Path, guard: Guard, check: Callable[[list[RankState]], None]
) -> list[RankState]:
    """Receive parts into a slot, in an existing folder of its attempt. Seals are removed first, and written last.

    `check` raises `ValueError` for parts that are not wanted. Raise `OSError` if the parts did not arrive whole.
    """
    try:
        offered = connection.receive()
        found = [states.Part(states.slot_name(slot), each).state for each in map(states.parse_seal, offered["seals"])]
        files = [(_path_in(slot, name), size) for each in found for name, size in each.files]
        with states.opened(slot.parent):
            _check_room(slot, files)
        check(found)
        has_base = _has_base(slot, [each.rank for each in found], offered.get("base", b""))
        with guard(), states.opened(slot.parent):
            slot.mkdir(mode=0o700, exist_ok=True)
            for each in found:
                states.remove_seal(slot, each.rank)
            for folder in {path.parent for path, _ in files}:
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except (ValueError, KeyError, TypeError, OSError) as err:
        with suppress(OSError):
            connection.send(refused=str(err))
        raise TransferRefused(str(err)) from err
    connection.send(has_base=has_base)
    for path, size in files:
        connection.receive_file(path, size, guard, has_base=has_base)
    if connection.receive().get("checksum") != connection.checksum():
        raise TransferRefused("the content changed on its way")
    for each in found:
        with guard():
            states.write_seal(slot, each)
    return found


def _has_base(slot: Path, ranks: Sequence[int], base: bytes) -> bool:
    """Return whether a slot has whole parts of some ranks whose seals have the digest `base`."""
    parts = {part.state.rank: part.state for part in states.parts_in(slot)} if base else {}
    return all(rank in parts for rank in ranks) and base == _digest_of([parts[rank] for rank in ranks if rank in parts])


def _digest_of(parts: Sequence[RankState]) -> bytes:
    return blake3(b"".join(map(states.pack_seal, parts))).digest()


def _path_in(slot: Path, name: str) -> Path:
    """Return the path of a file in a slot. Raise `ValueError` for one elsewhere, and for a seal."""
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or not path.parts or path.suffix in (".sealed", ".tmp") or "\0" in name:
        raise ValueError(f"expected the path of a file of a state, found {name!r}")
    return slot / path


def _check_room(slot: Path, files: Sequence[tuple[Path, int]]) -> None:
    """Raise `ValueError` if files of these sizes do not fit into memory. Their pages are used again where they exist."""
    if len(files) > _MOST_FILES or any(not isinstance(size, int) or size < 0 for _, size in files):
        raise ValueError(f"expected at most {_MOST_FILES} files with their sizes, found others")
    needed = sum(size for _, size in files)
    for path, size in files:
        with suppress(OSError):
            needed -= min(size, path.stat().st_size)
    room = states.room_for_states(slot.parent)
    if needed > room:
        raise ValueError(f"expected {needed >> 20} MiB of free memory in {str(slot)!r}, found {room >> 20} MiB")


def proof_of(key: bytes, role: bytes, server: Address, agreed: bytes) -> bytes:
    """Return the proof that one side of a connection knows the key."""
    return hmac.digest(key, role + agreed + f"{server[0]}:{server[1]}".encode(), hashlib.sha256)


def _receive_exactly(connected: socket.socket, count: int, *, until: float = 0.0) -> bytes:
    """Receive bytes. `until` is a moment of the monotonic clock by which all have to be there, or 0."""
    content = bytearray()
    while len(content) < count:
        if until:
            connected.settimeout(max(_LEAST_WAIT_S, until - time.monotonic()))
        piece = connected.recv(min(count - len(content), _BUFFER_BYTES))
        if not piece:
            raise ConnectionError("the other node closed the connection")
        content += piece
    return bytes(content)
