"""The scheduler of `make test`: one process runs the tests of a module, or of all modules that share a trained lakehouse.

Half of the processes run groups whose tests mostly wait. The other half keep the cores busy. A group that waits, run last,
would leave the cores idle at the end.

pytest-xdist 3.8 groups tests by a suffix of their ids. With pytest 9.2 the suffix has no effect, for an id cannot be set any
more: each process made each lakehouse. Here a group follows from the path in the id.
"""

import re
from functools import cache
from pathlib import Path

from xdist.scheduler import LoadScopeScheduling  # type: ignore[import-untyped]  # published without types
from xdist.workermanage import WorkerController  # type: ignore[import-untyped]  # as above

SHARED = ("lake", "workshop", "datasets")
"""Fixtures of a session that one process makes for all modules."""
_ARGUMENT = re.compile(rf"\b({'|'.join(SHARED)}): [A-Z]")
_CAMPAIGN = re.compile(r"\bcampaign: [A-Z]")
_CAMPAIGNS = 2
"""Processes that make a `campaign`: it has too many modules for one process."""
_WAITING = (
    *("tests/faults/", "campaign", "tests/extensions/chaos/test_chaos"),
    *("tests/extensions/clusters/test_kubernetes", "tests/extensions/replicas/test_replicas"),
    *("tests/process/test_distributed_verify", "tests/process/test_membership", "tests/process/test_store_sockets"),
)
"""Beginnings of the groups whose tests mostly wait, for training processes or for time limits."""
_ROOT = Path(__file__).parents[1]


class GroupScheduling(LoadScopeScheduling):  # type: ignore[misc]  # as above
    """Gives all tests of a group to one process."""

    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid.partition("::")[0])

    def remove_node(self, node: WorkerController) -> str | None:
        """Give a process up, and return the test in which it crashed.

        xdist 3.8 gives its finished groups to the process that replaces it too, which then waits for ever.
        """
        work = self.assigned_work[node]
        self.assigned_work[node] = {group: tests for group, tests in work.items() if not all(tests.values())}
        crashed: str | None = super().remove_node(node)
        return crashed

    def schedule(self) -> None:
        """Give groups to the processes. One that replaces another begins its last test once it knows that none follows."""
        super().schedule()
        for node in self.nodes:
            self._reschedule(node)

    def _assign_work_unit(self, node: WorkerController) -> None:
        self.workqueue.move_to_end(self._next_group(), last=False)
        super()._assign_work_unit(node)

    def _next_group(self) -> str:
        """Return the group to run next: one that waits, if fewer than half of the processes have one, else one that does not."""
        waiting = sum(
            any(_waits(group) and not all(tests.values()) for group, tests in work.items())
            for work in self.assigned_work.values()
        )
        wanted = 2 * waiting < len(self.assigned_work)
        groups: list[str] = list(self.workqueue)
        return next((group for group in groups if _waits(group) == wanted), groups[0])


@cache
def group_of(module: str) -> str:
    """Return the group of a test module: its shared fixture, the module itself, or one of two for those of `campaign`."""
    found = _ARGUMENT.search((_ROOT / module).read_text())
    if found:
        return found[1]
    campaign = _campaign_modules()
    return f"campaign {campaign.index(module) % _CAMPAIGNS}" if module in campaign else module


def _waits(group: str) -> bool:
    """Return whether the tests of the group mostly wait."""
    return group.startswith(_WAITING)


@cache
def _campaign_modules() -> list[str]:
    """Return the test modules that use a `campaign`, by name."""
    modules = sorted((_ROOT / "tests").rglob("test_*.py"))
    return [str(path.relative_to(_ROOT)) for path in modules if _CAMPAIGN.search(path.read_text())]
