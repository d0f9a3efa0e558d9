"""Several processes as one run: how they find each other, agree, follow process 0, and end together (docs/scale.md).

`arguments` is read before anything large is imported, so nothing is imported here. `run.on_hosts` does a command's
work, `follow.led` has one process lead an engine, and the other files are what these two are made of.
"""
