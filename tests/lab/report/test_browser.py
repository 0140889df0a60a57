"""The page in a real browser: no complaint, nothing fetched, every figure laid out, no sideways scrolling."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from crossfade.lab.report import write_report
from tests.lab.report import runs

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(
    BROWSER is None, reason="no chromium, chromium-browser or google-chrome on this machine"
)

OPTIONS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--enable-logging=stderr",
    "--v=0",
    "--virtual-time-budget=4000",
)

# Runs inside a copy of the page and tells its frame what was laid out and loaded.
PROBE = """<script>
addEventListener("load", () => {
  const figures = [...document.querySelectorAll("figure svg")].map(svg => {
    const box = svg.getBoundingClientRect();
    const ink = svg.querySelectorAll("path, use").length;
    return [svg.id, box.width, box.height, ink, svg.getBBox().width];
  });
  parent.postMessage(JSON.stringify({
    figures, page: document.documentElement.scrollWidth, window: innerWidth,
    background: getComputedStyle(document.body).backgroundColor,
    boxes: [...document.querySelectorAll(".scroll")].map(box => box.getBoundingClientRect().right),
    resources: performance.getEntriesByType("resource").map(entry => entry.name),
  }), "*");
});
</script></body>"""
FRAME = """<!doctype html><title>frame</title><link rel="icon" href="data:,"><pre id="seen"></pre><script>
addEventListener("message", event => { document.getElementById("seen").textContent = event.data; });
</script><iframe src="probed.html" style="width:%dpx;height:800px;border:0"></iframe>"""


def visit(folder: Path, profile: Path, *, width: int, dark: bool) -> dict[str, Any]:
    """Opens the report in a frame of that width; the browser's own minimum would be too wide for a phone."""
    source = (folder / "report.html").read_text(encoding="utf-8")
    (folder / "probed.html").write_text(source.replace("</body>", PROBE), encoding="utf-8")
    frame = folder / "frame.html"
    frame.write_text(FRAME % width, encoding="utf-8")
    assert BROWSER is not None
    command = [BROWSER, *OPTIONS, f"--user-data-dir={profile}", "--window-size=1400,900"]
    command += [f"--blink-settings=preferredColorScheme={0 if dark else 1}", "--dump-dom", frame.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    complaints = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    assert not complaints, complaints
    seen = re.search(r'<pre id="seen">(.+?)</pre>', done.stdout, flags=re.DOTALL)
    assert seen, "the page did not finish loading"
    found = json.loads(unescape(seen[1]))
    assert isinstance(found, dict)
    return found


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (390, True)])
def test_the_page_in_a_browser(tmp_path: Path, width: int, dark: bool) -> None:
    folder = runs.write_run(tmp_path / "run")
    write_report(folder)
    seen = visit(folder, tmp_path / "profile", width=width, dark=dark)
    assert seen["window"] == width
    names = [figure[0] for figure in seen["figures"]]
    assert names == ["figure-curves-steps", "figure-curves-seconds", "figure-interface", "figure-variance"]
    for name, wide, high, marks, drawn in seen["figures"]:
        assert wide > 300, name
        assert high > 150, name
        assert marks > 50, name
        assert drawn > 300, name
    assert seen["resources"] == []
    # What is wide scrolls in its own box.
    assert seen["page"] <= width
    assert len(seen["boxes"]) > 6
    assert max(seen["boxes"]) <= width
    assert seen["background"] == ("rgb(21, 24, 28)" if dark else "rgb(255, 255, 255)")


def test_a_complaint_of_the_page_would_be_seen(tmp_path: Path) -> None:
    (tmp_path / "report.html").write_text("<body><script>console.error('no')</script></body>", encoding="utf-8")
    with pytest.raises(AssertionError, match="CONSOLE"):
        visit(tmp_path, tmp_path / "profile", width=800, dark=False)
