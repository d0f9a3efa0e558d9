"""Measure one subject: `python scripts/bench.py SUBJECT [options]`."""

import sys

from benchmarks.harness import main

if __name__ == "__main__":
    sys.exit(main())
