"""`python -m m3jax.vectors make`: draw the inputs, compute the outputs by the definitions in float64, write both."""

import os
import platform
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxtyping import Shaped

from m3jax.files.tensors import Arrays, dtype_code, packed
from m3jax.messages import printable
from m3jax.progress import activity
from m3jax.vectors.case import Case, Group, placed
from m3jax.vectors.files import MANIFEST, SCHEMA, manifest_text, sha256, write_new
from m3jax.vectors.groups import GROUPS
from m3jax.vectors.tolerances import TOLERANCES

# Short integer inputs that a reader of the manifest wants to see without opening the file.
_SHOWN = ("positions", "lengths", "table", "chunks", "tokens")
_LEAST_MARGIN = 1e-3


def make(folder: Path, only: Sequence[str] = (), large: bool = False) -> dict[str, Any]:
    """Write the golden vectors.

    Args:
      folder: that holds no vectors yet; it may hold other files.
      only: names of groups; all of them by default.
      large: those with M3's real head shapes and up to 8,192 keys in place of the small ones.

    Returns:
      The manifest, which is written last: a folder without one is not whole.

    Raises:
      ValueError: an unknown group, or a folder that holds vectors.
    """
    if unknown := [name for name in only if name not in GROUPS]:
        raise ValueError(f"--only {printable(unknown[0])}: no such group; there are {', '.join(GROUPS)}")
    if (folder / MANIFEST).exists():
        raise ValueError(f"{folder / MANIFEST}: vectors are there already; choose another folder, or remove them first")
    entries = []
    # No cache of compiled programs: the bytes that are written depend on this machine and jax alone.
    with activity() as line:
        for group in GROUPS.values():
            for case in group.cases(large) if not only or group.name in only else ():
                with line.timed(f"making {group.name}/{case.name}"):
                    entries.append(write_case(folder, group, case))
    if not entries:
        raise ValueError(f"--large: of {', '.join(only)} there are no large cases")
    manifest = {"schema": SCHEMA, "made": made_on(), "tolerances": TOLERANCES, "cases": entries}
    write_new(folder / MANIFEST, manifest_text(manifest).encode())
    return manifest


def write_case(folder: Path, group: Group, case: Case) -> dict[str, Any]:
    """Write one case, and return its entry in the manifest."""
    model = {}
    if group.write_folder is not None:
        group.write_folder(folder, case)
        weights = (folder / case.rule["model"] / "model.safetensors").read_bytes()
        model = {"model": case.rule["model"], "model_sha256": sha256(weights)}
    rule = placed(case.rule, folder)
    outputs = group.truth(case.inputs, rule) | group.as_bfloat16(case.inputs, rule)
    check_margins(case, outputs)
    file = f"{group.name}/{case.name}.safetensors"
    data = packed(dict(case.inputs) | outputs)
    write_new(folder / file, data)
    tensors = {name: described(name, x, group, outputs) for name, x in (dict(case.inputs) | outputs).items()}
    shown = {name: case.inputs[name].tolist() for name in _SHOWN if name in case.inputs}
    return {
        "group": group.name, "name": case.name, "file": file, "sha256": sha256(data), "what": case.what,
        "traps": list(case.traps), "seed": case.seed, "rule": dict(case.rule), "letters": letters(group, case, outputs),
        **shown, **model, "tensors": tensors,
    }  # fmt: skip


def check_margins(case: Case, outputs: Arrays) -> None:
    """Raise ValueError if rounding could decide which block is kept, since such a case would fail correct engines."""
    for name in (name for name in outputs if name.endswith("last_kept")):
        with np.errstate(invalid="ignore"):
            margin = outputs[name] - outputs[name.replace("last_kept", "first_dropped")]
        close = (margin > 0) & (margin < _LEAST_MARGIN)
        if not close.any():
            continue
        raise ValueError(
            f"{case.name}, seed {case.seed}: a margin of {margin[close].min():.1e}; draw it with another seed"
        )


def described(name: str, array: Shaped[np.ndarray, "..."], group: Group, outputs: Arrays) -> dict[str, Any]:
    """Return the manifest's entry for a tensor."""
    axes = group.axes[name.removesuffix("_bf16")]
    role = {"role": "input"}
    if name in outputs:
        role = {"role": "output", "tolerance": group.tolerances[name]}
    return {"axes": axes, "shape": list(array.shape), "dtype": dtype_code(array.dtype), **role}


def letters(group: Group, case: Case, outputs: Arrays) -> dict[str, int]:
    """Return the size of each axis letter; raise ValueError if a letter has two sizes in a case."""
    sizes: dict[str, int] = {}
    for name, array in (dict(case.inputs) | dict(outputs)).items():
        axes = group.axes[name.removesuffix("_bf16")].split()
        for letter, size in zip(axes, array.shape, strict=True):
            if sizes.setdefault(letter, size) != size:
                raise ValueError(f"{group.name}/{case.name}: {name} has {letter} = {size}, another has {sizes[letter]}")
    return sizes


def made_on() -> Mapping[str, str]:
    """Return the versions and hardware that floating sums depend on; where all are equal, equal bits are promised."""
    return {
        "jax": jax.__version__, "jaxlib": version("jaxlib"), "numpy": np.__version__,
        "platform": jax.default_backend(), "system": platform.system(), "machine": platform.machine(),
        "cpu": _cpu(), "cores": str(os.cpu_count()),
    }  # fmt: skip


def _cpu() -> str:
    """Return the processor's name and its vector extensions (avx, fma, amx), by which compilers choose instructions."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    value = lambda name: next((line.partition(":")[2].split() for line in lines if line.startswith(name)), [])
    return " ".join(
        [*value("model name"), *(flag for flag in value("flags") if flag.startswith(("avx", "fma", "amx")))]
    )
