"""Check the built site: every link leads to a page and an anchor that exist, and nothing is loaded from a server.

python check_site.py SITE     the folder that mkdocs has built
"""

import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

LOADED = {"img": "src", "script": "src", "link": "href", "iframe": "src"}  # the browser loads these with the page


class Page(HTMLParser):
    """The links and anchors of a page."""

    def __init__(self, path):
        super().__init__()
        self.links, self.anchors, self.loaded = [], set(), []
        self.feed(path.read_text())

    def handle_starttag(self, tag, attrs):
        """Note what this element links to or loads, and under which name it can be linked to."""
        values = dict(attrs)
        self.anchors.update(filter(None, (values.get("id"), values.get("name"))))
        if tag == "a" and values.get("href"):
            self.links.append(values["href"])
        if tag in LOADED and values.get(LOADED[tag]) and values.get("rel") != "canonical":
            self.loaded.append(values[LOADED[tag]])


def find_faults(site):
    """Yield a line for each link that leads nowhere, and for each file that a page loads from a server."""
    pages = {path.resolve(): Page(path) for path in sorted(site.rglob("*.html")) if path.name != "404.html"}
    for path, page in pages.items():
        for link in [*page.links, *page.loaded]:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                if link in page.loaded:
                    yield f"{path.relative_to(site)} loads {link}"
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            if not target.exists():
                yield f"{path.relative_to(site)} links to {link}, which does not exist"
            elif parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].anchors:
                yield f"{path.relative_to(site)} links to {link}, which has no such anchor"


if __name__ == "__main__":
    faults = list(find_faults(Path(sys.argv[1]).resolve()))
    for fault in faults:
        print(fault)
    sys.exit(f"{len(faults)} faults in {sys.argv[1]}" if faults else None)
