"""Looks through the built site: each link leads somewhere, and no page loads anything from elsewhere.

Sphinx warns of links in documents that it cannot resolve. This reads what it wrote, from templates and code too.
"""

import re
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

LOADING = {
    "script": "src",
    "img": "src",
    "iframe": "src",
    "source": "src",
    "video": "src",
    "audio": "src",
    "link": "href",
}
NOT_LOADED = {"canonical", "index", "search", "next", "prev", "author"}  # of <link rel=...>: where, not what
LOADED_BY_STYLE = re.compile(r"""(?:url\(|@import )["']?([^"')]+)""")
# An address of the web that stands in a script as a text and is asked for. What scripts put together is not seen here.
FETCHED_BY_SCRIPT = re.compile(r"""(?:fetch|import|importScripts)\(\s*["'`]((?:https?:)?//[^"'`]+)""")


class Page(HTMLParser):
    """A page's link targets, its links, and the files that it loads.

    Attributes:
      places: the ids and names in it, which a link can lead to.
      links: addresses of its links.
      loaded: addresses of what a browser fetches to show it.
    """

    def __init__(self, text: str):
        super().__init__()
        self.places: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note an element's ids, link and source."""
        values = {name: value or "" for name, value in attrs}
        self.places |= {values[name] for name in ("id", "name") if name in values}
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        if values.get(LOADING.get(tag, ""), "") and values.get("rel", "") not in NOT_LOADED:
            self.loaded.append(values[LOADING[tag]])


def problems(site: Path) -> list[str]:
    """A line for each link that leads nowhere, and for all that a page, a style or a script loads from elsewhere."""

    @cache
    def page(file: Path) -> Page:
        return Page(file.read_text(encoding="utf-8"))

    found = []
    for file in sorted(site.rglob("*.html")):
        if file.is_relative_to(site / "_static"):  # templates of the theme
            continue
        here = file.relative_to(site)
        for address in dict.fromkeys(page(file).loaded):
            found += [f"{here} loads {problem}" for problem in loading(file, address)]
        for address in dict.fromkeys(page(file).links):
            target, place = resolved(file, address), unquote(urlsplit(address).fragment)
            if target and not target.is_file():
                found.append(f"{here} links to {address}, which is not there")
            elif target and place and target.suffix == ".html" and place not in page(target).places:
                found.append(f"{here} links to {address}, a place that {target.relative_to(site)} does not have")
    for file in sorted({*site.rglob("*.css"), *site.rglob("*.js")}):
        text = file.read_text(encoding="utf-8")
        addresses = (LOADED_BY_STYLE if file.suffix == ".css" else FETCHED_BY_SCRIPT).findall(text)
        found += [f"{file.relative_to(site)} loads {each}" for address in addresses for each in loading(file, address)]
    return found


def loading(file: Path, address: str) -> list[str]:
    """Return a line on an address that a file of the site may not load from, or no line."""
    if urlsplit(address).netloc:
        return [f"{address} from elsewhere"]
    target = resolved(file, address)
    return [f"{address}, which is not there"] if target and not target.is_file() else []


def resolved(file: Path, address: str) -> Path | None:
    """The file of the site that an address on a page of it means; None of one that leads out of the site."""
    parts = urlsplit(address)
    if parts.scheme or parts.netloc:
        return None
    target = (file.parent / unquote(parts.path)).resolve() if parts.path else file
    return target / "index.html" if target.is_dir() else target


def setup(app) -> dict:
    """Register the check with Sphinx."""
    from sphinx.util import logging

    def check(app, error: Exception | None) -> None:
        if error is None and app.builder.name == "html":
            for problem in problems(Path(app.outdir).resolve()):
                logging.getLogger(__name__).warning(problem)

    app.connect("build-finished", check, priority=900)  # after the front page has its second name
    return {"parallel_read_safe": True, "parallel_write_safe": True}
