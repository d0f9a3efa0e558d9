"""Writes dumps of an engine with a bug each: `python scripts/plant_bugs.py --out DIR`.

The engine is the golden vectors' float64 numpy model, run on its two prompts with one of its functions replaced; what
it gives is rounded to float32. `python -m m3jax.compare vectors DIR/NAME.safetensors` then says where it parts from the
right one (docs/compare.md).
"""

import argparse
import importlib.util
import math
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
VECTORS = ROOT / "vectors"


def numpy_model():
    """Return a fresh copy of the module m3_numpy, whose functions can be replaced."""
    spec = importlib.util.spec_from_file_location("m3_numpy_with_a_bug", VECTORS / "m3_numpy.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# Each takes the module, the rule and the weights and spoils one of them. If the engine would dump a part of the outputs
# only, it returns the function that takes that part.


def right(m, rule, w):
    """No bug."""


def misread_topk(m, rule, w):
    """A token-major buffer of selections is read head-major (T7)."""

    def misread(blocks):
        rows, heads, tokens, slots = blocks.shape
        return np.ascontiguousarray(blocks.swapaxes(1, 2)).reshape(rows, heads, tokens, slots)

    right = m.attention
    m.attention = lambda q, k, v, positions, lengths, blocks=None, *rest: right(
        q, k, v, positions, lengths, None if blocks is None else misread(blocks), *rest
    )


def one_selection(m, rule, w):
    """All KV heads get the selection of the largest score of any head (T1)."""
    right = m.select
    m.select = lambda scores, *rest: right(np.broadcast_to(scores.max(1, keepdims=True), scores.shape), *rest)


def one_block_more(m, rule, w):
    """The own block is added to the J best instead of taking one of their slots (T3)."""
    right = m.select
    m.select = lambda scores, positions, lengths, rule: right(
        scores, positions, lengths, dict(rule) | {"top_k": rule["top_k"] + 1}
    )


def mask_after_pool(m, rule, w):
    """Tokens after the query count in the score of its own block and of later blocks (T2)."""
    right = m.block_scores

    def unmasked(index_q, index_k, positions, lengths, block_size, score="max"):
        last = (positions // block_size + 1) * block_size - 1
        return right(index_q, index_k, np.minimum(last, lengths[:, None] - 1), lengths, block_size, score)

    m.block_scores = unmasked


def dense_fallback(m, rule, w):
    """Sparse layers attend to every block (T18)."""
    right = m.attention
    m.attention = lambda q, k, v, positions, lengths, blocks=None, *rest: right(
        q, k, v, positions, lengths, None, *rest
    )


def index_keys_left_behind(m, rule, w):
    """Pages of the first 24 tokens come from another engine without their index keys (T16); the dump begins there."""
    right = m.block_scores

    def forgetful(index_q, index_k, *rest):
        kept = np.arange(index_k.shape[1]) >= 24
        return right(index_q, index_k * kept[:, None], *rest)

    m.block_scores = forgetful
    return lambda outputs: {name: array[..., 24:, :] if name.endswith(("blocks", "block_scores")) else array[:, 24:]
                            for name, array in outputs.items()}  # fmt: skip


def unmasked_tail(m, rule, w):
    """Keys behind a row's last token in its last block, left there by the other prompt, are read too (T10)."""

    def attention(q, k, v, positions, lengths, blocks=None, block_size=None, rounded=False):
        out = np.zeros(q.shape)
        size, group = rule["block_size"], q.shape[2] // k.shape[2]
        for b, t, n in np.ndindex(out.shape[:3]):
            seen = np.arange((t // size + 1) * size)
            if blocks is not None:
                seen = seen[np.isin(seen // size, blocks[b, n // group, t])]
            row = np.where(seen <= t, b, 1 - b)
            score = k[row, seen, n // group] @ q[b, t, n] / math.sqrt(q.shape[-1])
            weight = np.exp(score - score.max())
            out[b, t, n] = weight @ v[row, seen, n // group] / weight.sum()
        return out, None

    m.attention = attention


def wrong_page(m, rule, w):
    """A page of the second prompt stands in the table of the first."""
    right, size = m.attention, rule["block_size"]

    def attention(q, k, v, *rest):
        k, v = k.copy(), v.copy()
        k[0, 2 * size : 3 * size], v[0, 2 * size : 3 * size] = k[1, 2 * size : 3 * size], v[1, 2 * size : 3 * size]
        return right(q, k, v, *rest)

    m.attention = attention


def shared_by_steps(m, rule, w):
    """The four queries of a verification step share the first one's selection (T19)."""
    right = m.select

    def select(scores, *rest):
        blocks, *cut = right(scores, *rest)
        return blocks[:, :, np.arange(blocks.shape[2]) // 4 * 4], *cut

    m.select = select


def float8_index(m, rule, w):
    """Index keys are kept in float8_e4m3fn, which changes scores and blocks (T26)."""
    right = m.block_scores
    m.block_scores = lambda index_q, index_k, *rest: right(index_q, m.to_e4m3(index_k), *rest)


def scale_forgotten(m, rule, w):
    """Keys are kept as float8 numbers divided by 1/4, and read without that scale."""
    right = m.attention
    m.attention = lambda q, k, *rest: right(q, m.to_e4m3(4 * k), *rest)


def merged_unweighted(m, rule, w):
    """Partial outputs of two devices are averaged, without the weights that their LSEs give them."""
    right = m.attention

    def attention(q, k, v, positions, lengths, blocks=None, *rest):
        if blocks is None:
            return right(q, k, v, positions, lengths, None, *rest)
        parts = [right(q, k, v, positions, lengths, np.where(blocks % 2 == i, blocks, -1), *rest)[0] for i in (0, 1)]
        return sum(parts) / 2, None

    m.attention = attention


def bias_in_weights(m, rule, w):
    """The routing bias counts in the experts' weights, not in the choice alone."""
    right = m.experts

    def experts(x, rule):
        scale = 1 / (1 + np.exp(-(x["x"] @ x["gate"]))) + x["bias"]
        ids = right(x, rule)["expert_ids"]
        weights = np.take_along_axis(scale, ids, -1)
        weights /= weights.sum(-1, keepdims=True)
        rows = range(len(ids))
        expert = lambda t, e: m.mlp(x["x"][t], *(x[f"{part}_proj"][e] for part in ("gate", "up", "down")), rule)
        routed = np.stack([sum(weights[t, i] * expert(t, ids[t, i]) for i in range(ids.shape[1])) for t in rows])
        shared = m.mlp(x["x"], *(x[f"shared_{part}_proj"] for part in ("gate", "up", "down")), rule)
        return {"expert_ids": ids, "expert_weights": weights, "out": rule["routed_scaling_factor"] * routed + shared}

    m.experts = experts


def no_clamp(m, rule, w):
    """SwiGLU lacks its clamps."""
    rule["limit"] = 1e9


def no_factor(m, rule, w):
    """The routed sum lacks its factor."""
    rule["routed_scaling_factor"] = 1.0


def rope_interleaved(m, rule, w):
    """RoPE turns dims (2i, 2i + 1) instead of (i, i + half)."""
    right, half = m.rope, rule["rotary_dim"] // 2

    def rope(x, *rest):
        order = np.array([*np.arange(2 * half).reshape(half, 2).T.reshape(-1), *range(2 * half, x.shape[-1])])
        return right(x[..., order], *rest)[..., np.argsort(order)]

    m.rope = rope


def norm_without_one(m, rule, w):
    """Norms of heads multiply with w where 1 + w is meant."""
    for name in w:
        if name.endswith(("q_norm.weight", "k_norm.weight")):
            w[name] = w[name] - 1


def scale_byte_off(m, rule, w):
    """An MXFP8 scale is its neighbour's: a power of two too much on the shared expert's down_proj."""
    name = "language_model.model.layers.1.block_sparse_moe.shared_experts.down_proj.weight"
    w[name] = 2 * w[name]


def taps_off_by_one(m, rule, w):
    """The draft reads the inputs of layers 1, 2, 3 instead of their outputs."""
    rule["taps"] = [layer - 1 for layer in rule["taps"]]


def selection_of_before(m, rule, w):
    """A layer attends to the blocks that the one before it chose (T25)."""
    right, before = m.select, []

    def select(*args):
        before.append(right(*args))
        return before[max(len(before) - 2, 0)]

    m.select = select


BUGS = (
    right, misread_topk, index_keys_left_behind, unmasked_tail, float8_index, taps_off_by_one, dense_fallback,
    one_selection, one_block_more, mask_after_pool, wrong_page, shared_by_steps, scale_forgotten, merged_unweighted,
    bias_in_weights, no_clamp, rope_interleaved, norm_without_one, scale_byte_off, selection_of_before, no_factor,
)  # fmt: skip


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, metavar="DIR", required=True, help="a folder for the dumps")
    names = [bug.__name__ for bug in BUGS]
    parser.add_argument("--only", metavar="NAME", action="append", choices=names, help=f"one of {', '.join(names)}")
    args = parser.parse_args(argv)
    from m3jax.files.tensors import packed, unpacked
    from m3jax.vectors.files import read_case, read_manifest

    (case,) = (case for case in read_manifest(VECTORS)["cases"] if case["group"] == "model")
    x = {"tokens": read_case(VECTORS, case)[0]["tokens"].astype(int)}
    weights = VECTORS / case["model"] / "model.safetensors"
    hub = {name: array.astype(float) for name, array in unpacked(weights.read_bytes(), str(weights)).items()}
    args.out.mkdir(parents=True, exist_ok=True)
    for bug in BUGS:
        if args.only and bug.__name__ not in args.only:
            continue
        module, rule, weights = numpy_model(), dict(case["rule"]), dict(hub)
        part = bug(module, rule, weights)
        outputs = module.model(x, rule | {"weights": weights}) | x
        outputs = outputs | {"positions": np.broadcast_to(np.arange(44), (2, 44))} if part else outputs
        outputs = part(outputs) if part else outputs
        kind = lambda array: np.int32 if array.dtype.kind == "i" else np.float32
        dump = {name: np.ascontiguousarray(array.astype(kind(array))) for name, array in outputs.items()
                if not name.endswith(("last_kept", "first_dropped"))}  # fmt: skip
        (args.out / f"{bug.__name__}.safetensors").write_bytes(packed(dump))


if __name__ == "__main__":
    main()
