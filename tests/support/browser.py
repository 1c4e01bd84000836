"""Chromium without a window, told what to do over pipes, by its DevTools protocol."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

PROGRAM = shutil.which("chromium") or shutil.which("google-chrome")


class Browser:
    """A page in a browser.

    Args:
        url: page that is opened.

    Attributes:
        errors: exceptions of the page's script, and errors that its console shows.
    """

    def __init__(self, url: str) -> None:
        assert PROGRAM is not None, "no browser is installed"
        self._folder = tempfile.TemporaryDirectory(prefix="browser-", ignore_cleanup_errors=True)
        theirs_in, self._out = os.pipe()
        self._in, theirs_out = os.pipe()
        flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe"]
        flags += [f"--user-data-dir={self._folder.name}", "--window-size=1200,800"]
        # It reads from 3 and writes to 4.
        self._process = subprocess.Popen(
            ["bash", "-c", f'exec "$0" "$@" 3<&{theirs_in} 4>&{theirs_out}', PROGRAM, *flags],
            pass_fds=(theirs_in, theirs_out),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._number, self._left, self._session = 0, b"", ""
        self.errors: list[str] = []
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        attached = self._call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self._call(f"{domain}.enable")
        self._call("Page.navigate", url=url)
        self.until("document.readyState == 'complete'")

    def close(self) -> None:
        """Ends the browser."""
        self._process.kill()
        self._process.wait()
        os.close(self._in)
        os.close(self._out)
        self._folder.cleanup()

    def evaluate(self, script: str) -> Any:
        """The value of an expression in the page."""
        found = self._call(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def until(self, script: str, seconds: float = 60) -> None:
        """Waits until an expression is true."""
        end = time.monotonic() + seconds
        while not self.evaluate(f"Boolean({script})"):
            assert time.monotonic() < end, f"never: {script}"
            time.sleep(0.05)

    def type(self, element: str, text: str, enter: bool = False) -> None:
        """Types a text into an element, in the place of what it has, and then Enter or Tab."""
        self.evaluate(
            f"{{ const at = document.querySelector('{element}'); at.focus(); at.select() }}"
        )
        self._call("Input.insertText", text=text)
        key, number = ("Enter", 13) if enter else ("Tab", 9)
        pressed = {"key": key, "code": key, "windowsVirtualKeyCode": number}
        for kind in ("rawKeyDown", "keyUp"):
            self._call("Input.dispatchKeyEvent", type=kind, **pressed)

    def picture(self, path: Path) -> None:
        """Saves what is seen as a PNG."""
        path.write_bytes(base64.b64decode(self._call("Page.captureScreenshot")["data"]))

    def _call(self, method: str, **params: Any) -> Any:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            said = self._receive()
            if said.get("id") == self._number:
                assert "error" not in said, said
                return said["result"]
            self._note(said)

    def _receive(self, seconds: float = 60) -> Any:
        while b"\0" not in self._left:
            ready, _, _ = select.select([self._in], [], [], seconds)
            assert ready, "the browser says nothing"
            read = os.read(self._in, 1 << 20)
            assert read, "the browser has ended"
            self._left += read
        first, _, self._left = self._left.partition(b"\0")
        return json.loads(first)

    def _note(self, said: Any) -> None:
        params = said.get("params", {})
        if said["method"] == "Runtime.exceptionThrown":
            self.errors.append(str(params["exceptionDetails"]))
        elif said["method"] == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.errors.append(params["entry"]["text"])
