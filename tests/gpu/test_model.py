"""A whole model with kernels, on one GPU and on several, against the same model with XLA's programs on one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.on_gpu import narrow_model, random_tokens

from m3jax.decoding import Engine, Params, Sampling
from m3jax.model import M3
from m3jax.parallel import parse_mesh

NEW_TOKENS = 64
FORWARD = (2, 5000)  # rows, tokens: more than 16 blocks, so that selection is partial; the second row is shorter
PROMPTS = (5000, 2100, 700)
ERROR = {"float32": 1e-3, "bfloat16": 5e-2}  # of a token's logits
# Tokens that may have more: where two blocks or experts score alike, rounding can swap them.
CHANGED = {"float32": 1e-3, "bfloat16": 0.1}
GAP = 5e-2  # in standard deviations of a token's logits

both_dtypes = pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
MESHES = ("", "expert=2", "context=2", "tensor=2", "expert=2,tensor=2")


def with_and_without_kernels(dtype: str, mesh: str, backend: str) -> tuple[M3, M3]:
    """The same weights with kernels, on the mesh if there is one, and with XLA's programs on one GPU."""
    sizes = [int(axis.split("=")[1]) for axis in mesh.split(",")] if mesh else []
    if (count := int(np.prod(sizes, dtype=int))) > jax.device_count():
        pytest.skip(f"needs {count} GPUs")
    one = narrow_model(dtype)
    return (narrow_model(dtype, parse_mesh(mesh)) if mesh else one).with_backend(backend), one.with_backend("xla")


@pytest.mark.parametrize("mesh", MESHES)
@both_dtypes
def test_logits_of_whole_rows_are_those_of_xla(dtype, mesh, backend, seed):
    models = with_and_without_kernels(dtype, mesh, backend)
    tokens = random_tokens(seed, *FORWARD)
    lengths = jnp.array([FORWARD[1], FORWARD[1] * 2 // 3], jnp.int32)
    run = jax.jit(logits_and_blocks)
    (mine, blocks), (theirs, others) = (run(model, tokens, lengths) for model in models)
    valid = np.arange(FORWARD[1]) < np.asarray(lengths)[:, None]
    mine, theirs = (np.asarray(x, np.float64)[valid] for x in (mine, theirs))
    assert np.isfinite(mine).all(), "a logit is not finite"
    error = np.linalg.norm(mine - theirs, axis=-1) / np.linalg.norm(theirs, axis=-1)
    same = (np.asarray(blocks) == np.asarray(others)).all(-1).swapaxes(1, 2)[valid]
    changed = float(np.mean(error > ERROR[dtype]))
    assert changed <= CHANGED[dtype], (
        f"{changed:.1e} of the tokens have other logits (median error {np.median(error):.1e}); "
        f"in the first sparse layer {np.sum(~same)} of {same.size} choices of blocks differ"
    )


def logits_and_blocks(model: M3, tokens, lengths):
    """Return the logits, and the blocks that the first sparse layer chose."""
    logits = model(tokens, lengths=lengths)
    out = model.run(tokens, lengths=lengths, probe=lambda values, _: values.get("blocks"), logits=False)
    return logits, next(blocks for blocks in out.probed if blocks is not None)[0]


@pytest.mark.parametrize("mesh", [*MESHES, "data=2"])
@both_dtypes
def test_greedy_tokens_are_those_of_xla(dtype, mesh, backend, seed):
    """In float32 the same; in bfloat16 few that XLA finds much worse than its best."""
    models = with_and_without_kernels(dtype, mesh, backend)
    prompts = [np.asarray(random_tokens(seed + 1 + i, 1, n))[0].tolist() for i, n in enumerate(PROMPTS)]
    mine = np.array(serve(models[0], prompts))
    if dtype == "float32":
        theirs = np.array(serve(models[1], prompts))
        assert np.array_equal(mine, theirs), f"{np.mean(mine != theirs):.1e} of the tokens are others than XLA's"
    else:
        gaps = gaps_to_best(models[1], prompts, mine)
        changed = float(np.mean(gaps > GAP))
        assert changed <= CHANGED[dtype], f"{changed:.1e} of the tokens lie below XLA's best, at worst {gaps.max():.1e}"


def serve(model: M3, prompts: list[list[int]]) -> list[tuple[int, ...]]:
    pages = sum(-(-(len(p) + NEW_TOKENS) // model.config.index_block_size) + 1 for p in prompts)
    engine = Engine(model, pages=pages, max_batch=4, prefill_chunk=1024, steps_per_call=16,
                    max_length=max(PROMPTS) + NEW_TOKENS)  # fmt: skip
    engine.warmup()
    params = Params(max_new_tokens=NEW_TOKENS, sampling=Sampling.greedy())
    handles = [engine.add(p, params) for p in prompts]
    engine.run()
    return [engine.result(handle).tokens for handle in handles]


def gaps_to_best(model: M3, prompts: list[list[int]], new: np.ndarray) -> np.ndarray:
    """Return how far each new token's logit lies below the model's best, in standard deviations of the logits."""
    rows = np.zeros((len(prompts), max(PROMPTS) + NEW_TOKENS), np.int32)
    for row, prompt, tokens in zip(rows, prompts, new, strict=True):
        row[: len(prompt) + NEW_TOKENS] = [*prompt, *tokens]
    last = np.array(PROMPTS)[:, None] - 1 + np.arange(NEW_TOKENS)
    run = jax.jit(lambda m, t, n: jnp.take_along_axis(m.hidden(t, lengths=n)[0], last[..., None], axis=1))
    hidden = run(model, jnp.asarray(rows), jnp.array(PROMPTS, jnp.int32) + NEW_TOKENS)
    logits = np.asarray(model.unembed(hidden), np.float64)
    chosen = np.take_along_axis(logits, new[..., None], axis=2)[..., 0]
    return (logits.max(-1) - chosen) / logits.std(-1)
