"""A headless Chromium that is used as by a person: open a page, wait for its text, click, take a picture."""

import base64
import json
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import requests
from websockets.sync.client import ClientConnection, connect

_FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage"),
    *("--hide-scrollbars", "--remote-debugging-port=0"),
)
_CLICK = """
(() => {
  const all = [...document.querySelectorAll('a, button, span, div')].filter(one => one.innerText.trim() === %s);
  const innermost = all.filter(one => !all.some(other => other !== one && one.contains(other)));
  if (innermost.length > %d) innermost[%d].click();
  return innermost.length > %d;
})()
"""


class Page:
    """One page of a website."""

    def __init__(self, address: str, socket: ClientConnection) -> None:
        self._address = address
        self._socket = socket
        self._asked = 0

    def open(self, path: str) -> None:
        """Open a path of the website."""
        self._ask("Page.navigate", url=f"{self._address}{path}")

    def wait_for(self, *expected: str, within_s: float = 120.0) -> None:
        """Wait until the page shows all of the texts. Fail with its actual text."""
        deadline = time.monotonic() + within_s
        while missing := [words for words in expected if words not in self.text()]:
            assert time.monotonic() < deadline, f"the page does not show {missing!r}, but: {self.text()[:3000]}"
            time.sleep(0.3)

    def text(self) -> str:
        """Return the visible text."""
        return str(self._value("document.body ? document.body.innerText : ''"))

    def click(self, label: str, *, nth: int = 0) -> None:
        """Click the n-th element with this label."""
        clicked = self._value(_CLICK % (json.dumps(label), nth, nth, nth))
        assert clicked, f"nothing is labelled {label!r} in: {self.text()[:3000]}"

    def loaded_pictures(self) -> int:
        """Return the number of embedded pictures that were decoded and have a size."""
        found = "[...document.images].filter(one => one.src.startsWith('data:image/png') && one.naturalWidth > 100)"
        return int(self._value(f"{found}.length"))

    def picture(self, path: Path, *, width: int = 1500, height: int = 1000) -> None:
        """Take a screenshot."""
        self._ask("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        time.sleep(1.5)  # until animations end
        path.write_bytes(base64.b64decode(self._ask("Page.captureScreenshot", format="png")["data"]))

    def _value(self, expression: str) -> Any:
        return self._ask("Runtime.evaluate", expression=expression, returnByValue=True)["result"].get("value")

    def _ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._asked += 1
        self._socket.send(json.dumps({"id": self._asked, "method": method, "params": parameters}))
        while True:
            answer: dict[str, Any] = json.loads(self._socket.recv(timeout=120))
            if answer.get("id") == self._asked:
                assert "error" not in answer, answer
                result: dict[str, Any] = answer["result"]
                return result


@contextmanager
def browsing(address: str, profile: Path) -> Iterator[Page]:
    """Open a new browser on a website."""
    command = ["chromium", *_FLAGS, f"--user-data-dir={profile}", "--window-size=1500,1000", "about:blank"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as browser:
        try:
            port = _port(profile / "DevToolsActivePort")
            pages = requests.get(f"http://127.0.0.1:{port}/json", timeout=60).json()
            [page] = [one for one in pages if one["type"] == "page"]
            with connect(page["webSocketDebuggerUrl"], max_size=None, proxy=None) as socket:
                yield Page(address, socket)
        finally:
            browser.terminate()


def _port(file: Path) -> str:
    deadline = time.monotonic() + 60
    while not (file.exists() and file.read_text().count("\n")):
        assert time.monotonic() < deadline, "the browser did not start"
        time.sleep(0.1)
    return file.read_text().split("\n")[0]
