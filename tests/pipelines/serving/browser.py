"""Chromium without a window, spoken to over its debugging protocol."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from websockets.sync.client import connect

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
# It must not look for updates, nor for anything else outside this machine.
OPTIONS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking", "--hide-scrollbars",
    "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage", "--remote-debugging-port=0", "--force-color-profile=srgb",
]  # fmt: skip


class Browser:
    """One page. `said`: what it logged as errors; `asked`: every address it asked for."""

    def __init__(self, width: int = 1360, height: int = 860, dark: bool = False):
        self._size, self._dark = (width, height), dark
        self.said: list[str] = []
        self.asked: list[str] = []

    def __enter__(self) -> Browser:
        assert CHROMIUM is not None
        self._folder = tempfile.TemporaryDirectory()
        words = [CHROMIUM, *OPTIONS, f"--user-data-dir={self._folder.name}", f"--window-size={self._size[0]},{self._size[1]}", "about:blank"]
        self._process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        port_file, deadline = Path(self._folder.name) / "DevToolsActivePort", time.monotonic() + 60
        while not port_file.exists() or len(port_file.read_text().splitlines()) < 2:
            assert time.monotonic() < deadline, "the browser did not start"
            time.sleep(0.05)
        port, path = port_file.read_text().splitlines()[:2]
        self._connection = connect(f"ws://127.0.0.1:{port}{path}", max_size=None, proxy=None)
        self._line = self._connection.__enter__()
        self._number, self._session = 0, None
        target = next(t for t in self.do("Target.getTargets")["targetInfos"] if t["type"] == "page")["targetId"]
        self._session = self.do("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log", "Accessibility"):
            self.do(f"{domain}.enable")
        self.do("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark" if self._dark else "light"}])
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.__exit__(None, None, None)
        self._process.terminate()
        self._process.wait(30)
        time.sleep(0.2)
        shutil.rmtree(self._folder.name, ignore_errors=True)

    def do(self, method: str, **params: Any) -> Any:
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        self._line.send(json.dumps(message))
        while True:
            answer = json.loads(self._line.recv(60))
            if answer.get("id") == self._number:
                assert "error" not in answer, (method, answer["error"])
                return answer["result"]
            self._note(answer.get("method"), answer.get("params", {}))

    def _note(self, method: str | None, params: Any) -> None:
        if method == "Runtime.exceptionThrown":
            self.said.append(json.dumps(params["exceptionDetails"])[:500])
        elif method == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.said.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")
        elif method == "Network.requestWillBeSent":
            self.asked.append(params["request"]["url"])

    def open(self, address: str) -> None:
        self.do("Page.navigate", url=address)

    def value(self, expression: str) -> Any:
        answer = self.do("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait(self, expression: str, seconds: float = 60.0) -> Any:
        deadline = time.monotonic() + seconds
        while not (found := self.value(f"(() => {{ try {{ return {expression} }} catch {{ return false }} }})()")):  # not loaded yet
            assert time.monotonic() < deadline, (expression, self.said, self.value("document.body.innerText")[:500])
            time.sleep(0.05)
        return found

    def press(self, key: str, code: int) -> None:
        for kind in ("rawKeyDown", "keyUp"):
            self.do("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code)

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.do("Page.captureScreenshot", format="png")["data"]))
