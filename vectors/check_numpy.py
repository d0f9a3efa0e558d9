#!/usr/bin/env python3
"""Golden vectors, read and checked with numpy alone: no jax, no m3jax, no safetensors, no ml_dtypes.

    python check_numpy.py FOLDER            recompute in float64 what FOLDER says, and compare
    python check_numpy.py FOLDER OUTPUTS    compare somebody's outputs with FOLDER's

OUTPUTS is a folder of safetensors files, laid out as FOLDER is, with any of its outputs under their names; or one file,
or a folder of files of any names, in which a tensor is called "group/case/name". Exit status: 0 all agree, 1 something
differs, 2 the input cannot be used.
"""

import argparse
import hashlib
import json
import sys
from functools import cache
from pathlib import Path

import numpy as np
from m3_numpy import GROUPS, dense
from mistakes import MISTAKES, outputs_with, used_by

SCHEMA = 1
BITS = {"BOOL": "?", "U8": "u1", "I8": "i1", "I16": "<i2", "U16": "<u2", "I32": "<i4", "U32": "<u4", "I64": "<i8",
        "F8_E4M3": "u1", "F8_E8M0": "u1", "BF16": "<u2", "F16": "<f2", "F32": "<f4", "F64": "<f8"}  # fmt: skip
NARROWEST_FIRST = {"BF16": "bfloat16", "F16": "bfloat16", "F32": "float32", "F64": "float64"}


# --- reading


def read_safetensors(path):
    """{name: (dtype, array)}: floats of any kind as float64, which holds each exactly; integers as they are."""
    data = Path(path).read_bytes()
    size = int.from_bytes(data[:8], "little")
    if len(data) < 8 or not 2 <= size <= len(data) - 8:
        raise ValueError(f"{path}: {len(data)} bytes are no safetensors file, or only its beginning")
    try:
        header = json.loads(data[8 : 8 + size])
        header.pop("__metadata__", None)
        return {name: (entry["dtype"], tensor(entry, data[8 + size :])) for name, entry in header.items()}
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path}: no safetensors file, or a damaged one ({str(error)[:80]})") from None


def tensor(entry, data):
    first, end = entry["data_offsets"]
    if not 0 <= first <= end <= len(data):
        raise ValueError(f"{len(data)} bytes of numbers, and the header speaks of {end}")
    bits = np.frombuffer(data[first:end], BITS[entry["dtype"]]).reshape(entry["shape"])
    if entry["dtype"] == "BF16":  # the upper half of a float32
        return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    if entry["dtype"] == "F8_E4M3":
        return e4m3_values()[bits]
    return bits.astype(np.float64) if bits.dtype.kind == "f" else bits


def e4m3_values():
    """The 256 numbers of float8_e4m3fn: a sign, four bits of exponent with bias 7, three of fraction; 0x7f is NaN."""
    code = np.arange(256)
    exponent, fraction = code >> 3 & 15, code & 7
    size = np.where(exponent == 0, np.ldexp(fraction / 8, -6), np.ldexp(1 + fraction / 8, exponent - 7))
    return np.where(code & 127 == 127, np.nan, np.where(code >= 128, -size, size))


def read_manifest(folder):
    file = folder / "manifest.json"
    if not file.is_file():
        raise ValueError(f"{folder}: no manifest.json; it is no folder of golden vectors")
    try:
        manifest = json.loads(file.read_text(encoding="utf-8"))
        version, cases = manifest["schema"], manifest["cases"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{file}: not a manifest of golden vectors ({str(error)[:80]})") from None
    if version != SCHEMA:
        raise ValueError(f"{file}: schema version {version!r}, and {SCHEMA} can be read")
    if not cases:
        raise ValueError(f"{file}: it names no cases")
    return manifest


def read_outputs(place):
    """{(file, name): (dtype, array)}; file is relative to the folder."""
    files = [place] if place.is_file() else sorted(place.rglob("*.safetensors"))
    if not files:
        raise ValueError(f"{place}: no safetensors file in it")
    base = place.parent if place.is_file() else place
    return {
        (file.relative_to(base).as_posix(), name): found
        for file in files
        for name, found in read_safetensors(file).items()
    }


# --- comparing


def named(place, axes):
    """A place in words: "b=0 k=1 t=27" where the axes are "B K T ...", of which it may lack the last one."""
    return " ".join(f"{axis.lower()}={index}" for axis, index in zip(axes.split(), place, strict=False)) or "[]"


def difference(expected, found, tolerance, dtype, slack=0.0, axes=""):
    """Say in one line how an output differs, or return None if it agrees. `axes` has a letter for each axis."""
    if expected.shape != found.shape:
        return f"found shape {list(found.shape)}, expected {list(expected.shape)}"
    if tolerance["compare"] == "blocks":
        wrong = np.any(np.sort(expected, -1) != np.sort(found, -1), axis=-1)
        if not wrong.any():
            return None
        place = tuple(int(i) for i in np.argwhere(wrong)[0])
        ids = lambda x: sorted(int(i) for i in x[place] if i >= 0)
        sets = f"expected blocks {ids(expected)}, found {ids(found)}"
        return f"{wrong.sum()} of {wrong.size} selections differ; the first at {named(place, axes)}: {sets}"
    rtol, atol = (0.0, 0.0) if tolerance["compare"] == "bits" else tolerance.get(dtype, tolerance["bfloat16"])
    expected, found = expected.astype(np.float64), found.astype(np.float64)
    with np.errstate(invalid="ignore"):
        gap = np.abs(expected - found)
        allowed = atol + rtol * np.abs(expected) + slack
        same = (expected == found) | (np.isnan(expected) & np.isnan(found))
        wrong = ~(same | (np.isfinite(gap) & (gap <= allowed)))
        excess = np.where(wrong, np.where(np.isnan(gap), np.inf, gap - allowed), -1.0)
    if not wrong.any():
        return None
    place = np.unravel_index(np.argmax(excess), excess.shape)
    values = f"expected {expected[place]:.9g}, found {found[place]:.9g}"
    bound = f"beyond rtol {rtol:.2g}, atol {atol:.2g} ({dtype})"
    return f"{wrong.sum()} of {wrong.size} numbers differ {bound}; the farthest at {named(place, axes)}: {values}"


def hint(name, expected, found, x, rule, margin):
    """Name the mistake that an output looks like, if it is one of those that engines have made."""
    if name == "blocks" and found.ndim == 4:
        sets = lambda ids: np.sort(ids, axis=-1)
        swapped = found.swapaxes(1, 2)
        if swapped.shape == expected.shape and (sets(swapped) == sets(expected)).all():
            return "the axes of heads and queries are swapped (T7)"
        if found.shape[:3] != expected.shape[:3]:
            return None
        valid, wanted = (found >= 0).sum(-1), (expected >= 0).sum(-1)
        repeated = [len(set(row[row >= 0].tolist())) < (row >= 0).sum() for row in found.reshape(-1, found.shape[-1])]
        if any(repeated):
            return f"{sum(repeated)} selections have an id twice (T4)"
        if (valid > wanted).any():
            return f"{(valid > wanted).sum()} selections have more blocks than the rule allows (T3)"
        if (valid < wanted).any():
            return f"{(valid < wanted).sum()} selections have fewer blocks than the rule asks for (T23)"
        if found.shape[1] > 1 and (found == found[:, :1]).all() and (expected != expected[:, :1]).any():
            return "every head has the first one's selection (T1)"
        if margin is not None and found.shape == expected.shape:
            wrong = np.any(sets(found) != sets(expected), axis=-1)
            least = np.nanmin(np.where(wrong, margin, np.inf))
            return f"the scores at the cut of those that differ are at least {least:.3g} apart"
    needed = {"q", "k", "v", "positions", "lengths"}
    has_all_keys = needed <= x.keys() and x["k"].shape[1] > x["positions"].max()
    if name == "out" and has_all_keys and found.shape == expected.shape:
        everything, _ = dense(x["q"], x["k"], x["v"], x["positions"], x["lengths"])
        if np.abs(everything - found).max() < 0.3 * np.abs(expected - found).max():
            return "it is dense attention: no block was left out (T18)"
    return None


# --- checking


def slack_of(name, stored):
    """Return how far each number of an output may be off besides its tolerance."""
    _, slack = stored.get(f"{name.removesuffix('_bf16')}_slack", (None, 0.0))
    return slack


def recomputed(case, stored, rule, tolerances):
    """Lines for each stored output that numpy's float64 does not confirm, and how many were looked at."""
    x = {name: array for name, (_, array) in stored.items() if case["tensors"].get(name, {}).get("role") == "input"}
    lines, count = [], 0
    for name, array in GROUPS[case["group"]](x, rule).items():
        if name not in case["tensors"]:
            continue
        count += 1
        dtype = "bfloat16" if name.endswith("_bf16") else "float64"
        slack = slack_of(name, stored)
        entry = case["tensors"][name]
        problem = difference(
            stored[name][1], np.asarray(array), tolerances[entry["tolerance"]], dtype, slack, entry["axes"]
        )
        lines += [f"{name} as stored, against numpy: {problem}"] if problem else []
    return lines, count


def held_against(case, stored, rule, outputs, tolerances, dtype):
    """Lines for each of somebody's outputs that is not the stored one, and how many were looked at."""
    label = f"{case['group']}/{case['name']}"
    named = {name: found for (_, name), found in outputs.items()}
    wanted = [name for name, entry in case["tensors"].items() if entry["role"] == "output"]
    given = {name: outputs.get((case["file"], name)) or named.get(f"{label}/{name}") for name in wanted}
    given = {name: found for name, found in given.items() if found is not None}
    # A computation is as exact as its narrowest output, also where another one, such as the LSE, is wider.
    kinds = [kind for kind in NARROWEST_FIRST if any(found[0] == kind for found in given.values())]
    x = {name: array for name, (_, array) in stored.items() if case["tensors"][name]["role"] == "input"}
    margin = stored["last_kept"][1] - stored["first_dropped"][1] if "last_kept" in stored else None
    least = dtype or (NARROWEST_FIRST[kinds[0]] if kinds else "float32")
    used = cache(lambda: used_by(case["group"], x, rule))
    with_mistake = cache(lambda mistake: outputs_with(mistake, case["group"], x, rule, used()))
    lines = []
    for name, (_, array) in given.items():
        expected, entry = stored[name][1], case["tensors"][name]
        rest = tolerances[entry["tolerance"]], least, slack_of(name, stored), entry["axes"]
        problem = difference(expected, array, *rest)
        if problem:
            gives_it = lambda wrong, expected=expected, array=array, rest=rest: (
                wrong is not None and difference(wrong, array, *rest) is None and difference(expected, wrong, *rest)
            )
            proven = " or ".join(mistake for mistake in MISTAKES if gives_it(with_mistake(mistake).get(name)))
            kind_of_mistake = proven or hint(name, expected, array, x, rule, margin)
            lines.append(f"{name}: {problem}" + (f"; {kind_of_mistake}" if kind_of_mistake else ""))
    return lines, len(given)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("outputs", type=Path, nargs="?")
    parser.add_argument("--only", metavar="GROUP", action="append")
    parser.add_argument("--dtype", choices=("float64", "float32", "bfloat16"), help="of the computation (default: the "
                        "narrowest floating type among a case's outputs)")  # fmt: skip
    args = parser.parse_args(argv)
    manifest = read_manifest(args.folder)
    outputs = None if args.outputs is None else read_outputs(args.outputs)
    agree, cases, compared, without = 0, 0, 0, 0
    for case in manifest["cases"]:
        if args.only and case["group"] not in args.only:
            continue
        file, label = args.folder / case["file"], f"{case['group']}/{case['name']}"
        if case["group"] not in GROUPS:
            raise ValueError(f"{label}: a group that this program does not know")
        if not file.is_file():
            raise ValueError(f"{file}: not there, and manifest.json names it")
        stored = read_safetensors(file)
        if missing := [name for name in case["tensors"] if name not in stored]:
            raise ValueError(f"{file}: no tensor {missing[0]!r}, which manifest.json names")
        for name, entry in case["tensors"].items():
            kind, array = stored[name]
            if [kind, list(array.shape)] != [entry["dtype"], entry["shape"]]:
                said = f"manifest.json says {entry['dtype']} {entry['shape']}"
                raise ValueError(f"{file}: tensor {name!r} is {kind} {list(array.shape)}, {said}")
        lines = []
        sums = {file: case["sha256"]}
        if "model" in case:
            sums[args.folder / case["model"] / "model.safetensors"] = case["model_sha256"]
        for path in (
            path for path, expected in sums.items() if hashlib.sha256(path.read_bytes()).hexdigest() != expected
        ):
            lines.append(f"the sha256 of {path.name} is not the one in manifest.json: the file was changed")
        rule = case["rule"]
        if "model" in case:
            found = read_safetensors(args.folder / case["model"] / "model.safetensors")
            rule = rule | {"weights": {name: array for name, (_, array) in found.items()}}
        if outputs is None:
            wrong, count = recomputed(case, stored, rule, manifest["tolerances"])
        else:
            wrong, count = held_against(case, stored, rule, outputs, manifest["tolerances"], args.dtype)
        if outputs is not None and not count:
            without += 1
            continue
        lines, cases, compared = lines + wrong, cases + 1, compared + count
        agree += not lines
        for line in lines:
            print(f"{label}: {line}")
    if not compared:
        raise ValueError(f"{args.outputs or args.folder}: no output in it that {args.folder} has")
    if without:
        print(f"{without} {'case has' if without == 1 else 'cases have'} no output of yours")
    print(f"{agree} of {cases} cases agree ({compared} outputs compared)")
    return 0 if agree == cases else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (ValueError, OSError) as error:
        print(f"check_numpy: error: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(2)
    except (KeyError, TypeError, AttributeError) as error:
        print(f"check_numpy: error: manifest.json is not whole: {error!r}; make the vectors again", file=sys.stderr)
        sys.exit(2)
