"""A page for each file of the repository that is linked to and is no page: highlighted, with a place for each line.

A link in a document is relative, as on GitHub; generated pages write `source:m3jax/config.py#L12`, as the API
reference does through `sphinx.ext.linkcode`.
"""

import importlib
import inspect
import re
from collections.abc import Iterator
from functools import cached_property
from html import escape
from pathlib import Path

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.util import logging
from sphinx.util.osutil import relative_uri

SCHEME = "source:"
LANGUAGES = {".py": "python", ".toml": "toml", ".json": "json", ".sh": "bash", ".yml": "yaml", "Makefile": "make"}
log = logging.getLogger(__name__)


def page_of(path: str) -> str:
    """The name of the page that shows a file."""
    return f"source/{path}"


def take_links_to_files(app: Sphinx, doctree: nodes.document) -> None:
    """Links to files of the repository, which Sphinx would offer as downloads, become links to the files' pages."""
    for link in list(doctree.findall(addnodes.download_reference)):
        path, _ = app.env.relfn2path(link["reftarget"], app.env.docname)
        target = nodes.reference("", "", *link.children, refuri=f"{SCHEME}{path}")
        link.replace_self(target)


def lead_to_pages(app: Sphinx, doctree: nodes.document, docname: str) -> None:
    """Each `source:` link gets the address of the file's page, relative to the page that it stands on."""
    here = app.builder.get_target_uri(docname)
    for link in source_links(doctree):
        path, _, line = link["refuri"].removeprefix(SCHEME).partition("#")
        if not (Path(app.srcdir) / path).is_file():
            log.warning("%s is no file of the repository", path, location=link)
        address = relative_uri(here, app.builder.get_target_uri(page_of(path)))
        link["refuri"] = address + (f"#{line}" if line else "")
        link["internal"] = True


def source_links(doctree: nodes.document) -> list[nodes.reference]:
    """The references of a document that lead to a file of the repository."""
    return [link for link in doctree.findall(nodes.reference) if link.get("refuri", "").startswith(SCHEME)]


def pages(app: Sphinx) -> Iterator[tuple[str, dict, str]]:
    """The page of each file that some document links to."""
    linked = {
        link["refuri"].removeprefix(SCHEME).partition("#")[0]
        for docname in app.env.found_docs
        for link in source_links(app.env.get_doctree(docname))
    }
    files = {path: Path(app.srcdir) / path for path in sorted(linked)}
    for path, file in files.items():
        if not file.is_file():  # which `lead_to_pages` warns of
            continue
        language = LANGUAGES.get(file.suffix or file.name, "text")
        code = app.builder.highlighter.highlight_block(
            file.read_text(encoding="utf-8"), language, linenos="inline", lineanchors="L"
        )
        code = re.sub(
            r'<a id="L-(\d+)" name="L-\d+"></a><span class="linenos"', r'<span class="linenos" id="L\1"', code
        )
        front = relative_uri(app.builder.get_target_uri(page_of(path)), app.builder.get_target_uri(app.config.root_doc))
        title = f'<p><a href="{front}">{escape(app.config.project)}</a></p>\n<h1>{escape(path)}</h1>'
        body = f'<div class="source-file">{title}\n{code}</div>'
        yield page_of(path), {"title": path, "body": body}, "page.html"


def source_of(domain: str, info: dict[str, str]) -> str | None:
    """Return the page that shows an object's definition, for `sphinx.ext.linkcode`."""
    found = importlib.import_module(info["module"])
    for name in info["fullname"].split("."):
        found = inspect.getattr_static(found, name, None) if inspect.isclass(found) else getattr(found, name, None)
    if isinstance(found, property | cached_property):
        found = found.fget if isinstance(found, property) else found.func
    found = inspect.unwrap(getattr(found, "__func__", found))
    if not (inspect.isclass(found) or inspect.isroutine(found)):
        return None
    root = Path(__file__).resolve().parents[2]
    file = Path(inspect.getsourcefile(found) or "")
    if not file.is_relative_to(root):
        return None
    return f"{SCHEME}{file.relative_to(root).as_posix()}#L{inspect.getsourcelines(found)[1]}"


def setup(app: Sphinx) -> dict:
    """Register the pages of source files with Sphinx."""
    app.connect("doctree-read", take_links_to_files, priority=400)  # before Sphinx notes downloads
    app.connect("doctree-resolved", lead_to_pages)
    app.connect("html-collect-pages", pages)
    app.config.linkcode_resolve = source_of
    return {"parallel_read_safe": True, "parallel_write_safe": True}
