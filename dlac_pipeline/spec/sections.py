"""Sections of the job spec that extensions own. They enter through the door `dlac.settings`, by the names of their tables."""

import sys
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol

from pydantic import ValidationError

from dlac_pipeline.lakehouse.doors import Door
from dlac_pipeline.lakehouse.errors import BadInput
from dlac_pipeline.spec.spec_problems import Section

if TYPE_CHECKING:
    from dlac_pipeline.spec.job_spec import JobSpec

SECTIONS = Door("dlac.settings", "section")


class EventReceiver(AbstractContextManager[Any], Protocol):
    """The receiver of a launch's events. The context ends with the launch, with the error that ends it."""

    def send(self, event: dict[str, Any]) -> None:
        """Pass on an event of the node that leads, and return at once."""


class ExtensionSection(Section):
    """A section of the job spec that an extension owns. An entry of `dlac.settings` is a class of this kind.

    Its name is that of the table in the job spec. Each setting has a default, for specs without the table.
    """

    def check_here(self) -> None:
        """Raise `BadInput` if something that the section names is missing on this machine. Called before a run is claimed."""

    def event_receiver(
        self, spec: "JobSpec", *, launched_by: str = "", is_command: bool = False
    ) -> EventReceiver | None:
        """Return a receiver of the events of a launch, or of a command such as a rewind. None: the section has none.

        Nothing is started before the first event.
        """
        return None


@dataclass(frozen=True, slots=True)
class UnreadSection:
    """A table of the job spec that is no section of the core."""

    name: str
    raw: Any


def read_section(found: object) -> object:
    """Return the section that an unread table means. An unknown name is an unknown field of the job spec."""
    if not isinstance(found, UnreadSection):
        return found
    if isinstance(found.raw, ExtensionSection):
        return found.raw
    if found.name not in SECTIONS.points():
        raise ValidationError.from_exception_data(
            found.name, [{"type": "extra_forbidden", "loc": (), "input": found.raw}]
        )
    return section_class(found.name).model_validate(found.raw)


def section_class(name: str) -> type[ExtensionSection]:
    """Import the section of a name. Raise `BadInput` if it cannot be imported, or is none."""
    return _load(name, tuple(sys.path))


def section_classes() -> dict[str, type[ExtensionSection]]:
    """Import all installed sections that can be imported."""
    found = {}
    for name in SECTIONS.points():
        with suppress(BadInput):
            found[name] = section_class(name)
    return found


@cache
def _load(name: str, path: tuple[str, ...]) -> type[ExtensionSection]:
    """Load an entry once for each search path, because metadata of all distributions is read for it."""
    found = SECTIONS.load(name, setting="the section")
    if not (isinstance(found, type) and issubclass(found, ExtensionSection)):
        raise BadInput(
            f"expected a subclass of ExtensionSection for [{name}], found {found!r}: correct its entry point"
        )
    return found
