"""Checks every GPU kernel against a float64 reference on this machine's GPU: `python scripts/gpu_check.py`.

Prints one line for each op and shape, and exits 1 if any failed. `--model` adds a whole model with kernels against the
same model with XLA: logits of a forward pass, and tokens from the engine. `--invariant` instead checks that a request
has the same bits alone, in batches, drafted and in training (`gpu_checks/invariant.py`). `--small` takes one small
shape an op, for `compute-sanitizer --target-processes application-only python scripts/gpu_check.py --small`; with
`--invariant` it needs no GPU.
"""

import argparse
import itertools
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from gpu_checks.experts import EXPERTS, FEW_EXPERTS, MXFP8_EXPERTS, OUT, check_experts
from gpu_checks.invariant import check as check_invariant
from gpu_checks.model import FORWARD, PROMPTS, check_forward, check_tokens
from gpu_checks.mxfp8 import MXFP8_PAIRS, PROJECT, check_mxfp8_experts, check_mxfp8_project
from gpu_checks.ordered import HEADS, ORDERED, check_heads, check_ordered
from gpu_checks.repeat import twice
from gpu_checks.step import (
    NORMS,
    PRODUCTS,
    ROUTERS,
    SHARED,
    check_norm,
    check_products,
    check_router,
    check_shared,
)
from gpu_checks.vision import cases as vision_cases

from m3jax.parallel import parse_mesh
from pallas_kernels.cudnn_causal import cudnn_causal
from pallas_kernels.dense_causal import dense_causal
from pallas_kernels.dense_decode import dense_decode
from pallas_kernels.index_topk import index_topk
from pallas_kernels.index_topk_decode import index_topk_decode
from pallas_kernels.pages import paged
from pallas_kernels.qk_norm_rope_insert import Projected, qk_norm_rope_insert
from pallas_kernels.sparse_decode import sparse_decode
from pallas_kernels.sparse_prefill import sparse_prefill

E4M3 = jnp.float8_e4m3fn
LSE, GAP = 1e-3, 5e-3
# batch, queries, context, query heads, KV heads, slots; width and block where they are not 128. Ragged rows, chunks,
# groups that are no power of two.
PREFILL = [
    (1, 4096, 4096, 64, 4, 16), (2, 700, 3001, 64, 4, 16), (1, 129, 257, 16, 1, 4), (3, 65, 2049, 12, 2, 8),
    (1, 2048, 20000, 32, 2, 32), (4, 33, 385, 64, 4, 16), (1, 1000, 5000, 4, 4, 16), (2, 1, 1500, 64, 4, 5),
    (2, 700, 3001, 64, 4, 16, 64, 64), (1, 129, 2049, 12, 2, 5, 64, 128), (2, 300, 1001, 12, 2, 8, 128, 64),
]  # fmt: skip
DECODE = [
    (1, 1, 131072, 64, 4, 16), (8, 1, 9001, 64, 4, 16), (8, 4, 20000, 64, 4, 16), (3, 16, 2049, 12, 2, 8),
    (32, 1, 4000, 16, 1, 16), (2, 5, 127, 64, 4, 16), (1, 2, 300000, 32, 2, 32), (5, 7, 1025, 4, 4, 4),
    (8, 4, 9001, 64, 4, 16, 64, 64), (3, 1, 2049, 12, 2, 5, 64, 128), (32, 1, 1001, 64, 4, 8, 128, 64),
]  # fmt: skip
CUDNN = [(2, 1024, 1024, 64, 4, 16), (3, 300, 300, 16, 2, 16), (1, 2000, 2000, 32, 4, 16), (2, 130, 130, 12, 2, 16)]
ALONE = ("cudnn_causal", "forward", "greedy tokens", "vision attention", "vision tower")
SMALL = 3  # the shape of each list for `--small`
ROWS = 48  # queries of a row that the reference computes


class Inputs:
    """Fresh random operands of a shape: shuffled pages, NaN wherever nothing may look, rows of many lengths."""

    def __init__(self, shape, dtype, *, seed: int, stored=None):
        self.shape, self.dtype, self.stored = shape, dtype, stored or dtype
        self.B, self.T, self.S, self.N, self.K, self.J = shape[:6]
        self.H, self.P = shape[6:] or (128, 128)
        self.rng = np.random.default_rng(seed)
        self.M = -(-self.S // self.P)
        self.lengths = np.full(self.B, self.S)
        self.lengths[1:] = self.rng.integers(0, self.S + 1, self.B - 1)
        start = np.maximum(self.lengths - self.rng.integers(self.T, self.T + 3, self.B), 0)
        start[0] = self.S - self.T
        self.positions = start[:, None] + np.arange(self.T)
        pages = self.B * self.M + 5
        self.table = self.rng.permutation(pages)[: self.B * self.M].reshape(self.B, self.M)
        self.q = self.normal(self.B, self.T, self.N, self.H)
        self.index_q = self.normal(self.B, self.T, self.K, self.H)
        self.k, self.v = self.pool(pages, self.K), self.pool(pages, self.K)
        # What stored keys and values of each head are multiplied with.
        self.scales = 2.0 ** self.rng.integers(-2, 2, (2, self.K)) if stored else np.ones((2, self.K))
        self.index_k = self.pool(pages, 1)[:, 0]

    def normal(self, *shape):
        key = jax.random.key(int(self.rng.integers(2**31)))
        return jax.random.normal(key, shape, jnp.float32).astype(self.dtype)

    def pool(self, pages: int, heads: int):
        """Pages in which everything that no row holds is NaN."""
        held = np.zeros((pages, self.P), bool)
        held[self.table] = (np.arange(self.M * self.P) < self.lengths[:, None]).reshape(self.B, self.M, self.P)
        values = self.normal(pages, heads, self.P, self.H).astype(self.stored)
        return jnp.where(jnp.asarray(held)[:, None, :, None], values, jnp.asarray(jnp.nan, self.stored))

    def pages(self, pool):
        return paged(pool, jnp.asarray(self.table, jnp.int32))

    @property
    def at(self):
        return jnp.asarray(self.positions, jnp.int32), jnp.asarray(self.lengths, jnp.int32)

    def sample(self):
        """(row, query) pairs that the reference computes: the first, the last, and some between."""
        queries = np.unique(np.append(self.rng.integers(0, self.T, ROWS // self.B + 1), [0, self.T - 1]))
        return list(itertools.product(range(self.B), queries))

    def row(self, pool, b: int) -> np.ndarray:
        """A row's tokens in float64: `[..., S H]`."""
        x = np.asarray(pool[self.table[b]].astype(jnp.float32), np.float64)
        x = np.moveaxis(x, 0, -3)
        return x.reshape(*x.shape[:-3], -1, self.H)[..., : self.lengths[b], :]

    def selection(self):
        """Random blocks, the own one last; some slots unused."""
        out = np.full((self.B, self.K, self.T, self.J), -1, np.int32)
        for b, k, t in np.ndindex(out.shape[:3]):
            own = self.positions[b, t] // self.P
            if self.positions[b, t] < self.lengths[b]:
                chosen = self.rng.choice(own, min(self.J - 1, own), replace=False) if own else []
                out[b, k, t, : len(chosen) + 1] = np.append(np.sort(chosen), own)
        return out


def check_index(x: Inputs, op) -> dict[str, float]:
    fn = jax.jit(lambda q, k, *at: op(q, x.pages(k), *at, top_k=x.J, backend="triton"))
    (got,), same = twice(fn, x.index_q, x.index_k, *x.at)
    worst, ok = 0.0, same
    rows = {}
    for b, t in x.sample():
        keys = rows.setdefault(b, x.row(x.index_k, b))
        for head in range(x.K):
            ids = got[b, head, t]
            position = x.positions[b, t]
            if position >= x.lengths[b]:
                ok &= bool((ids == -1).all())
                continue
            own = position // x.P
            count = min(x.J, own + 1)
            kept = ids[:count]
            ok &= bool((ids[count:] == -1).all() and (np.diff(kept) > 0).all() and kept[-1] == own and kept[0] >= 0)
            scores = keys[: own * x.P] @ np.asarray(x.index_q[b, t, head].astype(jnp.float32), np.float64)
            best = scores.reshape(own, x.P).max(-1) if own else np.zeros(0)
            dropped = np.setdiff1d(np.arange(own), kept)
            if len(dropped) and count > 1:
                worst = max(worst, best[dropped].max() - best[kept[:-1]].min())
    return {"gap": worst, "ok": ok and worst <= (1e-4 if x.dtype == jnp.float32 else GAP)}


def reference(x: Inputs, k_pool, v_pool, blocks, b, t, rows):
    """(out [N H], lse [N]) in float64 of one query; blocks None is dense."""
    keys, values = rows.setdefault(b, (x.row(k_pool, b), x.row(v_pool, b)))
    scale = x.scales * [[x.H**-0.5], [1.0]]
    q = np.asarray(x.q[b, t].astype(jnp.float32), np.float64).reshape(x.K, -1, x.H)
    token = np.arange(min(x.positions[b, t] + 1, x.lengths[b]))
    out, lse = [], []
    for head in range(x.K):
        seen = token if blocks is None else token[np.isin(token // x.P, blocks[b, head, t])]
        s = q[head] @ keys[head, seen].T * scale[0, head]
        top = s.max(-1, keepdims=True)
        p = np.exp(s - top)
        out.append(p @ values[head, seen] / p.sum(-1, keepdims=True) * scale[1, head])
        lse.append(top[:, 0] + np.log(p.sum(-1)))
    return np.concatenate(out), np.concatenate(lse)


def check_attention(x: Inputs, op, dense: bool = False) -> dict[str, float]:
    blocks = None if dense else x.selection()
    chosen = () if dense else (jnp.asarray(blocks),)
    how = {} if x.stored == x.dtype else dict(scales=tuple(jnp.asarray(x.scales, jnp.float32)))
    how |= dict(return_lse=True, backend="triton")
    fn = jax.jit(lambda q, k, v, *rest: op(q, x.pages(k), x.pages(v), *rest, **how))
    (out, lse), ok = twice(fn, x.q, x.k, x.v, *chosen, *x.at)
    return compare(x, blocks, out, lse, ok)


def compare(x: Inputs, blocks, out, lse, ok) -> dict[str, float]:
    out = np.asarray(out, np.float64)
    ok &= bool(np.isfinite(out).all())
    error, norm, worst, rows = 0.0, 0.0, 0.0, {}
    for b, t in x.sample():
        if x.positions[b, t] >= x.lengths[b]:
            ok &= not out[b, t].any() and (lse is None or bool(np.isneginf(lse[b, t]).all()))
            continue
        want, want_lse = reference(x, x.k, x.v, blocks, b, t, rows)
        error += ((out[b, t] - want) ** 2).sum()
        norm += (want**2).sum()
        if lse is not None:
            worst = max(worst, np.abs(lse[b, t] - want_lse).max())
    error = (error / norm) ** 0.5
    limit = 2e-5 if x.dtype == jnp.float32 else OUT
    return {"error": error, "lse": worst, "ok": ok and error < limit and worst < LSE}


def check_cudnn(x: Inputs) -> dict[str, float]:
    x.positions = np.broadcast_to(np.arange(x.T), (x.B, x.T))
    x.lengths = np.minimum(x.lengths, x.T)
    own = lambda pool: jnp.stack([jnp.asarray(pool[x.table[b]]).swapaxes(0, 1).reshape(x.K, -1, x.H)[:, : x.T]
                                  for b in range(x.B)]).swapaxes(1, 2)  # fmt: skip
    args = x.q, jnp.nan_to_num(own(x.k)), jnp.nan_to_num(own(x.v)), x.at[1]
    (out,), ok = twice(jax.jit(cudnn_causal), *args)
    return compare(x, None, out, None, ok)


def check_insert(x: Inputs) -> dict[str, float]:
    """Against the same operations in float32, and that no other slot changed."""
    f32 = lambda *shape: jax.random.normal(jax.random.key(int(x.rng.integers(2**31))), shape, jnp.float32)
    new = Projected(f32(x.B, x.T, x.N, x.H), f32(x.B, x.T, x.K, x.H), f32(x.B, x.T, x.K, x.H),
                    f32(x.B, x.T, x.K, x.H), f32(x.B, x.T, x.H))  # fmt: skip
    norms = Projected(f32(x.H), f32(x.H), None, f32(x.H), f32(x.H))
    angle = f32(x.B, x.T, 32)
    cos, sin = jnp.cos(angle), jnp.sin(angle)

    def rotate(y, weight):
        y = y * jax.lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + 1e-6) * (1.0 + weight)
        c, s = (z.reshape(x.B, x.T, *[1] * (y.ndim - 3), 32) for z in (cos, sin))
        a, b = y[..., :32], y[..., 32:64]
        return jnp.concatenate([a * c - b * s, b * c + a * s, y[..., 64:]], -1).astype(x.dtype)

    fn = jax.jit(lambda new, k, v, i, *at: qk_norm_rope_insert(
        new, norms, cos, sin, *at, x.pages(k), x.pages(v), x.pages(i), eps=1e-6, dtype=x.dtype,
        backend="triton"))  # fmt: skip
    got, ok = twice(fn, new, x.k, x.v, x.index_k, *x.at)
    b, t = np.nonzero(x.positions < x.lengths[:, None])
    page, slot = x.table[b, x.positions[b, t] // x.P], x.positions[b, t] % x.P
    put = lambda pool, y: pool.at[page, :, slot].set(y[b, t].astype(x.dtype))
    index = x.index_k.at[page, slot].set(rotate(new.index_k, norms.index_k)[b, t])
    want = (rotate(new.q, norms.q), rotate(new.index_q, norms.index_q), put(x.k, rotate(new.k, norms.k)),
            put(x.v, new.v), index)  # fmt: skip
    error = 0.0
    for a, c in zip(got, want, strict=True):
        a, c = np.asarray(a, np.float32).ravel(), np.asarray(c.astype(jnp.float32)).ravel()
        ok &= bool((np.isnan(a) == np.isnan(c)).all())
        error = max(error, np.linalg.norm(np.nan_to_num(a - c)) / np.linalg.norm(np.nan_to_num(c)))
    return {"error": error, "ok": ok and error < (1e-6 if x.dtype == jnp.float32 else 1e-3)}


def cases(small: bool):
    """(name, shape, dtype, check of a seed): every op at every shape in bfloat16, and at some in other dtypes."""
    dense = lambda x: check_attention(x, lambda *a, **o: dense_causal(*a, kv_heads=x.K, **o), dense=True)
    prefill = {
        "index_topk": lambda x: check_index(x, index_topk),
        "query_union": lambda x: check_attention(x, partial(sparse_prefill, schedule="query_union")),
        "kv_block_major": lambda x: check_attention(x, partial(sparse_prefill, schedule="kv_block_major")),
        "sparse_prefill": lambda x: check_attention(x, sparse_prefill),
        "dense_causal": dense,
        "insert": check_insert,
    }
    decode = {
        "index_topk_decode": lambda x: check_index(x, index_topk_decode),
        "sparse_decode": lambda x: check_attention(x, sparse_decode),
        "dense_decode": lambda x: check_attention(x, lambda *a, **o: dense_decode(*a, kv_heads=x.K, **o), dense=True),
    }
    drawn = lambda check: lambda *inputs, **stored: check(Inputs(*inputs, **stored))
    ops = [(name, PREFILL, drawn(check)) for name, check in prefill.items()]
    ops += [(name, DECODE, drawn(check)) for name, check in decode.items()]
    ops += [("grouped_experts", EXPERTS, check_experts), ("cudnn_causal", CUDNN, drawn(check_cudnn))]
    few = [(*shape, None) for shape in FEW_EXPERTS]
    ops += [("few_experts", few, check_experts), ("mxfp8_experts", MXFP8_EXPERTS, check_mxfp8_experts)]
    ops += [("mxfp8_pairs", MXFP8_PAIRS, check_mxfp8_experts), ("mxfp8_project", PROJECT, check_mxfp8_project)]
    ops += [("ordered_project", ORDERED, check_ordered), ("qk_norm_rope", HEADS, check_heads)]
    ops += [("stacked_project", PRODUCTS, check_products), ("few_experts, shared", SHARED, check_shared)]
    ops += [("add_norm", NORMS, check_norm), ("choose_experts", ROUTERS, check_router)]
    for name, shapes, check in ops:
        for shape in [shapes[SMALL]] if small else shapes:
            yield name, shape, jnp.bfloat16, partial(check, shape, jnp.bfloat16)
        some = () if small or shapes is CUDNN else (shapes[0], shapes[SMALL])
        others = (jnp.float16,) if "mxfp8" in name else (jnp.float16, jnp.float32)
        for shape, dtype in itertools.product(some, others):
            yield name, shape, dtype, partial(check, shape, dtype)
    for name, check in decode.items():
        wide = [] if small else [(shape, jnp.float32) for shape in (DECODE[0], DECODE[SMALL])]
        for shape, dtype in [(shape, jnp.bfloat16) for shape in (DECODE[:1] if small else DECODE)] + wide:
            yield f"{name}, e4m3", shape, dtype, partial(drawn(check), shape, dtype, stored=E4M3)
    yield from vision_cases(small)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--only", nargs="+", default=[""], help="check ops, or looks at invariance, whose name contains one of these"
    )
    parser.add_argument("--model", action="store_true", help="also check a whole model")
    parser.add_argument("--invariant", action="store_true", help="check the invariant mode, and nothing else")
    parser.add_argument("--mesh", help="GPUs of the model with kernels, like expert=2,tensor=2")
    parser.add_argument("--small", action="store_true", help="one small shape an op")
    parser.add_argument("--jobs", type=int, default=4, help="checks at a time")
    parser.add_argument("--seed", type=int, default=int.from_bytes(np.random.default_rng().bytes(3), "big"))
    args = parser.parse_args()
    if jax.default_backend() != "gpu" and not (args.invariant and args.small):
        print(f"error: jax runs on {jax.default_backend()!r} here: this needs an NVIDIA GPU and jax[cuda13]")
        return 2
    try:
        mesh = parse_mesh(args.mesh) if args.mesh else None
    except ValueError as error:
        parser.error(str(error))
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}, seed {args.seed}")
    if args.invariant:
        failures = check_invariant(args.small, args.seed, args.jobs, args.only)
        print(f"{failures} failed" if failures else "all passed")
        return 1 if failures else 0
    print(f"{'op':24} {'B, T, S, N, K, J, H, P':34} {'dtype':9} result")
    work = [(name, shape, jnp.dtype(dtype).name, partial(check, seed=args.seed + i))
            for i, (name, shape, dtype, check) in enumerate(cases(args.small))]  # fmt: skip
    for dtype in ("float32", "bfloat16") if args.model else ():
        work.append(("forward", FORWARD, dtype, partial(check_forward, dtype, args.seed, mesh)))
        work.append(("greedy tokens", PROMPTS, dtype, partial(check_tokens, dtype, args.seed, mesh)))
    work = [job for job in work if any(part in job[0] for part in args.only)]
    # Most of the time is the compiler's, and the reference's in numpy: several checks share one GPU. Not where cuDNN
    # takes part: what another thread does spoils the graph that it captures.
    together, alone = ([job for job in work if (job[0] in ALONE) == flag] for flag in (False, True))
    with ThreadPoolExecutor(args.jobs) as pool:
        failures = sum(not ok for ok in pool.map(lambda job: report(*job), together))
    failures += sum(not report(*job) for job in alone)
    print(f"{failures} failed" if failures else "all passed")
    return 1 if failures else 0


def report(name, shape, dtype, fn) -> bool:
    try:
        result = fn()
    except Exception as error:  # one op that does not compile must not hide the others
        result = {"ok": False, type(error).__name__: str(error).split("\n")[0][:100]}
    ok = bool(result.pop("ok"))
    numbers = " ".join(f"{k} {v:.1e}" if isinstance(v, float | np.floating) else f"{k}: {v}" for k, v in result.items())
    print(f"{name:24} {', '.join(map(str, shape)):34} {dtype:9} {'ok    ' if ok else 'FAILED'} {numbers}", flush=True)
    return ok


if __name__ == "__main__":
    sys.exit(main())
