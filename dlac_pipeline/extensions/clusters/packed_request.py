"""A request as one word, which a node of a cluster job finds in its environment or in a file."""

import base64
import zlib
from collections.abc import Mapping
from pathlib import Path

from pydantic import ValidationError

from dlac_pipeline.lakehouse.errors import SpecInvalid
from dlac_pipeline.spec.launch_request import Request

REQUEST_VARIABLE = "DLAC_REQUEST"
"""Environment variable that carries the request to the nodes of a cluster job."""
REQUEST_FILE_VARIABLE = "DLAC_REQUEST_FILE"
"""Environment variable that names a file with the request: on Kubernetes it is a secret."""


def pack(request: Request) -> str:
    """Return a request as one word of letters, digits, '-', '_' and '='."""
    return base64.urlsafe_b64encode(zlib.compress(request.model_dump_json().encode())).decode()


def unpack(environment: Mapping[str, str]) -> Request:
    """Return the request in the environment of a node, or in a file that it names. Raise `SpecInvalid` without one."""
    try:
        file = environment.get(REQUEST_FILE_VARIABLE)
        word = Path(file).read_text() if file else environment[REQUEST_VARIABLE]
        return Request.model_validate_json(zlib.decompress(base64.urlsafe_b64decode(word)))
    except (KeyError, OSError, ValueError, zlib.error, ValidationError) as err:
        raise SpecInvalid(
            f"expected a request of this DLAC in ${REQUEST_VARIABLE} or ${REQUEST_FILE_VARIABLE}, found none: submit the job "
            f"with the version that its image has ({err})"
        ) from err
