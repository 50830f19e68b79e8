"""Distributed verification: nodes that share the checkpoint folder each read a part. The leader reads the rest."""

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from heapq import heapreplace
from typing import Any

from dlac_pipeline.checkpoint import manifest as manifests
from dlac_pipeline.checkpoint.store import folder_uri
from dlac_pipeline.elastic.round import LEADER, Round
from dlac_pipeline.elastic.sealed_store import Message
from dlac_pipeline.lakehouse.errors import DlacError
from dlac_pipeline.lakehouse.ledger.typed_rows import CheckpointRow
from dlac_pipeline.lakehouse.store_files import StoreFiles

PROVE, PROVED = "prove", "proved"
"""Messages: the leader names the checkpoint. The other nodes report how much of their part they have read, and the result."""
_POLL_S = 0.05
ANSWER_S = 5.0
"""Extra seconds for other nodes, past the time of the leader's own part. Then the leader reads their parts too."""


def parts_of(entries: Sequence[manifests.FileEntry], nodes: int) -> list[list[manifests.FileEntry]]:
    """Return the files of each node by its place, with about equal bytes per node. Every node computes the same parts."""
    parts: list[list[manifests.FileEntry]] = [[] for _ in range(nodes)]
    sizes = [(0, place) for place in range(nodes)]  # a heap, because nodes may be as many as files
    for entry in sorted(entries, key=lambda each: (-each.bytes, each.path)):
        size, place = sizes[0]
        parts[place].append(entry)
        heapreplace(sizes, (size + entry.bytes, place))
    return parts


class NodeVerifiers:
    """Distributed verification on the leader."""

    def __init__(self, round_: Round) -> None:
        self._round = round_
        self._request_number = 0

    def verify(self, row: CheckpointRow, manifest: manifests.Manifest, files: StoreFiles, done: manifests.Done) -> None:
        """Verify as `verify_here` does, with the help of the other nodes. An exception of `done` ends the verification."""
        uri, total = row.manifest_uri, sum(entry.bytes for entry in manifest.files)
        parts = parts_of(manifest.files, 1 + len(self._round.others))
        read_bytes = dict.fromkeys(range(len(parts)), 0)

        def note(place: int, so_far: int) -> None:
            read_bytes[place] = max(read_bytes[place], so_far)  # the bytes of a part that is read twice count once
            done(sum(read_bytes.values()), total)

        def read(place: int) -> None:
            manifests.verify_entries(parts[place], folder_uri(uri), files, lambda so_far, _: note(place, so_far))

        self._request_number += 1
        self._round.announce(PROVE, {"uri": uri, "digest": row.manifest_digest, "asked": self._request_number})
        began = time.monotonic()
        with manifests.store_there(uri, files):
            read(LEADER)
            until = 2 * time.monotonic() - began + ANSWER_S
            for place in self._round.others:
                if not self._is_intact(place, until, partial(note, place)):
                    read(place)

    def _is_intact(self, place: int, until: float, note: Callable[[int], None]) -> bool:
        """Return True if a node reports that its part is intact. False once it reports damage, is lost, or its time is over."""
        while True:
            message: Message = self._round.message_of(place).get(PROVED, {})
            answer = message if message.get("asked") == self._request_number else {}
            note(answer.get("bytes", 0))
            if "holds" in answer:
                return bool(answer["holds"])
            if time.monotonic() > until or self._round.cut_off or place in self._round.lost_nodes():
                return False
            time.sleep(_POLL_S)


class NodeVerifier:
    """Verification on a node that follows. A thread reads, so that a file system that hangs does not block the node."""

    def __init__(self, round_: Round, files: StoreFiles) -> None:
        self._round = round_
        self._files = files
        self._wanted: Message = {}
        self._progress: Message = {}

    @property
    def message(self) -> Message:
        """Message for the leader."""
        return {PROVED: self._progress} if self._progress else {}

    def poll(self) -> None:
        """Begin to read if the leader has named another checkpoint or repeats its request."""
        request = self._round.announced(PROVE)
        if request is not None and request != self._wanted:
            self._wanted = request
            threading.Thread(target=self._read, args=(request,), name="verification", daemon=True).start()

    def close(self) -> None:
        """Stop reading after the current file."""
        self._wanted = {}

    def _read(self, request: Message) -> None:
        so_far, holds = 0, False
        with suppress(DlacError):  # the leader reads the part itself, and decides
            manifest = manifests.read_manifest(request["uri"], request["digest"], self._files)
            for entry in parts_of(manifest.files, self._round.share.nodes)[self._round.share.node]:
                manifests.verify_entry(entry, folder_uri(request["uri"]), self._files)
                so_far += entry.bytes
                if not self._report(request, bytes=so_far):
                    return
            holds = True
        self._report(request, bytes=so_far, holds=holds)

    def _report(self, request: Message, **progress: Any) -> bool:
        """Report the progress. Return False if the leader's request has changed or ended."""
        wanted = self._wanted == request
        if wanted:
            self._progress = {"asked": request["asked"], **progress}
        return wanted
