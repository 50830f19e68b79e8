from __future__ import annotations

import time

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch's __init__ does not re-export by name

from dlac_pipeline.nodes.talk import Round, Talk
from tests.conftest import wait_until


def test_machines_hear_each_other_as_soon_as_they_speak() -> None:
    """Who has not spoken yet keeps nobody from hearing the others, and what is said last stands."""
    store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)

    def talk(index: int) -> Talk:
        other = TCPStore("127.0.0.1", store.port, None, False, wait_for_workers=False)
        met = Round(index=index, count=3, store=other, waiting=lambda: 0, address="127.0.0.1")
        return Talk(met, {"said": index}, patience_s=10.0)

    first, second = talk(0), talk(1)
    wait_until(lambda: first.words(1).get("said") == 1, what="the second machine's words")
    assert first.words(2) == {}
    third = talk(2)
    second.say({"said": "more"})
    wait_until(lambda: first.words(2).get("said") == 2, what="the third machine's words")
    wait_until(lambda: third.words(1).get("said") == "more", what="what was said later")
    second.end()
    wait_until(lambda: first.lost(1), what="the second machine to be lost")
    assert not first.lost(2)
    assert not first.cut_off
    for machine in (first, third):
        machine.end()


def test_a_machine_whose_store_is_gone_knows_it_although_nobody_asked() -> None:
    """Who leads may have waited for a catalog meanwhile."""
    store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    other = TCPStore("127.0.0.1", store.port, None, False, wait_for_workers=False)
    met = Round(index=0, count=1, store=other, waiting=lambda: 0, address="127.0.0.1")
    machine = Talk(met, {}, patience_s=1.0)
    del store
    time.sleep(4.0)
    assert machine.cut_off
    machine.end()
