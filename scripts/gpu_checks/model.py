"""The part of `gpu_check.py --model`: a whole model with kernels against the same model with XLA."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from m3jax import M3Config
from m3jax.decoding import Engine, Params, Sampling
from m3jax.model import M3, init

NEW_TOKENS = 64
FORWARD = (2, 5000)  # rows, tokens: more than 16 blocks, so that selection is partial; the second row is shorter
PROMPTS = (5000, 2100, 700)
ERROR = {"float32": 1e-3, "bfloat16": 5e-2}  # of a token's logits
# Tokens that may have more: where two blocks or experts score alike, rounding can swap them.
CHANGED = {"float32": 1e-3, "bfloat16": 0.1}
GAP = {"float32": 1e-3, "bfloat16": 5e-2}  # in standard deviations of a token's logits


def build(dtype: str, mesh: Mesh | None = None) -> M3:
    """M3's heads, blocks and experts per token in four narrow layers, one of them dense; random weights."""
    full = M3Config.m3()
    layers = slice(full.layer_types.index("minimax_m3_sparse") - 1, None)
    config = dataclasses.replace(
        full, num_hidden_layers=4, hidden_size=1024, intermediate_size=256, dense_intermediate_size=2048,
        shared_intermediate_size=256, num_local_experts=16, vocab_size=4096, vision_config=None, eos_token_id=(),
        bos_token_id=None, layer_types=full.layer_types[layers][:4], mlp_layer_types=full.mlp_layer_types[layers][:4],
    )  # fmt: skip
    return init(config, 0, dtype, mesh)


def _pair(dtype: str, mesh: Mesh | None) -> tuple[M3, M3]:
    """The same weights with kernels, on the mesh if there is one, and with XLA's programs on one GPU."""
    one = build(dtype)
    return (build(dtype, mesh) if mesh else one).with_backend("triton"), one.with_backend("xla")


def check_forward(dtype: str, seed: int, mesh: Mesh | None = None) -> dict:
    """Logits of whole rows, and how many choices of the first sparse layer differ."""
    models = _pair(dtype, mesh)
    tokens = _tokens(seed, *FORWARD)
    lengths = jnp.array([FORWARD[1], FORWARD[1] * 2 // 3], jnp.int32)
    run = jax.jit(_forward)
    (mine, blocks), (theirs, others) = (run(model, tokens, lengths) for model in models)
    valid = np.arange(FORWARD[1]) < np.asarray(lengths)[:, None]
    mine, theirs = (np.asarray(x, np.float64)[valid] for x in (mine, theirs))
    error = np.linalg.norm(mine - theirs, axis=-1) / np.linalg.norm(theirs, axis=-1)
    same = (np.asarray(blocks) == np.asarray(others)).all(-1).swapaxes(1, 2)[valid]
    changed, choices = float(np.mean(error > ERROR[dtype])), f"{np.sum(~same)} of {same.size}"
    ok = bool(np.isfinite(mine).all()) and changed <= CHANGED[dtype]
    return {"median error": float(np.median(error)), "changed": changed, "other blocks": choices, "ok": ok}


def _forward(model: M3, tokens, lengths):
    logits = model(tokens, lengths=lengths)
    kept = model.trunk(tokens, lengths=lengths, probe=lambda values, _: values.get("blocks"))[2]
    return logits, next(blocks for blocks in kept if blocks is not None)[0]


def check_tokens(dtype: str, seed: int, mesh: Mesh | None = None) -> dict:
    """Greedy tokens of an engine: in float32 the same; in bfloat16 few that XLA finds much worse than its best."""
    models = dict(zip(("triton", "xla"), _pair(dtype, mesh), strict=True))
    prompts = [np.asarray(_tokens(seed + 1 + i, 1, n))[0].tolist() for i, n in enumerate(PROMPTS)]
    served = {name: _serve(model, prompts) for name, model in models.items()}
    gaps = _gaps(models["xla"], prompts, served["triton"])
    changed = float(np.mean(gaps > GAP[dtype]))
    same = float(np.mean(np.array(served["triton"]) == np.array(served["xla"])))
    ok = changed <= CHANGED[dtype] and (dtype != "float32" or same == 1.0)
    return {"worst gap": float(gaps.max()), "changed": changed, "same tokens": same, "ok": ok}


def _serve(model: M3, prompts: list[list[int]]) -> list[tuple[int, ...]]:
    pages = sum(-(-(len(p) + NEW_TOKENS) // model.config.index_block_size) + 1 for p in prompts)
    engine = Engine(model, pages=pages, max_batch=4, prefill_chunk=1024, steps_per_call=16,
                    max_length=max(PROMPTS) + NEW_TOKENS)  # fmt: skip
    engine.warmup()
    params = Params(max_new_tokens=NEW_TOKENS, sampling=Sampling.greedy())
    handles = [engine.add(p, params) for p in prompts]
    engine.run()
    return [engine.result(handle).tokens for handle in handles]


def _gaps(model: M3, prompts: list[list[int]], new: list[tuple[int, ...]]) -> np.ndarray:
    """Return how far each new token's logit lies below XLA's best, in standard deviations of the logits."""
    rows = np.zeros((len(prompts), max(PROMPTS) + NEW_TOKENS), np.int32)
    for row, prompt, tokens in zip(rows, prompts, new, strict=True):
        row[: len(prompt) + NEW_TOKENS] = [*prompt, *tokens]
    last = np.array(PROMPTS)[:, None] - 1 + np.arange(NEW_TOKENS)
    run = jax.jit(lambda m, t, n: jnp.take_along_axis(m.hidden(t, lengths=n)[0], last[..., None], axis=1))
    hidden = run(model, jnp.asarray(rows), jnp.array(PROMPTS) + NEW_TOKENS)
    logits = np.asarray(model.unembed(hidden), np.float64)
    chosen = np.take_along_axis(logits, np.array(new)[..., None], axis=2)[..., 0]
    return (logits.max(-1) - chosen) / logits.std(-1)


def _tokens(seed: int, rows: int, length: int):
    return jnp.asarray(np.random.default_rng(seed).integers(0, 4096, (rows, length), np.int32))
