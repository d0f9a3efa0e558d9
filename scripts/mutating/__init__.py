"""Bugs that are drawn from the package's sources in place of chosen ones: for scripts/mutants.py."""
