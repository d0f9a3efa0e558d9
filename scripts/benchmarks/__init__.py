"""Subjects of `scripts/bench.py`, a module each, and the harness that runs them.

A subject has `OPTIONS`, the settings of its own, and `measure(args)`, which yields rows of a table (dictionaries) and
remarks (text) as they become known. Names of columns carry the unit. It may also have:

- `REPEATS`: The default of `--repeats`.
- `PACKAGES`: Packages whose versions the environment line names.
- `USES_DEVICE`: False if child processes own the devices, so that this process must not touch them.
- `part(args)`: Work of a child process, which `harness.run_part` starts.
"""
