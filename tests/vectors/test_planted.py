"""Mistakes that engines have made, planted into right outputs: each is found, with quantity, place and both values."""

import importlib
import sys
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from m3jax.files.tensors import packed
from m3jax.vectors import compare
from m3jax.vectors.files import read_case, read_manifest
from m3jax.vectors.groups import GROUPS

STORED = Path(__file__).resolve().parents[2] / "vectors"


@pytest.fixture(scope="module", autouse=True)
def numpy_path():
    """`vectors/` is where `check_numpy.py` finds its arithmetic when it is run."""
    sys.path.insert(0, str(STORED))
    yield
    sys.path.remove(str(STORED))


@pytest.fixture(scope="module", autouse=True)
def mistakes_once(numpy_path):
    """What a mistake makes of a case is computed by the first report that needs it: tests spoil the same few cases."""
    check_numpy, known = importlib.import_module("check_numpy"), {}
    right = check_numpy.outputs_with

    def outputs_with(mistake, group, x, rule, used=None):
        key = mistake, group, repr(rule), *((name, array.tobytes()) for name, array in x.items())
        if key not in known:
            known[key] = right(mistake, group, x, rule, used)
        return known[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(check_numpy, "outputs_with", outputs_with)
        yield


@cache
def stored_cases() -> list[dict]:
    """What the manifest says of each case; nothing here changes it."""
    return read_manifest(STORED)["cases"]


def again(x, rule, group, /, **changed):
    """All outputs of a case as numpy has them, with some of its inputs or rules changed."""
    operations = importlib.import_module("m3_numpy").GROUPS
    inputs = {name: array for name, array in x.items() if name not in changed}
    arrays = {name: value for name, value in changed.items() if isinstance(value, np.ndarray)}
    return operations[group](inputs | arrays, rule | {n: value for n, value in changed.items() if n not in arrays})


def higher_id_of_ties(x, rule):
    """The selection that ranks blocks from behind."""
    wrong = x["blocks"].copy()
    for b, k, t in np.ndindex(wrong.shape[:3]):
        own, scores = x["positions"][b, t] // rule["block_size"], x["block_scores"][b, k, t]
        best = sorted(range(own), key=lambda m: (-scores[m], -m))[: rule["top_k"] - 1]
        wrong[b, k, t, : len(best) + 1] = [*sorted(best), own]
    return wrong


def one_more(x, rule):
    """The block before the first kept one, as one more."""
    return np.maximum(x["blocks"][..., 0] - 1, -1)


def pooled_first(x, rule):
    keys = np.nan_to_num(x["index_k"])
    token = np.einsum("btki,bsi->bkts", x["index_q"], keys)
    return token.reshape(*token.shape[:3], -1, rule["block_size"]).max(-1)


def nan_first(x, rule):
    wrong = x["blocks"].copy()
    wrong[:, :, 24:, 0] = 4  # the block of the key that is NaN
    return wrong


def high_bits_first(mask):
    """Words whose 32 bits are in the other order."""
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little").reshape(*mask.shape, 32)
    return np.packbits(bits[..., ::-1], axis=-1, bitorder="little").view(np.uint32)[..., 0]


def drawn_from_p(x, rule):
    """Tokens where no proposal takes anything from p: what would be drawn in the columns of refusals."""
    refused = np.where(np.arange(3) < x["accepted"][:, None], x["proposals"], -1)
    return again(x, rule, "verification", proposals=refused)["tokens"]


def weights(rule):
    found = importlib.import_module("check_numpy").read_safetensors(STORED / rule["model"] / "model.safetensors")
    return {name: array for name, (_, array) in found.items()}


def dense(x, rule):
    return importlib.import_module("m3_numpy").dense(*(x[name] for name in ("q", "k", "v", "positions", "lengths")))[0]


def interleaved(x, rule):
    """Dims (2i, 2i + 1) turned in the place of (i, i + half)."""
    half = rule["rotary_dim"] // 2
    order = [*np.arange(2 * half).reshape(half, 2).T.reshape(-1), *range(2 * half, x["x"].shape[-1])]
    back = np.argsort(order)
    weight = x["weight"][order]
    return again(x, rule, "rotary", x=x["x"][..., order], weight=weight)["rotated"][..., back]


# A mistake: group/case, the output that it spoils, how, and words of the report. docs/vectors.md lists them by group.
PLANTED = {
    "axes of heads and queries taken for each other": (
        "selection/heads_as_queries",
        "blocks",
        lambda x, rule: x["blocks"].swapaxes(1, 2),
        "axes of heads and queries",
    ),
    "one selection for all heads": (
        "selection/ragged",
        "blocks",
        lambda x, rule: np.repeat(x["blocks"][:, :1], 2, axis=1),
        "every head has the first",
    ),
    "of equal scores the higher id": (
        "selection/ties",
        "blocks",
        higher_id_of_ties,
        "at least 0 apart",
    ),
    "unused slots are block 0": (
        "selection/local_and_init",
        "blocks",
        lambda x, rule: np.where(x["blocks"] < 0, 0, x["blocks"]),
        "selections have an id twice",
    ),
    "a block beside the J best": (
        "selection/ragged",
        "blocks",
        lambda x, rule: np.concatenate([x["blocks"], one_more(x, rule)[..., None]], axis=-1),
        "more blocks than the rule allows",
    ),
    "mask after the pool": (
        "selection/chunk",
        "block_scores",
        pooled_first,
        "numbers differ beyond",
    ),
    "NaN first": (
        "selection/nan_and_infinity",
        "blocks",
        nan_first,
        "selections differ",
    ),
    "the maximum where the rule says lse": (
        "selection/lse",
        "blocks",
        lambda x, rule: again(x, rule, "selection", score="max")["blocks"],
        "selections differ",
    ),
    "dense fallback": (
        "sparse_attention/prefill",
        "out",
        dense,
        "it is dense attention",
    ),
    "a row that sees nothing has a number": (
        "sparse_attention/unused_slots",
        "lse",
        lambda x, rule: np.where(np.isinf(x["lse"]), 1.0, x["lse"]),
        "expected -inf",
    ),
    "the table is not followed": (
        "pages/shuffled",
        "out",
        lambda x, rule: again(x, rule, "pages", table=np.sort(x["table"]))["out"],
        "found nan",
    ),
    "positions of the first row for all": (
        "pages/partial_prefix",
        "blocks",
        lambda x, rule: again(x, rule, "pages", positions=x["positions"][[0, 0]])["blocks"],
        "selections",
    ),
    "a chunk's own tokens alone are scored": (
        "pages/chunked",
        "blocks",
        lambda x, rule: again(x, rule, "pages", index_k=x["index_k"] * (np.arange(43) > 31)[:, None])["blocks"],
        "selections",
    ),
    "rows of one step share a selection": (
        "decode/rows_5",
        "blocks",
        lambda x, rule: np.repeat(x["blocks"][:, :, :1], 5, axis=2),
        "selections differ",
    ),
    "the scale of keys forgotten": (
        "float8/kv",
        "out",
        lambda x, rule: again(x, rule, "float8", k_scale=np.ones(2) / 64)["out"],
        "numbers differ",
    ),
    "index keys kept in more bits": (
        "float8/index",
        "blocks",
        lambda x, rule: x["blocks_of_exact_keys"],
        "the scores at the cut of those that differ",
    ),
    "index keys left behind": (
        "exchange/import",
        "blocks",
        lambda x, rule: again(x, rule, "exchange", index_pages=0 * np.nan_to_num(x["index_pages"]))["blocks"],
        "selections",
    ),
    "parts merged without their weights": (
        "shards/four_devices",
        "out",
        lambda x, rule: x["shard_out"].mean(0),
        "numbers differ beyond",
    ),
    "the bias counts in the weights": (
        "experts/layer",
        "expert_weights",
        lambda x, rule: x["expert_weights"] + x["bias"][x["expert_ids"]],
        "numbers differ beyond",
    ),
    "of equal experts the higher id": (
        "experts/router_ties",
        "expert_ids",
        lambda x, rule: np.select([x["expert_ids"] == i for i in (1, 2)], [6, 5], x["expert_ids"]),
        "differ; the first",
    ),
    "no clamp": (
        "experts/layer",
        "out",
        lambda x, rule: again(x, rule, "experts", limit=1e9)["out"],
        "numbers differ beyond",
    ),
    "rotary pairs interleaved": (
        "rotary/short",
        "rotated",
        interleaved,
        "numbers differ beyond",
    ),
    "norm weights without 1 +": (
        "rotary/short",
        "normed",
        lambda x, rule: x["normed"] / (1 + x["weight"]) * x["weight"],
        "numbers differ beyond",
    ),
    "subnormal weights are zero": (
        "mxfp8/all_scales",
        "weights",
        lambda x, rule: np.where(np.abs(x["weights"]) < 2.0**-126, 0, x["weights"]),
        "numbers differ beyond",
    ),
    "no repetition penalty": (
        "sampling/knobs",
        "kept",
        lambda x, rule: again(x, rule, "sampling", repetition_penalty=np.ones(14))["kept"],
        "numbers differ",
    ),
    "the penalties count the prompt": (
        "sampling/edits",
        "probabilities",
        lambda x, rule: again(x, rule, "sampling", new=np.concatenate([x["prompt"], x["new"]], 1))["probabilities"],
        "numbers differ",
    ),
    "a bad word's beginning is not looked at": (
        "sampling/edits",
        "kept",
        lambda x, rule: again(x, rule, "sampling", bad_words=np.where(np.arange(8) < 7, -1, x["bad_words"]))["kept"],
        "numbers differ",
    ),
    "a mask is read from its high bits": (
        "sampling/edits",
        "kept",
        lambda x, rule: again(x, rule, "sampling", mask=high_bits_first(x["mask"]))["kept"],
        "numbers differ",
    ),
    "no minimum of tokens": (
        "verification/edited_point_mass",
        "tokens",
        lambda x, rule: again(x, rule, "verification", min_tokens=0 * x["min_tokens"])["tokens"],
        "numbers differ",
    ),
    "no frequency penalty in verification": (
        "verification/edited_drafted",
        "tokens",
        lambda x, rule: again(x, rule, "verification", frequency_penalty=0 * x["frequency_penalty"])["tokens"],
        "numbers differ",
    ),
    "uniform numbers of the row before": (
        "sampling/knobs",
        "tokens",
        lambda x, rule: again(x, rule, "sampling", uniform=np.roll(x["uniform"], 1, axis=0))["tokens"],
        "numbers differ",
    ),
    "a proposal counts as a point mass where it was drawn": (
        "verification/drafted",
        "accepted",
        lambda x, rule: again(x, rule, "verification", draft_probabilities=np.round(x["draft_probabilities"] + 0.4))[
            "accepted"
        ],
        "numbers differ",
    ),
    "after a refusal drawn from p": (
        "verification/point_mass",
        "tokens",
        lambda x, rule: drawn_from_p(x, rule),
        "numbers differ",
    ),
    "taps off by one": (
        "eagle3/eagle31",
        "feature",
        lambda x, rule: again(x, rule, "eagle3", taps=np.roll(x["taps"], 1, axis=2))["feature"],
        "numbers differ beyond",
    ),
    "a token goes with the feature of its own position": (
        "eagle3/eagle3",
        "logits",
        lambda x, rule: again(x, rule, "eagle3", next_tokens=np.roll(x["next_tokens"], 1, axis=1))["logits"],
        "numbers differ beyond",
    ),
    "a layer uses the selection of the one before": (
        "model/prompts",
        "layers.2.blocks",
        lambda x, rule: x["layers.1.blocks"],
        "selections differ",
    ),
    "blocks counted by cells": (
        "cells/interleaved",
        "blocks",
        lambda x, rule: again(x, rule, "cells", cell_positions=in_order_of_memory(x))["blocks"],
        "in the order of memory, not by positions (T41)",
    ),
    "half a block taken for one": (
        "cells/small_pages",
        "blocks",
        lambda x, rule: np.where(x["blocks"] < 0, -1, 2 * x["blocks"]),
        "selections differ",
    ),
    "norm weights shifted twice": (
        "norm/weights",
        "normed",
        lambda x, rule: (
            x["normed"] / (1 + x["weight"] + 1e-300) * (2 + x["weight"])
            + np.where(x["weight"] == -1, x["x"] / np.sqrt((x["x"] ** 2).mean(-1, keepdims=True) + rule["eps"]), 0)
        ),
        "twice (T47)",
    ),
    "the routed sum without its factor": (
        "model/prompts",
        "logits",
        lambda x, rule: again(x, rule, "model", weights=weights(rule), routed_scaling_factor=1.0)["logits"],
        "numbers differ beyond",
    ),
}


# Of a whole model in numpy, seconds each; test_tiny.py plants others in one.
OF_MODELS = ("a layer uses the selection of the one before", "the routed sum without its factor")


@pytest.mark.parametrize(
    "mistake", [pytest.param(name, marks=pytest.mark.further) if name in OF_MODELS else name for name in PLANTED]
)
def test_a_planted_bug_is_found(mistake, tmp_path, capsys):
    """The same tensor is right before, wrong after."""
    check_numpy = importlib.import_module("check_numpy")
    label, tensor, plant, words = PLANTED[mistake]
    (case,) = (case for case in stored_cases() if f"{case['group']}/{case['name']}" == label)
    arrays, _ = read_case(STORED, case)
    decoded = {name: array for name, (_, array) in check_numpy.read_safetensors(STORED / case["file"]).items()}
    right, wrong = tmp_path / "right" / "mine.safetensors", tmp_path / "wrong" / case["file"]
    for file, name, value in (
        (right, f"{label}/{tensor}", arrays[tensor]),
        (wrong, tensor, plant(decoded, case["rule"])),
    ):
        file.parent.mkdir(parents=True)
        value = np.ascontiguousarray(value)
        file.write_bytes(packed({name: value}))
    only = ["--only", case["group"]]
    assert check_numpy.main([str(STORED), str(right.parent), *only]) == 0
    others = sum(other["group"] == case["group"] for other in stored_cases()) - 1
    left_out = f"{others} case{'s have' if others > 1 else ' has'} no output of yours\n" if others else ""
    summary = f"{left_out}1 of 1 cases agree (1 outputs compared)\n"
    assert capsys.readouterr().out == summary
    assert check_numpy.main([str(STORED), str(tmp_path / "wrong"), *only]) == 1
    line = capsys.readouterr().out.splitlines()[0]
    assert line.startswith(f"{label}: {tensor}: ") and "expected" in line and "found" in line and words in line, line


def in_order_of_memory(x):
    """Positions of cells that are the number of cells of the same row before them."""
    found = x["cell_positions"].copy()
    for row in (0, 1):
        own = x["cell_rows"] == row
        found[own] = np.arange(own.sum())
    return found


def silu(gate, up, limit, alpha, one=1.0):
    gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
    return (up + one) * gate / (1 + np.exp(-alpha * gate))


def grid(change):
    """The outputs of an activation that is written out here."""
    return lambda x, rule: change(x["gate_values"], x["up_values"], rule["limit"], rule["alpha"])


def interleaved_read(gate, up, limit, alpha):
    row = np.concatenate([gate, up], axis=-1)
    return silu(row[:, 0::2], row[:, 1::2], limit, alpha)


def fewer_keys_by_draft_row(x, rule):
    """LSEs of devices whose own length is counted down by one token for each later draft row."""
    size, count, found = rule["block_size"], rule["shards"], np.full(x["shard_lse"].shape, -np.inf)
    for r, b, t, n in np.ndindex(found.shape):
        keys = [s for s in range(x["lengths"][b]) if s // size % count == r]
        keys = keys[: len(keys) - (4 - t)] if len(keys) > 4 - t else []
        keys = [s for s in keys if s // size in x["blocks"][b, n, t]]
        if keys:
            found[r, b, t, n] = np.logaddexp.reduce(x["k"][b, keys, n] @ x["q"][b, t, n] / np.sqrt(8))
    return found


def encoded_without_eight(x, rule):
    """Scale bytes that are the exponent of the largest number."""
    largest = np.abs(x["activations"].reshape(6, 3, 32)).max(-1)
    return np.where(largest > 0, np.floor(np.log2(np.maximum(largest, 1e-9))) + 127, 0).astype(np.uint8)


def misread_pages(x, rule):
    """Keys of the receiving devices where the source's pages are read with tokens before heads."""
    right = importlib.import_module("m3_numpy").GROUPS["exchange"]
    wrong = x | {}
    for name in ("k_shards", "v_shards"):
        shards = x[name]
        devices, pages, heads, tokens, width = shards.shape
        wrong[name] = shards.reshape(devices, pages, tokens, heads, width).transpose(0, 1, 3, 2, 4)
    return right(wrong, rule)["k_shards_after"]


def heads_dealt_in_turn(x, rule):
    """Moved keys of heads 0 and 2 on the first device; new ones are written to the heads that they are of."""
    right = np.concatenate(list(x["k_shards_after"]), axis=1)  # [pages heads tokens width]
    wrong = right[:, [0, 2, 1, 3]].copy()
    for b, t in np.argwhere(x["positions"] >= 0):
        page, offset = x["target_table"][b, x["positions"][b, t] // 4], x["positions"][b, t] % 4
        wrong[page, :, offset] = right[page, :, offset]
    return np.stack([wrong[:, :2], wrong[:, 2:]])


def biased_weights(x, rule):
    scores = np.take_along_axis(x["router_scores"] + x["bias"], x["expert_ids"].astype(int), -1)
    return scores / scores.sum(-1, keepdims=True)


def with_epsilon(x, rule):
    scores = np.take_along_axis(x["router_scores"], x["expert_ids"].astype(int), -1)
    return scores / (scores.sum(-1, keepdims=True) + 1e-20)


def whole_head(x, rule):
    """All 8 dims turned as if `rotary_dim` were the width."""
    normed = x["x"] / np.sqrt((x["x"] ** 2).mean(-1, keepdims=True) + 1e-6) * (1 + x["weight"])
    turned = normed[..., :4] + 1j * normed[..., 4:]
    turned = turned * np.exp(1j * x["positions"][..., None] * 5e6 ** (-np.arange(4) / 4))[:, :, None]
    return np.concatenate([turned.real, turned.imag], axis=-1)[0, x["picked"][:, 0], x["picked"][:, 1]]


def heads_in_order(x, kv):
    """Attention of query heads that read KV heads kv [N], and their blocks."""
    order, operands = np.argsort(kv, kind="stable"), ("k", "v", "positions", "lengths", "blocks")
    attention = importlib.import_module("m3_numpy").attention
    out, _ = attention(x["q"][:, :, order], *(x[name] for name in operands), 4)
    return out[:, :, np.argsort(order)]


def read_on(x, rule):
    """Attention in which every token of a chosen block is read, as far as the row goes."""
    out = np.zeros(x["q"].shape)
    for b, t, n in np.argwhere(np.repeat(x["positions"][..., None] >= 0, 6, axis=-1)):
        seen = np.flatnonzero(np.isin(np.arange(x["lengths"][b]) // 4, x["blocks"][b, n // 3, t]))
        weight = np.exp(x["k"][b, seen, n // 3] @ x["q"][b, t, n] / 4)
        out[b, t, n] = weight @ x["v"][b, seen, n // 3] / weight.sum()
    return out


def without_own(x, rule):
    return np.where(x["blocks"] == (x["positions"] // 4)[:, None, :, None], -1, x["blocks"])


def best_three(x, end):
    """The three best blocks, by stored scores, before `end` of each query's own block."""
    found = np.full(x["blocks"].shape, -1)
    for b, k, t in np.argwhere(np.repeat(x["positions"][:, None] >= 0, 2, axis=1)):
        best = sorted(range(end(x["positions"][b, t] // 4)), key=lambda m: -x["block_scores"][b, k, t, m])[:3]
        found[b, k, t, : len(best)] = best
    return found


def pooled_then_masked(x, rule):
    """Block scores with the tokens after the query in its own block, as far as the row goes."""
    token = np.einsum("btki,bsi->bkts", x["index_q"], np.pad(x["index_k"], [(0, 0), (0, 3), (0, 0)]))
    token = np.where(np.arange(44) < x["lengths"][:, None, None, None], token, -np.inf)
    return np.where(np.isneginf(x["block_scores"]), -np.inf, token.reshape(2, 2, 41, 11, 4).max(-1))


PREFILL = "sparse_attention/prefill"
# Words of the report: the case, the output that is spoilt, and how: written without a look at `vectors/mistakes.py`.
PROVEN = {
    "without alpha, as SiLU (T42)": ("experts/activation", "activated", grid(lambda g, u, top, _: silu(g, u, top, 1))),
    "without its clamps (T42)": ("experts/activation", "activated", grid(lambda g, u, top, a: silu(g, u, 1e9, a))),
    "not above alone (T42)": (
        "experts/activation",
        "activated",
        grid(lambda g, u, top, a: silu(np.maximum(g, -top), u, top, a)),
    ),
    "in the place of up + 1 (T42)": ("experts/activation", "activated", grid(lambda *args: silu(*args, one=0.0))),
    "gate and up are taken for each other (T42)": (
        "experts/activation",
        "activated",
        grid(lambda g, u, top, a: silu(u, g, top, a)),
    ),
    "read as if interleaved (T42)": ("experts/activation", "activated", grid(interleaved_read)),
    "E4M3's last binade (T43)": ("mxfp8/product", "encoded_scales", encoded_without_eight),
    "read as e4m3fnuz": ("float8/kinds", "e4m3fn", lambda x, rule: x["e4m3fnuz"]),
    "read as e5m2 (T44)": ("float8/kinds", "e4m3fn", lambda x, rule: x["e5m2"]),
    "scores with the bias (T45)": ("experts/router_extremes", "expert_weights", biased_weights),
    "1e-20 is added to the sum": ("experts/router_extremes", "expert_weights", with_epsilon),
    "the whole head is turned": ("rotary/many_rows", "rotated_at", whole_head),
    "newest keys are not read (T48)": ("shards/draft_rows", "shard_lse", fewer_keys_by_draft_row),
    "pages are read as [tokens, heads]": ("exchange/resharded_1_to_4", "k_shards_after", misread_pages),
    "device r has heads r, r + R": ("exchange/resharded_4_to_2", "k_shards_after", heads_dealt_in_turn),
    "the own block is missing": (PREFILL, "blocks", without_own),
    "the own block is missing, and one more": (PREFILL, "blocks", lambda x, rule: best_three(x, lambda own: own)),
    "kept only if its score is among the best": (PREFILL, "blocks", lambda x, rule: best_three(x, lambda own: own + 1)),
    "count in its own block's score (T2)": (PREFILL, "block_scores", pooled_then_masked),
    "attention has no causal mask": (PREFILL, "out", read_on),
    "are not divided by the root": (
        PREFILL,
        "lse",
        lambda x, rule: again(x, rule, "sparse_attention", q=4 * x["q"])["lse"],
    ),
    "reads KV head n % K and its blocks": (PREFILL, "out", lambda x, rule: heads_in_order(x, np.arange(6) % 2)),
    "the LSE is in units of log 2": (PREFILL, "lse", lambda x, rule: x["lse"] / np.log(2)),
}


@pytest.mark.parametrize("words", PROVEN)
def test_a_mistake_is_named_where_it_is_proven(words, tmp_path, capsys):
    """T42, T43, T44, T45, T46, T48, T49: the mistake that gives all of an output is named, and no other one is.

    An output that is wrong in one more place gets no such name.
    """
    check_numpy = importlib.import_module("check_numpy")
    label, tensor, plant = PROVEN[words]
    (case,) = (case for case in stored_cases() if f"{case['group']}/{case['name']}" == label)
    stored = check_numpy.read_safetensors(STORED / case["file"])
    wrong = plant({name: array for name, (_, array) in stored.items()}, case["rule"])
    kind = wrong.dtype if wrong.dtype == np.uint8 else np.int32 if tensor == "blocks" else np.float64
    wrong_too = wrong.copy()
    wrong_too[(0,) * wrong.ndim] += 1
    for value, is_named in ((wrong, True), (wrong_too, False)):
        value = np.ascontiguousarray(value.astype(kind))
        (tmp_path / "mine.safetensors").write_bytes(packed({f"{label}/{tensor}": value}))
        assert check_numpy.main([str(STORED), str(tmp_path), "--only", case["group"]]) == 1
        line = capsys.readouterr().out.splitlines()[0]
        named = line.split("; ")[-1]
        assert (words in named) == is_named and " or " not in named, line


@pytest.mark.parametrize("rtol, atol", [(0.0, 0.0), (2e-5, 3e-6), (1.0, 1e300), (1e300, np.inf)])
def test_an_infinity_agrees_with_itself_alone(rtol, atol):
    """Whatever the tolerance allows, and for both checkers: NaN too agrees with NaN alone."""
    tolerance = {"compare": "close", "bfloat16": [rtol, atol]}
    checkers = importlib.import_module("check_numpy").difference, compare.difference
    right = np.array([1.0, np.inf, -np.inf, np.nan])
    for difference in checkers:
        assert difference(right, right, tolerance, "float32") is None
        for place, wrong in ((1, 1e308), (1, -np.inf), (1, np.nan), (2, np.inf), (2, -1.0), (3, np.inf), (0, np.inf)):
            found = right.copy()
            found[place] = wrong
            for a, b in ((right, found), (found, right)):
                said = difference(a, b, tolerance, "float32")
                assert said is not None and said.startswith("1 of 4 numbers differ"), (difference, place, wrong)


def test_a_place_is_named_by_its_axes(tmp_path, capsys):
    check_numpy = importlib.import_module("check_numpy")
    (case,) = (case for case in stored_cases() if case["file"] == "sparse_attention/prefill.safetensors")
    out = read_case(STORED, case)[0]["out"].copy()
    out[1, 7, 4, 2] += 1
    (tmp_path / "mine.safetensors").write_bytes(packed({"sparse_attention/prefill/out": out}))
    assert check_numpy.main([str(STORED), str(tmp_path), "--only", "sparse_attention"]) == 1
    assert "the farthest at b=1 t=7 n=4 h=2: expected" in capsys.readouterr().out


def test_every_group_has_a_planted_bug():
    assert {label.split("/")[0] for label, *_ in PLANTED.values()} == set(GROUPS)


def test_float8_index_keys_choose_other_blocks():
    """A case of float8 index keys in which exact ones choose the same blocks would find nothing."""
    (case,) = (case for case in stored_cases() if case["file"] == "float8/index.safetensors")
    arrays, _ = read_case(STORED, case)
    assert (arrays["blocks"] != arrays["blocks_of_exact_keys"]).any()
