"""Make docs/timeline.svg: run the first program of docs/how-to/timeline.md and draw the timeline of its result.

python docs/timeline.py [PATH]
"""

import os
import re
import runpy
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from mpwatch.events.timeline_svg import draw_timelines

PAGE = ROOT / "docs" / "how-to" / "timeline.md"


def main(path: str = str(ROOT / "docs" / "timeline.svg")) -> None:
    """Save the picture, with a margin, and on white: an SVG file does not know the theme of its page."""
    picture = Path(path).resolve()
    program = re.search(r'^```python title="timeline.py"\n(.*?)^```$', PAGE.read_text(), re.MULTILINE | re.DOTALL)
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)  # the program writes its trace there
        Path("timeline.py").write_text(program[1])
        result = runpy.run_path("timeline.py", run_name="__main__")["result"]
        os.chdir(ROOT)
    svg = draw_timelines(result.events).replace('viewBox="0 ', 'viewBox="-8 ').replace('style="', 'style="background:white;')
    picture.write_text(svg + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
