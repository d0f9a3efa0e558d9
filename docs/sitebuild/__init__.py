"""The site's Sphinx extensions: its table of contents, and pages of traps, of the API and of source files."""
