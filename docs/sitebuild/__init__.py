"""What the site needs beside Sphinx: its table of contents, the pages of traps, of the API and of source files."""
