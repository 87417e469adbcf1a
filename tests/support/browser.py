"""A page in a real browser."""

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


def opened(page: Path, width: int = 1200) -> Any:
    """Open a page of a report whose script leaves JSON in its title; return that. No error may be logged."""
    assert CHROMIUM
    with TemporaryDirectory() as profile:
        command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--dump-dom"]
        command += [f"--user-data-dir={profile}", "--disable-background-networking", "--no-first-run"]
        command += [f"--window-size={width},900", page.as_uri()]
        shown = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert 'data-ready="yes"' in shown.stdout
    assert not re.search("CONSOLE.*(rror|Refused)", shown.stderr)
    title = re.search("<title>(.*?)</title>", shown.stdout, re.DOTALL)
    assert title
    return json.loads(html.unescape(title[1]))
