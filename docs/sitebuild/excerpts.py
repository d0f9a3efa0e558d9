"""Excerpts beside the results of a search, of the pages' own text, and where the site is read as files too."""

import json
from pathlib import Path

from sphinx.application import Sphinx

FILE = "excerpts.js"
# Sphinx's search fetches each page that it found, and shows what stands around the words. From a site that is read as
# files a browser fetches nothing; and in a page of the theme the menus come before the text.
SCRIPT = """\
const texts = %s;
window.fetch = async (address) => {
  const page = Object.keys(texts).find((name) => String(address).split("#")[0].endsWith(`/${name}.html`));
  const main = document.createElement("div");
  main.setAttribute("role", "main");
  main.textContent = page === undefined ? "" : texts[page];
  return { text: async () => main.outerHTML };
};
"""


def add_script(app: Sphinx, pagename: str, templatename: str, context: dict, doctree: object) -> None:
    """Have the search page, and no other, load the texts."""
    if pagename == "search":
        app.add_js_file(FILE)


def write_texts(app: Sphinx, error: Exception | None) -> None:
    """Write the texts of all pages but those that show source files, which the search does not find."""
    if error is None and app.builder.name == "html":
        names = sorted(name for name in app.env.found_docs if not name.startswith("source/"))
        texts = {name: " ".join(app.env.get_doctree(name).astext().split()) for name in names}
        # Longest names first: "docs/notes/kernels" ends in "/kernels" too.
        texts = dict(sorted(texts.items(), key=lambda entry: -len(entry[0])))
        (Path(app.outdir) / "_static" / FILE).write_text(SCRIPT % json.dumps(texts), encoding="utf-8")


def setup(app: Sphinx) -> dict:
    """Called by Sphinx."""
    app.connect("html-page-context", add_script)
    app.connect("build-finished", write_texts)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
