"""Somebody's answers to the five prompts of tiny/, held against the stored ones; `check_numpy.py --tiny MINE` runs it.

MINE is a safetensors file, or a folder of them, with any of the tensors PROMPT/blocks [L K T J], PROMPT/expert_ids
[L T A], PROMPT/tokens [32], PROMPT/logits [32 V] and PROMPT/logprobs [T-1]; tiny/README.md says what they are.
"""

import hashlib
import json
from pathlib import Path

import numpy as np

# Kinds of answers, in the order in which a model computes them.
KINDS = ("blocks", "expert_ids", "tokens", "logits", "logprobs")
# What a right engine stays within, by the dtype that it computes in: where it selects otherwise, the distance of the
# scores on both sides of the cut; and the largest difference of a logit or log-probability.
BOUNDS = {"float64": (1e-4, 1e-4), "float32": (1e-3, 1e-3), "bfloat16": (np.inf, np.inf)}


def read_stored(folder, read_safetensors):
    """(tiny.json, {name: array}); ValueError where the two files do not belong together."""
    about = json.loads((folder / "tiny.json").read_text(encoding="utf-8"))
    data = (folder / "tiny.safetensors").read_bytes()
    if hashlib.sha256(data).hexdigest() != about["sha256"]:
        raise ValueError(f"{folder / 'tiny.safetensors'}: not the file that tiny.json names: the file was changed")
    return about, {name: array for name, (_, array) in read_safetensors(folder / "tiny.safetensors").items()}


def ids_of(blocks, unused):
    """Sorted ids, -1 for an unused slot, whichever number stands for one."""
    blocks = blocks.astype(np.int64)
    return np.sort(np.where((blocks < 0) | (blocks == unused), -1, blocks), axis=-1)


def mistake_in_blocks(expected, found):
    """The mistake that all wrong selections look like, or None. Both [L K T J], sorted."""
    repeated = (found[..., 1:] == found[..., :-1]) & (found[..., 1:] >= 0)
    if repeated.any():
        return f"{repeated.any(-1).sum()} selections have an id twice (T4)"
    valid, wanted = (found >= 0).sum(-1), (expected >= 0).sum(-1)
    if (valid > wanted).any():
        return f"{(valid > wanted).sum()} selections have more blocks than the rule allows (T3)"
    if (valid < wanted).any():
        return f"{(valid < wanted).sum()} selections have fewer blocks than the rule asks for (T23)"
    if found.shape[1] > 1 and (found == found[:, :1]).all():
        return "every KV head has the same selection (T1)"
    for step, which in ((1, "before"), (-1, "after")):
        rows = slice(1, None) if step > 0 else slice(None, -1)
        if len(found) > 1 and not (np.roll(expected, step, axis=0)[rows] != found[rows]).any():
            return f"each layer has the selection of the one {which} it (T25)"
    if found.shape[1] > 1 and not (expected[:, ::-1] != found).any():
        return "the heads are in the other order"
    return None


def mistake_in_logits(expected, found):
    """The mistake that logits [32 V] look like, or None."""
    if np.isnan(found).any():
        return f"{np.isnan(found).sum()} numbers are NaN"
    scale = float((expected * found).sum() / (expected**2).sum())
    near = lambda x, y: np.abs(x - y).max() < 1e-2 * np.abs(x).max()
    if abs(scale - 1) > 1e-2 and near(scale * expected, found):
        return f"all of them are {scale:.4g} times the stored ones"
    if near(expected[:-1], found[1:]):
        return "each position has what the one before it should have: off by one"
    if near(expected[1:], found[:-1]):
        return "each position has what the one after it should have: off by one"
    return None


def shape_error(name, found, expected, also=""):
    return ValueError(f"{name}: found shape {list(found.shape)}, expected {list(expected.shape)}{also}")


def of_tokens_read(name, expected, found, axis):
    """The stored answers of as many tokens as somebody read: a prompt without its new tokens is enough."""
    if found.ndim != expected.ndim or found.shape[axis] > expected.shape[axis]:
        raise shape_error(name, found, expected)
    if found.ndim == 4 and found.shape[1] != expected.shape[1] == found.shape[2]:
        raise shape_error(name, found, expected, "; the axes of heads and tokens are swapped (T7)")
    read = np.take(expected, range(found.shape[axis]), axis)
    if axis and found.shape[:-1] != read.shape[:-1]:
        raise shape_error(name, found, expected)
    return read


def compare_sets(name, expected, found, unused):
    """(mask of the wrong selections, the first of them in words or None, the ids of both)."""
    expected = of_tokens_read(name, expected, found, axis=expected.ndim - 2)
    expected, found = ids_of(expected, unused), ids_of(found, unused)
    slots = max(expected.shape[-1], found.shape[-1])
    expected, found = (
        np.pad(x, [(0, 0)] * (x.ndim - 1) + [(slots - x.shape[-1], 0)], constant_values=-1) for x in (expected, found)
    )
    wrong = np.any(expected != found, axis=-1)
    if not wrong.any():
        return wrong, None, expected, found
    place = tuple(int(i) for i in np.argwhere(wrong)[0])
    letters = "lkt" if expected.ndim == 4 else "lt"
    where = " ".join(f"{letter}={i}" for letter, i in zip(letters, place, strict=True))
    both = [[int(i) for i in x[place] if i >= 0] for x in (expected, found)]
    text = f"{wrong.sum()} of {wrong.size} selections differ; the first at {where}: expected {both[0]}, found {both[1]}"
    return wrong, text, expected, found


def compare_tokens(expected, found):
    """The first new token that is another one, in words; None if all are right."""
    for i, token in enumerate(expected):
        if i >= len(found):
            return f"token {i} of {len(expected)}: expected {token}, yours end there"
        if found[i] != token:
            return f"token {i} of {len(expected)}: expected {token}, found {found[i]}"
    return None


def compare_numbers(name, expected, found):
    """(the largest difference, its place and both values in words)."""
    expected = of_tokens_read(name, expected, found, axis=0) if expected.ndim == 1 else expected
    if found.shape != expected.shape:
        raise shape_error(name, found, expected)
    gap = np.nan_to_num(np.abs(expected - found), nan=np.inf)
    place = tuple(int(i) for i in np.unravel_index(np.argmax(gap), gap.shape))
    values = f"expected {expected[place]:.6g}, found {found[place]:.6g}"
    return float(gap[place]), f"off by {gap[place]:.2g} at {list(place)}: {values}"


def check(about, stored, mine, dtype):
    """(lines on what differs, the line to paste, true if all agrees).

    Args:
      about: tiny.json.
      stored, mine: {tensor: array}.
      dtype: of somebody's computation.
    """
    names = [prompt["name"] for prompt in about["prompts"]]
    if not any(f"{name}/{kind}" in mine for name in names for kind in KINDS):
        raise ValueError(f"no tensor of yours has one of the names {names[0]}/blocks, {names[0]}/logits, ...")
    most_margin, most_error = BOUNDS[dtype]
    # In bfloat16 roundings change selections, and these change tokens and logits: they are counted, and are no faults.
    is_exact = dtype != "bfloat16"
    lines, faults, worst_margin = [], 0, 0.0
    right, total, largest = dict.fromkeys(KINDS, 0), dict.fromkeys(KINDS, 0), {}
    for prompt, name, kind in ((prompt, prompt["name"], kind) for prompt in about["prompts"] for kind in KINDS):
        key, mistake = f"{name}/{kind}", None
        if key not in mine:
            continue
        if kind in ("blocks", "expert_ids"):
            wrong, text, expected, found = compare_sets(key, stored[key], mine[key], about["unused"])
            right[kind], total[kind] = right[kind] + int((~wrong).sum()), total[kind] + wrong.size
            is_fault = is_exact
            if kind == "blocks" and text is not None:
                margin = float(stored[f"{name}/margin"][:, :, : wrong.shape[2]][wrong].max())
                worst_margin = max(worst_margin, margin)
                mistake = mistake_in_blocks(expected, found)
                text += f"; {mistake or f'their scores at the cut are up to {margin:.3g} apart'}"
                is_fault = margin > most_margin or mistake is not None
        elif kind == "tokens":
            text, is_fault = compare_tokens(prompt["tokens"], mine[key].reshape(-1).tolist()), is_exact
            right[kind], total[kind] = right[kind] + (text is None), total[kind] + 1
        else:
            error, text = compare_numbers(key, stored[key], mine[key])
            largest[kind] = max(largest.get(kind, 0.0), error)
            mistake = mistake_in_logits(stored[key], mine[key]) if kind == "logits" and error > most_error else None
            is_fault = error > most_error
            text = f"{text}; {mistake}" if mistake else text if is_fault else None
        if text is not None:
            faults += is_fault
            lines.append(f"{key}: {text}")
    share = lambda kind: "100%" if right[kind] == total[kind] else f"{1e4 * right[kind] // total[kind] / 100:.2f}%"
    parts = [f"blocks {share('blocks')}"] if total["blocks"] else []
    parts[:1] = [f"{parts[0]} (margins to {worst_margin:.2g})"] if worst_margin else parts
    parts += [f"experts {share('expert_ids')}"] if total["expert_ids"] else []
    parts += [f"tokens {right['tokens']}/{total['tokens']}"] if total["tokens"] else []
    parts += [f"{kind} {error:.0e}".replace("e-0", "e-").replace("e+0", "e+") for kind, error in largest.items()]
    return lines, f"m3jax vectors {about['version']}, tiny: {', '.join(parts)} {dtype}", not faults


def main(mine, read_safetensors, read_outputs, narrowest_first, dtype=None):
    """Print what differs and the line to paste; 0 if all agrees, 1 if something differs.

    Args:
      mine: a file or a folder.
      read_safetensors, read_outputs: `check_numpy.py`'s.
      narrowest_first: {safetensors' name of a dtype: ours}.
      dtype: of the computation; by default the narrowest of its logits and log-probabilities.
    """
    about, stored = read_stored(Path(__file__).resolve().parent / "tiny", read_safetensors)
    outputs = {name: value for (_, name), value in read_outputs(Path(mine)).items()}
    kinds = [kind for kind in narrowest_first if any(found == kind for n, (found, _) in outputs.items() if "/log" in n)]
    dtype = dtype or (narrowest_first[kinds[0]] if kinds else "float32")
    lines, summary, is_right = check(about, stored, {name: array for name, (_, array) in outputs.items()}, dtype)
    for line in [*lines, summary]:
        print(line)
    return 0 if is_right else 1
