"""An exception that DLAC does not expect: one line for people, and a file with the traceback for who mends it."""

import os
import platform
import tempfile
import time
import traceback
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version

_LIBRARIES = ("dlac-pipeline", "torch", "pyiceberg", "pyarrow", "duckdb", "sqlalchemy", "dagster", "deepspeed")


def report_unexpected(err: BaseException) -> str:
    """Write the traceback into a file that only this user may read. Return the line that names the file."""
    first = next(iter(str(err).splitlines()), "")
    message = f"unexpected {type(err).__name__}{': ' if first else ''}{first}"
    try:
        name = f"dlac-error-{time.strftime('%Y%m%dT%H%M%S')}-{os.getpid()}-"
        descriptor, path = tempfile.mkstemp(prefix=name, suffix=".log")
        with os.fdopen(descriptor, "w") as stream:
            stream.write(f"Python {platform.python_version()} on {platform.platform()}\n")
            for library in _LIBRARIES:
                with suppress(PackageNotFoundError):
                    stream.write(f"{library} {version(library)}\n")
            stream.write(f"\n{''.join(traceback.format_exception(err))}")
    except OSError as failed:
        return f"{message}; this is a bug of DLAC, and its traceback could not be written ({failed}): run it again with free disk"
    return f"{message}; this is a bug of DLAC: report it with the traceback in {path!r}"
