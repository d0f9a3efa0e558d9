"""The site, which `make docs` builds into docs/_build/html.

Sphinx reads the repository from its root: a relative link means on the site what it means in a checkout or on GitHub.
What is not a page of its own, such as a Python file that a page links to, gets one from `sitebuild`.
"""

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "docs")]
os.environ.setdefault("JAX_PLATFORMS", "cpu")  # only docstrings are read: no accelerator is looked for

import m3jax  # noqa: E402

project = "m3jax"
author = "the authors of m3jax"
project_copyright = "the authors of m3jax. Apache-2.0"
version = release = m3jax.__version__

root_doc = "README"
include_patterns = [
    *("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "vectors/README.md", "vectors/tiny/README.md"),
    "notebooks/*.ipynb",
    *("docs/*.md", "docs/notes/*.md", "docs/traps/*.md", "docs/api/*.rst"),
]
exclude_patterns = [
    *(".*", "build", "dist", "docs/_build", "docs/_static", "docs/sitebuild"),
    *("m3jax", "pallas_kernels", "requirements", "scripts", "tests", "vectors/model/**"),
]
extensions = [
    *("myst_nb", "sphinx.ext.autodoc", "sphinx.ext.linkcode", "sphinx.ext.mathjax", "sphinx.ext.napoleon"),
    *("sitebuild.contents", "sitebuild.traps", "sitebuild.reference", "sitebuild.sources", "sitebuild.excerpts"),
    "sitebuild.check",
]

# Markdown as GitHub shows it: headings are anchors, $...$ is mathematics.
myst_enable_extensions = ["attrs_inline", "dollarmath"]
myst_heading_anchors = 4
myst_url_schemes = {"http": None, "https": None, "mailto": None, "source": None}
nb_execution_mode = "off"  # notebooks are stored with their outputs, and tests/package/test_notebooks.py runs them
nb_ipywidgets_js = {}

default_role = "literal"  # docstrings write code in single backticks
napoleon_use_ivar = True  # the fields of a class in a list; their types stand in the signature
napoleon_attr_annotations = False
maximum_signature_line_length = 90
toc_object_entries_show_parents = "hide"

# Nothing is loaded from elsewhere: MathJax lies in docs/_static/mathjax, in the parts that its start asks for.
mathjax_path = "mathjax/startup.js"
mathjax3_config = {
    "loader": {"load": ["core", "input/tex", "output/chtml"]},
    "tex": {"packages": {"[-]": ["autoload", "require"]}},
}

html_theme = "sphinx_book_theme"
html_title = "m3jax"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sourcelink = False
html_favicon = "_static/favicon.svg"
html_context = {"default_mode": "auto"}
html_sidebars = {"source/**": []}
html_theme_options = {
    "navbar_persistent": [],
    "home_page_in_toc": True,
    "collapse_navbar": True,
    "use_download_button": False,
    "use_fullscreen_button": False,
}
