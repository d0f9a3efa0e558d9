"""What CONTRIBUTING says the two definitions answer, each on numbers that a reader can follow."""

import jax
import jax.numpy as jnp
import numpy as np

from m3jax.config import M3Config
from m3jax.spec import model as definition
from m3jax.spec.msa import SelectionRules, block_scores, dense_attention, msa, select_blocks

CONFIG = M3Config.tiny()
RULES = SelectionRules(top_k=2, local_blocks=1, init_blocks=0)


def select(scores, own_block: int, rules: SelectionRules = RULES) -> list[int]:
    """The blocks that a query at the end of `own_block` keeps; blocks have 4 tokens."""
    scores = jnp.asarray(scores, jnp.float32)[None, None, None]
    position = jnp.asarray([[4 * own_block + 3]])
    kept = select_blocks(scores, position, jnp.asarray([4 * scores.shape[-1]]), rules, block_size=4)
    return kept[0, 0, 0].tolist()


def test_a_block_is_chosen_by_the_largest_score_of_a_token_that_the_query_sees():
    index_q, index_k = jnp.ones((1, 1, 1, 1)), jnp.asarray([1.0, 9, 1, 1, 3, 3, 3, 3, 2, 0, 7, 7])[None, :, None]
    scores = block_scores(index_q, index_k, jnp.asarray([[9]]), jnp.asarray([12]), 4)
    assert scores[0, 0, 0].tolist() == [9, 3, 2]  # 7 stands behind position 9
    # Two of the four: the own block in any case, the best of the others beside it.
    assert select([9, 3, 1, 8], own_block=3) == [0, 3]
    assert select([9, 3, 1, 0], own_block=0) == [0, -1]  # min(J, own block + 1) blocks, never more


def test_of_equal_scores_the_lower_block_is_kept():
    assert select([3, 5, 5, 0], own_block=3) == [1, 3] and select([5, 5, 5, 0], own_block=3) == [0, 3]
    assert select([-0.0, 0.0, -1, 0], own_block=3) == [0, 3]
    assert select([np.nan, -7, np.nan, 0], own_block=3) == [1, 3]  # no number comes after every number
    assert select([np.nan, np.nan, np.nan, 0], own_block=3) == [0, 3]


def test_bfloat16_rounds_once_for_each_value_that_has_a_name():
    """Norms, products, rotation and sums are float32 inside; the router is float32 throughout, logits stay so."""
    bf16 = jnp.bfloat16
    x = jax.random.normal(jax.random.key(0), (1, 3, 64), bf16)
    weight = jax.random.normal(jax.random.key(1), (8, 64), bf16)
    product = definition.linear(x, weight)
    assert product.dtype == definition.norm(x, x[0, 0], 1e-6).dtype == jnp.float32
    exact = np.einsum("btd,fd->btf", *(np.asarray(a, np.float64) for a in (x, weight)))
    assert np.abs(product - exact).max() < 1e-4 < np.abs(product.astype(bf16) - exact).max()
    # Softmax weights are rounded before they meet the values, their sum is not: 1 + 2^-9 twice would be 1 in bfloat16.
    scores = jnp.log(jnp.asarray([1.0, 1 / 512, 1 / 512]))
    q, k, v = jnp.ones((1, 1, 1, 1), bf16), scores.reshape(1, 3, 1, 1).astype(bf16), jnp.ones((1, 3, 1, 1), bf16)
    _, lse = dense_attention(q, k, v, jnp.asarray([[2]]), jnp.asarray([3]), return_lse=True)
    assert lse.dtype == jnp.float32 and 1.5 / 512 < float(lse[0, 0, 0]) < 2.5 / 512


def test_a_padded_query_keeps_no_block_and_gives_0_and_no_query_sees_its_key():
    keys = jax.random.split(jax.random.key(0), 5)
    q, k, v, index_q = (jax.random.normal(key, (1, 12, 2, 8)) for key in keys[:4])
    index_k = jax.random.normal(keys[4], (1, 12, 8))
    call = dict(positions=jnp.arange(12)[None], lengths=jnp.asarray([10]), rules=RULES, block_size=4)
    attend = jax.jit(lambda *operands: msa(*operands, **call))
    out, blocks = attend(q, k, v, index_q, index_k)
    assert not out[:, 10:].any() and (blocks[:, :, 10:] == -1).all()
    garbage = lambda x: x.at[:, 10:].set(jnp.nan)
    other, _ = attend(q, garbage(k), garbage(v), index_q, garbage(index_k))
    np.testing.assert_array_equal(out, other)


def test_an_expert_is_weighed_by_its_score_alone_and_chosen_with_its_bias():
    """Scores of the chosen are divided by their sum; the factor is theirs, the shared expert is added as it is."""
    width, experts = CONFIG.hidden_size, CONFIG.num_local_experts
    logits = jnp.asarray([2.0, 2.0, 1.0, 0, 0, 0, 0, 0])
    gate = jnp.zeros((experts, width)).at[:, 0].set(logits)
    matrix = lambda seed, shape: 0.1 * jax.random.normal(jax.random.key(seed), shape)
    mlp = lambda seed, hidden, names: dict(zip(
        (f"{name}.weight" for name in names),
        (matrix(seed, (hidden, width)), matrix(seed + 1, (hidden, width)), matrix(seed + 2, (width, hidden))),
        strict=True,
    ))  # fmt: skip
    params = {"gate.weight": gate, "e_score_correction_bias": jnp.zeros(experts).at[2].set(1.0)}
    for expert in range(experts):
        own = mlp(10 * expert, CONFIG.intermediate_size, ("w1", "w3", "w2"))
        params |= {f"experts.{expert}.{name}": value for name, value in own.items()}
    shared = mlp(99, CONFIG.intermediate_size, ("gate_proj", "up_proj", "down_proj"))
    params |= {f"shared_experts.{name}": value for name, value in shared.items()}

    x = jnp.ones((1, 1, width))
    out, values = definition.mixture_of_experts(params, x, CONFIG)
    assert values["expert_ids"][0, 0].tolist() == [2, 0]  # lifted by its bias; of 0 and 1, equal, the lower id
    score = jax.nn.sigmoid(jnp.asarray([1.0, 2.0]))
    np.testing.assert_allclose(values["expert_weights"][0, 0], score / score.sum(), rtol=1e-6)
    each = [definition.mlp({n: params[f"experts.{e}.{n}"] for n in ("w1.weight", "w3.weight", "w2.weight")}, x, CONFIG,
                           names=("w1", "w3", "w2")) for e in (2, 0)]  # fmt: skip
    routed = sum(w * y for w, y in zip(values["expert_weights"][0, 0], each, strict=True))
    expected = CONFIG.routed_scaling_factor * routed + definition.mlp(shared, x, CONFIG)
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-6)
