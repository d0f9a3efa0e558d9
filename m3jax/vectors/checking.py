"""`python -m m3jax.vectors check`: this package against a folder of golden vectors."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from m3jax.compile_cache import compile_cache
from m3jax.files.tensors import Arrays
from m3jax.messages import shown
from m3jax.progress import activity
from m3jax.vectors.case import placed
from m3jax.vectors.compare import difference
from m3jax.vectors.files import read_case, read_manifest
from m3jax.vectors.groups import GROUPS


class CaseReport(NamedTuple):
    """The result of checking one case.

    Attributes:
      case: "group/name".
      compared: the number of outputs that were compared with a stored one.
      differences: a line for each that differs.
    """

    case: str
    compared: int
    differences: list[str]


def check(folder: Path) -> list[CaseReport]:
    """Compute every case anew, by the definitions in float64 and by each implementation that users can choose.

    What is compiled is kept in the user's cache folder (`m3jax.compile_cache`), and stderr says which case is waited
    for.

    Raises:
      ValueError: a folder that is no folder of vectors, or a case that this version does not know.
    """
    manifest = read_manifest(folder)
    reports, cases = [], manifest["cases"]
    with compile_cache(), activity() as line:
        for number, case in enumerate(cases, 1):
            with line.timed(f"checking {case['group']}/{case['name']}, case {number} of {len(cases)}"):
                reports.append(check_case(folder, case, manifest["tolerances"]))
    return reports


def check_case(folder: Path, case: Mapping[str, Any], tolerances: Mapping[str, Any]) -> CaseReport:
    """Check one case: its file by checksum, the definition in float64, and the package's implementations."""
    name = f"{case['group']}/{case['name']}"
    if case["group"] not in GROUPS:
        raise ValueError(f"{name}: no group of this version, which has {', '.join(GROUPS)}")
    group = GROUPS[case["group"]]
    arrays, changed = read_case(folder, case)
    is_input = lambda tensor: case["tensors"][tensor].get("role") == "input"
    inputs = {tensor: arrays[tensor] for tensor in case["tensors"] if is_input(tensor)}
    outputs = {tensor: arrays[tensor] for tensor in case["tensors"] if not is_input(tensor)}
    rule = placed(case["rule"], folder)
    problems = [f"{name}: {changed}"] if changed else []
    compared = 0

    def compare(label: str, dtype: str, given: Arrays) -> None:
        nonlocal compared
        for tensor, array in given.items():
            if tensor not in outputs:
                continue
            tolerance = case["tensors"][tensor].get("tolerance")
            if tolerance not in tolerances:
                raise ValueError(
                    f"{name}: {tensor} has tolerance {shown(tolerance)}, which the manifest does not explain"
                )
            compared += 1
            slack = arrays.get(f"{tensor.removesuffix('_bf16')}_slack", 0.0)
            axes = case["tensors"][tensor].get("axes")
            problem = difference(outputs[tensor], np.asarray(array), tolerances[tolerance], dtype, slack, axes)
            problems.extend([f"{name}: {tensor} by {label}: {problem}"] if problem else [])

    try:
        compare("the definition in float64", "float64", group.truth(inputs, rule))
        compare("the definition in bfloat16", "bfloat16", group.as_bfloat16(inputs, rule))
        for run in group.runs(inputs, rule):
            compare(f"{run.label} in {run.dtype}", run.dtype, run.outputs)
    except KeyError as error:
        message = f"{name}: no {error} in its rule or among its inputs, and the group needs it; make the vectors again"
        raise ValueError(message) from error
    if not compared:
        raise ValueError(f"{name}: no output of it is one that this version computes")
    return CaseReport(name, compared, problems)
