"""A headless Chromium for tests, spoken to through its debugging pipe: no port, no driver, no package.

`browser()` is a context; tests that need one call `need_browser()`, which skips them where no Chromium is installed
(`apt-get install chromium` on Debian).
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.patience import Patience

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
ARGUMENTS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-default-apps", "--disable-sync",
    "--no-proxy-server", "--hide-scrollbars", "--remote-debugging-pipe", "--window-size=1100,900",
)  # fmt: skip
# What Chromium answers to a question that was under way when its page went to another address.
LEFT = "Inspected target navigated or closed"


class PageLeftError(Exception):
    """The page was left while it was asked: nobody knows its answer, and the next page can be asked."""


def need_browser() -> str:
    """Return the path of a Chromium; skip the test where there is none."""
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        pytest.skip(f"no Chromium on this machine (one of {', '.join(NAMES)}): the page was not looked at in a browser")
    return found


class Tab:
    """A page in the browser. What it complained of and what it asked for is kept."""

    def __init__(self, requests: int, answers: int) -> None:
        self._out, self._in, self._rest, self._number = requests, answers, b"", 0
        self._session = ""
        self.complaints: list[str] = []
        self.asked: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command and return its result."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        patience = Patience(60)
        while not patience.is_over:
            for told in self._read():
                if told.get("id") == self._number:
                    if told.get("error", {}).get("message") == LEFT:
                        raise PageLeftError(method)
                    assert "error" not in told, told
                    return told["result"]
        raise TimeoutError(method)

    def _read(self) -> list[dict[str, Any]]:
        ready, _, _ = select.select([self._in], [], [], 1.0)
        if not ready:
            return []
        data = os.read(self._in, 1 << 20)
        assert data, "the browser has ended"
        *whole, self._rest = (self._rest + data).split(b"\0")
        found = [json.loads(each) for each in whole]
        for told in found:
            self._note(told.get("method", ""), told.get("params", {}))
        return found

    def _note(self, method: str, told: dict[str, Any]) -> None:
        if method == "Network.requestWillBeSent":
            self.asked.append(told["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(told["exceptionDetails"])[:500])
        elif method == "Runtime.consoleAPICalled" and told["type"] in ("error", "warning", "assert"):
            self.complaints.append(json.dumps(told["args"])[:500])
        elif method == "Log.entryAdded" and told["entry"]["level"] in ("error", "warning"):
            self.complaints.append(told["entry"]["text"][:500])
        elif method == "Page.javascriptDialogOpening":
            self.complaints.append(f"a dialog: {told['message']}")

    def open(self, url: str) -> None:
        """Go to an address."""
        self.call("Page.navigate", url=url)

    def ask(self, expression: str) -> Any:
        """Return what an expression of JavaScript gives in the page."""
        told = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in told, told
        return told["result"].get("value")

    def click(self, selector: str) -> None:
        """Click what a selector finds. The page may be left by it."""
        with contextlib.suppress(PageLeftError):
            self.ask(f"document.querySelector({json.dumps(selector)}).click()")

    def wait(self, expression: str, timeout: float = 30) -> None:
        """Return as soon as an expression holds in the page. One that fails does not: the page may not be there yet."""
        asked = f"(() => {{ try {{ return Boolean({expression}); }} catch {{ return false; }} }})()"
        patience = Patience(timeout)
        while not self._holds(asked):
            assert not patience.is_over, f"{expression} never held; complaints: {self.complaints}"

    def _holds(self, expression: str) -> bool:
        try:
            return bool(self.ask(expression))
        except PageLeftError:
            return False

    def picture(self, path: Path, width: int = 1100, height: int = 900) -> None:
        """Write a picture of the page."""
        import base64

        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))


@contextlib.contextmanager
def browser(profile: Path) -> Iterator[Tab]:
    """Give a tab of a new browser, which ends with the block. `profile` is a folder for what it keeps."""
    path = need_browser()
    to_read, requests = os.pipe()
    answers, to_write = os.pipe()
    words = [path, *ARGUMENTS, f"--user-data-dir={profile}"]
    script = f'exec "$@" 3<&{to_read} 4>&{to_write}'
    process = subprocess.Popen(
        ["bash", "-c", script, "bash", *words], pass_fds=(to_read, to_write), stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )  # fmt: skip
    os.close(to_read)
    os.close(to_write)
    try:
        yield Tab(requests, answers)
    finally:
        process.kill()
        process.wait()
        os.close(requests)
        os.close(answers)
