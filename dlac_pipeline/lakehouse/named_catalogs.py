"""Catalogs by their name in PyIceberg's own configuration, which is read again here, so that the present environment counts.

The result has passwords and keys: it stays in memory, and job specs keep the name alone. PyIceberg ignores misspelled variables
and properties, so they are named here.
"""

import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, get_args

import pyiceberg.io
from pydantic import ValidationError
from pyiceberg.utils.config import PYICEBERG_HOME, PYICEBERG_YML, Config
from strictyaml import YAMLError  # type: ignore[import-untyped]  # published without types

from dlac_pipeline.lakehouse.config import CUSTOM_CATALOG, LakehouseConfig
from dlac_pipeline.lakehouse.errors import CatalogMisconfigured, SpecInvalid
from dlac_pipeline.lakehouse.masking import mask_secrets
from dlac_pipeline.lakehouse.variables import check_pyiceberg, similar_name

_KINDS = get_args(LakehouseConfig.model_fields["type"].annotation)
_PROPERTIES = frozenset(
    [*("type", "uri", "warehouse", "token", "credential", "scope", CUSTOM_CATALOG)]
    + [value for name, value in vars(pyiceberg.io).items() if name.isupper() and isinstance(value, str)]
)


def configured(config: LakehouseConfig) -> LakehouseConfig:
    """Return settings, completed by the settings that PyIceberg has under their name. Own ones win.

    Raises `CatalogMisconfigured`, or `SpecInvalid` as `check_properties` and `check_pyiceberg`.
    """
    check_pyiceberg(os.environ)
    check_properties(config.properties)
    if not config.is_named:
        return config
    found = _find(str(config.name))
    if found is None:
        if config.kind != "sql":  # the job spec has all of it
            return config
        raise CatalogMisconfigured(_unknown(str(config.name)))
    given = {name: value for name in ("type", "uri", "warehouse") if (value := getattr(config, name))}
    check_properties(found)
    places = {name: found.pop(name, "") for name in ("type", "uri", "warehouse")} | given
    if CUSTOM_CATALOG in found:
        places["type"] = ""
    if places["type"].lower() not in _KINDS:
        raise CatalogMisconfigured(
            f"expected catalog {config.name!r} to be of a kind that all processes of a run can open, one of "
            f"{[kind for kind in _KINDS if kind]!r}, found {places['type']!r}: configure another catalog"
        )
    merged = {**places, "type": places["type"].lower(), "properties": {**found, **config.properties}}
    try:
        return LakehouseConfig.model_validate({**config.model_dump(), **merged})
    except ValidationError as err:
        raise CatalogMisconfigured(
            f"expected the settings of a catalog in PyIceberg's configuration of {config.name!r}, found: "
            f"{mask_secrets(str(err.errors()[0]['msg']))}: correct them"
        ) from err


def check_properties(names: Iterable[str]) -> None:
    """Raise `SpecInvalid` for a property whose name is a property of PyIceberg in another spelling."""
    for name in names:
        family = re.split("[._-]", name.lower())[0]
        meant = similar_name(
            name, {each for each in _PROPERTIES if each.partition(".")[0] == family or "." not in name + each}
        )
        if meant:
            raise SpecInvalid(f"expected a property of PyIceberg such as {meant!r}, found {name!r}, which it ignores")


def source_catalog(name: str) -> LakehouseConfig:
    """Return the settings of another catalog than the lakehouse's, in which sources are. Raises as `configured`."""
    return configured(LakehouseConfig(name=name))


def _find(name: str) -> dict[str, Any] | None:
    try:
        found = Config().get_catalog_config(name)
    except (ValueError, OSError, YAMLError) as err:
        raise CatalogMisconfigured(
            f"expected PyIceberg's configuration of catalog {name!r}, found {type(err).__name__}: "
            f"{mask_secrets(next(iter(str(err).splitlines()), ''))}: correct it"
        ) from err
    return None if found is None else dict(found)


def _unknown(name: str) -> str:
    folders = (os.environ.get(PYICEBERG_HOME), os.path.expanduser("~"), os.getcwd())
    files = [Path(folder) / PYICEBERG_YML for folder in folders if folder]
    read = next((file for file in files if file.is_file()), None)
    looked = [f"{file} ({_state(file, read)})" for file in files]
    home = "" if os.environ.get(PYICEBERG_HOME) else ", PYICEBERG_HOME (not set)"
    variables = f"PYICEBERG_CATALOG__{name.upper().replace('-', '_')}__*"
    known = sorted(Config().get_known_catalogs())
    return (
        f"expected a catalog named {name!r} in PyIceberg's configuration, found only {known!r}; looked in the variables "
        f"{variables}{home}, and in {', '.join(looked)}: configure it there, or set lakehouse.uri; without lakehouse.name there "
        "is an embedded lakehouse in the home folder"
    )


def _state(file: Path, read: Path | None) -> str:
    if file == read:
        return "read"
    return "not read, since PyIceberg reads the first file that it finds" if file.is_file() else "no such file"
