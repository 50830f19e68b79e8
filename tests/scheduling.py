"""The scheduler of `make test`: one process runs the tests of a module, or of all modules that share a trained lakehouse.

pytest-xdist 3.8 groups tests by a suffix of their ids. With pytest 9.2 the suffix has no effect, for an id cannot be set any
more: each process made each lakehouse. Here a group follows from the path in the id.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from xdist.scheduler import LoadScopeScheduling  # type: ignore[import-untyped]  # published without types

SHARED = ("lake", "workshop", "datasets")
"""Fixtures of a session that one process makes for all modules."""
_ARGUMENT = re.compile(rf"\b({'|'.join(SHARED)}): [A-Z]")
_CAMPAIGN = re.compile(r"\bcampaign: [A-Z]")
_CAMPAIGNS = 3
"""Processes that make a `campaign`: it has too many modules for one process."""
_ROOT = Path(__file__).parents[1]


class GroupScheduling(LoadScopeScheduling):  # type: ignore[misc]  # as above
    """Gives all tests of a group to one process."""

    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid.partition("::")[0])


@cache
def group_of(module: str) -> str:
    """Return the group of a test module: the shared fixture that its tests have as an argument, or the module itself.

    The modules of `campaign` are three groups, in turn.
    """
    found = _ARGUMENT.search((_ROOT / module).read_text())
    if found:
        return found[1]
    campaign = _campaign_modules()
    return f"campaign {campaign.index(module) % _CAMPAIGNS}" if module in campaign else module


@cache
def _campaign_modules() -> list[str]:
    """Return the test modules that use a `campaign`, by name."""
    modules = sorted((_ROOT / "tests").rglob("test_*.py"))
    return [str(path.relative_to(_ROOT)) for path in modules if _CAMPAIGN.search(path.read_text())]
