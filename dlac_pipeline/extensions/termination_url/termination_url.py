"""Polling of `launch.termination_url`, at which a cloud announces that the node is terminated."""

import logging
from collections.abc import Callable

import requests

from dlac_pipeline.lakehouse.masking import mask_secrets
from dlac_pipeline.spec.launch_spec import LaunchSpec

_log = logging.getLogger(__name__)
_ASK_EVERY_S = 2.0
_ANSWER_WITHIN_S = (1.0, 2.0)
"""Seconds to connect and to answer. An address of the node itself answers in milliseconds."""
_NOT_PREEMPTED = ("FALSE", "NONE")
"""Answers of the metadata server of Google while no termination is planned."""
_SCHEDULED, _ENDS_NODE = '"Events"', ('"Preempt"', '"Terminate"')
"""Scheduled events of Azure, and the types among them after which a node is gone."""


def announces_end(answer: str) -> bool:
    """Return False for an answer of a cloud whose endpoint has status 200 also without a termination."""
    if _SCHEDULED in answer:
        return any(kind in answer for kind in _ENDS_NODE)
    return answer.strip().upper() not in _NOT_PREEMPTED


def await_announcement(launch: LaunchSpec, wait: Callable[[float], bool]) -> bool:
    """Ask the URL until it announces a termination. Any other answer is logged once and is no reason to stop."""
    reported = False
    with requests.Session() as session:
        session.trust_env = False  # an address of this node: no proxy, and no stored password
        while True:
            announced, problem = _ask(session, launch)
            if announced:
                return True
            if problem and not reported:
                reported = True
                wanted = "expected 200 or 404 from launch.termination_url"
                _log.warning("%s, found %s; it is asked again", wanted, problem)
            if wait(_ASK_EVERY_S):
                return False


def _ask(session: requests.Session, launch: LaunchSpec) -> tuple[bool, str]:
    """Ask once. Return True if a termination is announced, and a description of the problem, or an empty string."""
    try:
        answer = session.get(launch.termination_url, headers=launch.termination_headers, timeout=_ANSWER_WITHIN_S)
    except requests.RequestException as err:
        return False, f"{type(err).__name__}: {mask_secrets(str(err))}"  # the error names the address
    announced = answer.status_code == 200 and announces_end(answer.text)
    return announced, "" if answer.status_code in (200, 404) else f"{answer.status_code}"
