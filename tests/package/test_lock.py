"""requirements/test.txt, from which `make test` installs on Python 3.11."""

import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]


def test_the_lock_has_all_that_the_tests_need():
    """Each line has hashes, and `make lock` was run after pyproject.toml changed. PyTorch is left out: see Makefile."""
    text = (ROOT / "requirements" / "test.txt").read_text(encoding="utf-8").replace("\\\n", " ")
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    without = [line for line in lines if "==" not in line or "--hash=sha256:" not in line]
    assert lines and not without
    locked = {canonicalize_name(line.split("==")[0]): line.split("==")[1].split()[0] for line in lines}
    data = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    extras, groups = data["project"]["optional-dependencies"], data["dependency-groups"]
    wanted = [*data["project"]["dependencies"], *extras["test"], *extras["oracle"], *groups["build"]]
    missing = [
        f"{asked} is not what requirements/test.txt has ({locked.get(name)}): run make lock UPGRADE="
        for asked in map(Requirement, wanted)
        if (name := canonicalize_name(asked.name)) != "torch"
        and (name not in locked or locked[name] not in asked.specifier)
    ]
    assert not missing, "\n".join(missing)
