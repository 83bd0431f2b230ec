"""Make docs/notebook_result_light.png and docs/notebook_result_dark.png: what a notebook shows of a run that has failed.

    python docs/notebook_result.py [FOLDER]

A run of four ranks fails twice, and is restarted once. `to_html` writes its result to a file. Chromium opens the file in the
light and in the dark theme, and saves what it shows. This takes a few seconds.
"""

import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import mpwatch

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
THEMES = {"light": 1, "dark": 0}  # as Chromium numbers them
SIZE = "880,440"  # pixels, before they are doubled


def train(steps: int) -> None:
    """Fail in rank 2 of the first start, and in rank 1 of the second one."""
    me = mpwatch.current_worker()
    for step in range(steps):
        time.sleep(0.1)
        if (me.rank, me.restart_count, step) == (2, 0, 12):
            raise ConnectionError("the data server is down")
        if (me.rank, me.restart_count, step) == (1, 1, 17):
            raise ValueError(f"shard {me.rank} has 17 columns, not 16")
        mpwatch.report(step=step + 1, total=steps)


def make_result() -> mpwatch.RunResult[None]:
    """Run the function, and return the failed result."""
    policy = mpwatch.RestartPolicy(1, delay=0.5)
    return mpwatch.run(train, nprocs=4, args=(30,), max_restarts=policy, progress=False, check=False)


def save_picture(page: Path, theme: str, picture: Path) -> None:
    """Save what the browser shows of a page in a theme."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        raise SystemExit(f"none of {', '.join(BROWSERS)} is installed")
    command = [
        browser,
        "--headless",
        "--no-sandbox",
        "--hide-scrollbars",
        "--force-device-scale-factor=2",
        f"--window-size={SIZE}",
        f"--blink-settings=preferredColorScheme={THEMES[theme]}",
        f"--screenshot={picture}",
        page.as_uri(),
    ]
    subprocess.run(command, check=True, stderr=subprocess.DEVNULL, timeout=60)


def main(folder: str = str(ROOT / "docs")) -> None:
    """Save both pictures."""
    with tempfile.TemporaryDirectory() as temporary:
        page = Path(temporary, "result.html")
        make_result().to_html(page)
        for theme in THEMES:
            save_picture(page, theme, Path(folder, f"notebook_result_{theme}.png"))


if __name__ == "__main__":
    main(*sys.argv[1:])
