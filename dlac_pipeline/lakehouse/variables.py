"""Environment variables, and names of settings, that a library ignores or cannot read."""

import logging
import re
from collections.abc import Collection, Iterable, Mapping
from difflib import get_close_matches
from functools import cache

from dlac_pipeline.lakehouse.errors import SpecInvalid

_log = logging.getLogger(__name__)
_SIMILAR = 0.88
_OF_A_CATALOG = re.compile(r"PYICEBERG_CATALOG__[^_].*?__.+", re.IGNORECASE)
_FLAG = r"(?i:y|yes|t|true|on|1|n|no|f|false|off|0)"
_PYICEBERG = {
    "PYICEBERG_HOME": ".*",
    "PYICEBERG_DEFAULT_CATALOG": ".*",
    "PYICEBERG_MAX_WORKERS": "0*[1-9][0-9]{0,5}",
    "PYICEBERG_MANIFEST_CACHE_SIZE": "[0-9]{1,18}",
    "PYICEBERG_LEGACY_CURRENT_SNAPSHOT_ID": _FLAG,
    "PYICEBERG_DOWNCAST_NS_TIMESTAMP_TO_US_ON_WRITE": _FLAG,
}
"""Variables of PyIceberg that configure no catalog, and the pattern of their values."""


def similar_name(name: str, known: Collection[str]) -> str:
    """Return the known name that an unknown one may be a misspelling of, or an empty text."""
    if name in known:
        return ""
    spelled = {each.lower().replace("_", "-"): each for each in known}
    close = get_close_matches(name.lower().replace("_", "-"), list(spelled), n=1, cutoff=_SIMILAR)
    return spelled[close[0]] if close else ""


def warn_of_variables(names: Iterable[str], known: Collection[str], what: str) -> None:
    """Log a warning, once in a process, for each of the variables that is not known. `what` reads them."""
    for name in names:
        if name not in known:
            _warn(name, similar_name(name, known), what)


@cache
def _warn(name: str, meant: str, what: str) -> None:
    advice = f"did you mean {meant!r}?" if meant else "unset it"
    _log.warning("%s reads no variable %r, so it has no effect: %s", what, name, advice)


def check_pyiceberg(environment: Mapping[str, str]) -> None:
    """Warn of variables that PyIceberg does not read. Raise `SpecInvalid` for a value with which its import fails."""
    names = [name for name in environment if name.startswith("PYICEBERG_") and not _OF_A_CATALOG.fullmatch(name)]
    warn_of_variables(names, _PYICEBERG, "PyIceberg")
    for name in _PYICEBERG.keys() & environment.keys():
        if not re.fullmatch(_PYICEBERG[name], environment[name], re.DOTALL):
            kind = "yes or no" if _PYICEBERG[name] == _FLAG else "a number"
            raise SpecInvalid(
                f"expected {kind} in the environment variable {name}, found {environment[name]!r}: correct it, or unset it"
            )
