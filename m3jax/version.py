"""The version of the package, for who may not import the whole of it; known where nothing is installed, too."""

VERSION = "0.1.0"  # pyproject.toml reads it here
