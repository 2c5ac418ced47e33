"""Chromium without a window, spoken to through a pipe (the DevTools protocol): loads a page, taps, asks, takes pictures."""
import base64
import fcntl
import io
import itertools
import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

PROGRAM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


def moved(descriptor):
    """The same pipe under a number from 10 on: out of the way of 3 and 4."""
    high = fcntl.fcntl(descriptor, fcntl.F_DUPFD, 10)
    os.close(descriptor)
    return high


class Browser:
    def __init__(self):
        self.profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        ours_in, theirs_out = os.pipe()
        theirs_in, ours_out = os.pipe()
        theirs_in, theirs_out = moved(theirs_in), moved(theirs_out)

        def place():  # Chromium reads descriptor 3 and writes descriptor 4
            os.dup2(theirs_in, 3)
            os.dup2(theirs_out, 4)

        options = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars", "--remote-debugging-pipe", f"--user-data-dir={self.profile.name}"]
        self.process = subprocess.Popen([PROGRAM, *options, "about:blank"], preexec_fn=place, pass_fds=(3, 4), stderr=subprocess.DEVNULL)
        os.close(theirs_in)
        os.close(theirs_out)
        self.replies, self.requests = open(ours_in, "rb"), open(ours_out, "wb")
        self.numbers, self.session = itertools.count(1), None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self.call("Page.enable")

    def close(self):
        self.session = None
        self.call("Browser.close")
        self.process.wait(30)
        self.replies.close()
        self.requests.close()
        self.profile.cleanup()

    def message(self):
        data = bytearray()
        while (c := self.replies.read(1)) != b"\0":
            assert c, "the browser has ended"
            data += c
        return json.loads(data)

    def call(self, method, **params):
        number = next(self.numbers)
        self.requests.write(json.dumps({"id": number, "method": method, "params": params, **({"sessionId": self.session} if self.session else {})}).encode() + b"\0")
        self.requests.flush()
        while (answer := self.message()).get("id") != number:
            pass
        assert "error" not in answer, f"{method}: {answer['error']}"
        return answer["result"]

    def open(self, path, width, height=900, dark=False, touch=False, before=""):
        """Shows a file; `before` is a script that runs before those of the page."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=touch)
        self.call("Emulation.setTouchEmulationEnabled", enabled=touch, maxTouchPoints=2)
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}])
        script = self.call("Page.addScriptToEvaluateOnNewDocument", source=before)["identifier"]
        self.call("Page.navigate", url=Path(path).resolve().as_uri())
        while self.message().get("method") != "Page.loadEventFired":
            pass
        self.call("Page.removeScriptToEvaluateOnNewDocument", identifier=script)
        self.ask("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => done(1))))")  # drawn

    def ask(self, expression):
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def mouse(self, kind, x, y, **more):
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)

    def touch(self, kind, *points):
        self.call("Input.dispatchTouchEvent", type=kind, touchPoints=[{"x": x, "y": y, "id": i} for i, (x, y) in enumerate(points)])

    def picture(self, path=None):
        from PIL import Image

        data = base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"])
        if path:
            Path(path).write_bytes(data)
        return Image.open(io.BytesIO(data)).convert("RGB")
