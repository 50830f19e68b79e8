"""Fixtures of the tests of listeners."""

import os
from collections.abc import Iterator

import pytest

from tests.extensions.listeners.listening import install_strangers


@pytest.fixture(scope="module")
def strangers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Let processes find the listeners of another distribution."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("PYTHONPATH", str(install_strangers(tmp_path_factory.mktemp("strangers"))))
        monkeypatch.syspath_prepend(os.environ["PYTHONPATH"])
        yield
