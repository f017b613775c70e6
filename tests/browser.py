"""A browser without a window, driven by the DevTools protocol over two pipes.

The option is `--remote-debugging-pipe`. Only what the tests need: open a page, run JavaScript in it, press keys, take a
picture. Needs Chromium or Chrome and no package. https://chromedevtools.github.io/devtools-protocol/
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
_SWITCHES = ("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking")
# The protocol's descriptors are 3 and 4; a shell may not take them from others above 9.
_START = (
    "import os, sys; os.dup2(int(sys.argv[1]), 3); os.dup2(int(sys.argv[2]), 4); os.execvp(sys.argv[3], sys.argv[3:])"
)
PATIENCE = 90.0  # seconds, of which a busy machine needs most


def find() -> str:
    """Return the command of a browser that is installed.

    Without one the test is skipped; under CI it fails, unless `.ci/run` said that none can be installed.
    """
    command = next(filter(None, map(shutil.which, BROWSERS)), None)
    if command is None:
        message = f"none of {', '.join(BROWSERS)} is installed"
        if os.environ.get("CI") and not os.environ.get("LOCKSTEP_NO_BROWSER"):
            pytest.fail(f"{message}, and CI is set: install one, or set LOCKSTEP_NO_BROWSER=1 to leave these tests out")
        pytest.skip(message)
    return command


class Browser:
    """One page. `said`: messages of its console, and violations of its policy."""

    def __init__(self, command: str, profile: Path, width: int = 1000, height: int = 800) -> None:
        theirs_in, self._out = os.pipe()
        self._in, theirs_out = os.pipe()
        # Above the two that they become, so that neither is overwritten before it is taken.
        fds = [os.dup(fd) for fd in (theirs_in, theirs_out)]
        arguments = [
            *_SWITCHES, f"--user-data-dir={profile}", f"--window-size={width},{height}", "--remote-debugging-pipe",
        ]  # fmt: skip
        self._process = subprocess.Popen(
            [sys.executable, "-c", _START, *map(str, fds), command, *arguments],
            pass_fds=[*fds, 3, 4] if max(fds) < 3 else fds,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for fd in (theirs_in, theirs_out, *fds):
            os.close(fd)
        self._rest = b""
        self._number = 0
        self._session: str | None = None  # None: commands go to the browser, not to its page
        self._context: str | None = None
        self.said: list[str] = []
        self.renew()

    def renew(self) -> None:
        """Close the page and open an empty one. It knows nothing of what any before has stored."""
        self._session = None
        if self._context:
            self._ask("Target.disposeBrowserContext", browserContextId=self._context)
        self._context = self._ask("Target.createBrowserContext")["browserContextId"]
        page = {"url": "about:blank", "browserContextId": self._context}
        target = self._ask("Target.createTarget", **page)["targetId"]
        self._session = self._ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self._ask(f"{domain}.enable")
        self.said = []

    def open(self, url: str) -> None:
        self._ask("Page.navigate", url=url)
        self.wait("document.readyState === 'complete'")

    def run(self, code: str) -> Any:
        """Return the value of a JavaScript expression, or the value that a promise resolves to."""
        answer = self._ask("Runtime.evaluate", expression=code, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait(self, code: str) -> Any:
        """Run an expression until it is true, and return its value."""
        until = time.monotonic() + PATIENCE
        while not (value := self.run(code)):
            assert time.monotonic() < until, f"not true within {PATIENCE:g} s: {code}; the page says {self.said}"
            time.sleep(0.02)
        return value

    def type(self, text: str) -> None:
        """Put text where the focus is, as a keyboard does."""
        self._ask("Input.insertText", text=text)

    def press(self, key: str) -> None:
        """Press and release a key, by its name in `KeyboardEvent.key`."""
        code = {"Enter": 13, "Escape": 27, "Tab": 9, "Space": 32}[key]
        about = {"key": " " if key == "Space" else key, "code": key, "windowsVirtualKeyCode": code}
        text = {"Enter": "\r", "Space": " "}.get(key)
        self._ask("Input.dispatchKeyEvent", type="keyDown", **about, **({"text": text} if text else {}))
        self._ask("Input.dispatchKeyEvent", type="keyUp", **about)

    def emulate(self, width: int, height: int, dark: bool = False) -> None:
        """Show the page as a screen of this size does, in points."""
        self._ask(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._ask("Emulation.setEmulatedMedia", features=[scheme])

    def picture(self) -> bytes:
        """Return a screenshot, as PNG."""
        return base64.b64decode(self._ask("Page.captureScreenshot", format="png")["data"])

    def tree(self) -> list[tuple[str, str]]:
        """Return role and name of what a screen reader finds on the page."""
        nodes = self._ask("Accessibility.getFullAXTree")["nodes"]
        return [
            (node["role"]["value"], node.get("name", {}).get("value", "")) for node in nodes if not node.get("ignored")
        ]

    def close(self) -> None:
        os.close(self._out)  # it ends with its pipe
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._in)

    def _ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        answer = self._read(lambda reply: reply.get("id") == message["id"])
        assert "error" not in answer, (method, answer["error"])
        return answer["result"]

    def _read(self, is_it: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        until = time.monotonic() + PATIENCE
        while True:
            payload, separator, remainder = self._rest.partition(b"\0")
            if separator:
                self._rest = remainder
                message = json.loads(payload)
                if is_it(message):
                    return message
                self._note(message)
                continue
            ready, _, _ = select.select([self._in], [], [], max(until - time.monotonic(), 0))
            assert ready, f"the browser said nothing for {PATIENCE:g} s"
            read = os.read(self._in, 1 << 16)
            assert read, "the browser ended"
            self._rest += read

    def _note(self, message: dict[str, Any]) -> None:
        parameters = message.get("params", {})
        if message.get("method") == "Log.entryAdded":
            self.said.append(parameters["entry"]["text"])
        elif message.get("method") == "Runtime.exceptionThrown":
            self.said.append(str(parameters["exceptionDetails"].get("exception", {}).get("description")))
        elif message.get("method") == "Runtime.consoleAPICalled":
            self.said.append(str([parameter.get("value") for parameter in parameters["args"]]))
