"""The table of contents, the front page, and the anchors that Markdown has as HTML."""

import re
import shutil
from pathlib import Path

from sphinx.application import Sphinx

FRONT = "README"
# A page of docs/ that is named nowhere here stands at the end of FOR_NEW_PAGES.
SECTIONS = {
    "What it computes": ["docs/msa", "docs/numerics", "docs/glossary"],
    "Check an engine": [
        "docs/vectors",
        "Their files <vectors/README>",
        "A whole model <vectors/tiny/README>",
        "docs/traps",
    ],
    "Use": [
        "docs/commands",
        "docs/sampling",
        "docs/tiny",
        "docs/speculative",
        "docs/planning",
        "docs/scale",
        "docs/inside",
    ],
    "Inside": ["docs/cache", "docs/engine", "docs/kernels", "docs/tpu", "docs/reliability", "docs/performance"],
    "Design notes": ["docs/notes/*"],
    "Notebooks": ["notebooks/*"],
    "Reference": ["docs/api"],
    "The project": ["CONTRIBUTING", "CHANGELOG"],
}
FOR_NEW_PAGES = "Use"


def table_of_contents(root: Path) -> dict[str, list[str]]:
    """Each section with its pages: names without suffix, relative to the root, patterns as they are."""
    named = {page for pages in SECTIONS.values() for page in pages}
    found = sorted(path.relative_to(root).with_suffix("").as_posix() for path in (root / "docs").glob("*.md"))
    new = [page for page in found if page not in named]
    return {title: [*pages, *(new if title == FOR_NEW_PAGES else ())] for title, pages in SECTIONS.items()}


def entry(page: str) -> str:
    """A page as a toctree names it, from the root: "/docs/msa", or "Title </vectors/README>"."""
    return page.replace("<", "</") if "<" in page else f"/{page}"


def before_parsing(app: Sphinx, docname: str, source: list[str]) -> None:
    """The front page gets the table of contents, and `<a id="x"></a>` becomes a place that Sphinx knows."""
    if Path(app.env.doc2path(docname)).suffix == ".md":
        source[0] = re.sub(r'<a id="([\w-]+)"></a>', r"[]{#\1}", source[0])
    if docname == FRONT:
        source[0] += "".join(
            f"\n```{{toctree}}\n:hidden:\n:glob:\n:caption: {title}\n\n"
            + "\n".join(entry(page) for page in pages)
            + "\n```\n"
            for title, pages in table_of_contents(Path(app.srcdir)).items()
        )


def write_index(app: Sphinx, error: Exception | None) -> None:
    """The front page under the name that a browser looks for."""
    if error is None and app.builder.name == "html":
        shutil.copyfile(Path(app.outdir) / f"{FRONT}.html", Path(app.outdir) / "index.html")


def setup(app: Sphinx) -> dict:
    """Register the table of contents with Sphinx."""
    app.connect("source-read", before_parsing)
    app.connect("build-finished", write_index)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
