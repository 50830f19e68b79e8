"""Limits of certificates, in the code and on the page."""

import re
from pathlib import Path

import pytest

from dlac_pipeline.extensions.erasure.limits import LIMITS

pytestmark = pytest.mark.usefixtures("only_this_process")

_PAGE = Path(__file__).parents[3] / "docs" / "extensions" / "erasure.md"


def test_page_lists_each_limit() -> None:
    """The page has the sentences of the list, in their order, and no others."""
    section = _PAGE.read_text().partition("## What a certificate does not cover")[2]
    assert re.findall("^- (.*)$", section, re.MULTILINE) == list(LIMITS)
