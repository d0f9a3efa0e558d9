"""MiniMax-M3's text model, defined: the function that everything else in m3jax computes.

`forward` maps tokens to logits, given parameters by their hub names. It holds every value at once and computes it in
one plain way. `m3jax.model.M3`, engines with their caches, kernels, meshes, MXFP8 and the invariant mode are schedules
of it, and are tested against it.

Axes: B rows, T tokens (token t of a row has position t), N query heads, K KV heads and as many index heads, H head dim,
I index head dim, R half of the rotated dims, D model width, F hidden width of an MLP, E experts, A experts per token,
V vocabulary, M blocks, J slots. Matrices are [out, in], as the hub has them.

Values with a name are stored in the parameters' dtype: the residual stream, a norm's output, q, k, v, attention's
output, and the hidden values of an MLP. Everything between two of them is computed in float32 (float64 for a float64
model), never rounded to tf32 or bfloat16. In a bfloat16 model `_rounded` marks every rounding in this file, and
`m3jax.spec.msa` says where attention rounds its weights and its output. The router is float32 in every model.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from m3jax.config import M3Config
from m3jax.spec.msa import SelectionRules, block_scores, dense_attention, select_blocks, sparse_attention

PREFIX = "language_model."  # of the hub names of the text model

Parameters = Mapping[str, Array]
Values = dict[str, Array]


def forward(
    params: Parameters,
    tokens: Int[Array, "B T"],
    config: M3Config,
    *,
    lengths: Int[Array, " B"] | None = None,
) -> Float[Array, "B T V"]:
    """Return the logits of every token.

    Args:
      params: Arrays by hub name, such as "language_model.model.embed_tokens.weight": those of a checkpoint, or
        `m3jax.hub_parameters(model)`.
      tokens: Token ids; rows are right-padded.
      config: The model's configuration.
      lengths: Number of tokens per row; all by default. The rest is padding: no token sees it, its attention is 0, and
        its logits mean nothing.

    Returns:
      Logits in float32 (float64 for a float64 model).

    Source: transformers `MiniMaxM3VLForCausalLM`; the router's dtype: vLLM, SGLang.
    """
    return intermediates(params, tokens, config, lengths=lengths)["logits"]


def intermediates(
    params: Parameters,
    tokens: Int[Array, "B T"],
    config: M3Config,
    *,
    lengths: Int[Array, " B"] | None = None,
) -> dict[str, Array | list[Values]]:
    """Return every named value between tokens and logits.

    Args:
      params, tokens, config, lengths: As in `forward`.

    Returns:
      "embedding" [B T D], "layers" (each layer's values by name, see `layer`), "final_norm" [B T D] and "logits"
      [B T V]: the names and shapes of `m3jax.model.M3.intermediates`.
    """
    if lengths is None:
        lengths = jnp.full(tokens.shape[:1], tokens.shape[1], jnp.int32)
    embedding = params[f"{PREFIX}model.embed_tokens.weight"][tokens]  # [B T D]
    x, layers = embedding, []  # not scaled by sqrt(D), unlike in Gemma, whose norms these are
    for index in range(config.num_hidden_layers):
        name = f"{PREFIX}model.layers.{index}."
        of_layer = {key.removeprefix(name): value for key, value in params.items() if key.startswith(name)}
        x, values = layer(of_layer, x, lengths, config)
        layers.append(values)
    final_norm = _rounded(norm(x, params[f"{PREFIX}model.norm.weight"], config.rms_norm_eps), x)
    logits = linear(final_norm, params[f"{PREFIX}lm_head.weight"])  # [B T V], not rounded
    return {"embedding": embedding, "layers": layers, "final_norm": final_norm, "logits": logits}


def layer(
    params: Parameters, x: Float[Array, "B T D"], lengths: Int[Array, " B"], config: M3Config
) -> tuple[Float[Array, "B T D"], Values]:
    """Run one decoder layer: attention, then an MLP or experts, each after a norm and added to the residual stream.

    The names of a layer's parameters decide whether its attention is sparse, and whether it has experts.

    Args:
      params: The layer's parameters, by the part of their names after "layers.N.".
      x: Residual stream.
      lengths: Number of tokens per row.
      config: The model's configuration.

    Returns:
      (residual stream, values by name). Every layer has input, attention_norm, q [B T N H], k and v [B T K H],
      attention [B T N H], attention_out, ffn_norm, ffn_out and output [B T D]; a sparse one also index_q [B T K I],
      index_k [B T I], block_scores [B K T M] and blocks [B K T J]; one with experts also expert_ids and expert_weights
      [B T A].
    """
    attention_norm = _rounded(norm(x, params["input_layernorm.weight"], config.rms_norm_eps), x)
    attention_out, values = attention(_below(params, "self_attn."), attention_norm, lengths, config)
    middle = _rounded(x + attention_out, x)  # [B T D]; the sum is rounded, its terms are not
    ffn_norm = _rounded(norm(middle, params["post_attention_layernorm.weight"], config.rms_norm_eps), x)
    if "mlp.gate_proj.weight" in params:
        ffn_out, routing = mlp(_below(params, "mlp."), ffn_norm, config), {}
    else:
        ffn_out, routing = mixture_of_experts(_below(params, "block_sparse_moe."), ffn_norm, config)
    output = _rounded(middle + ffn_out, x)
    values |= routing | {"input": x, "attention_norm": attention_norm, "attention_out": attention_out}
    return output, values | {"ffn_norm": ffn_norm, "ffn_out": ffn_out, "output": output}


# Attention


def attention(
    params: Parameters, x: Float[Array, "B T D"], lengths: Int[Array, " B"], config: M3Config
) -> tuple[Float[Array, "B T D"], Values]:
    """Run one layer's grouped-query attention, over the blocks that the index branch selects if there is one.

    Queries and keys are normed per head and rotated by their positions; values are not. The index branch projects the
    same `x` in the same way: an index query for each KV head, and one index key that all heads share. It only selects.
    In training no gradient goes from it to `x` (paper, section 3.2).

    Args:
      params: The layer's parameters, by the part of their names after "self_attn.".
      x: Output of the layer's first norm.
      lengths: Number of tokens per row.
      config: The model's configuration.

    Returns:
      (the output projection, not rounded, and q, k, v, attention; index_q, index_k, block_scores and blocks).
    """
    positions = jnp.broadcast_to(jnp.arange(x.shape[1], dtype=jnp.int32), x.shape[:2])  # [B T]

    def heads(name: str, width: int, x: Float[Array, "B T D"] = x) -> Float[Array, "B T _ H"]:
        return linear(x, params[f"{name}_proj.weight"]).reshape(*x.shape[:2], -1, width)

    def normed_and_rotated(name: str, width: int, x: Float[Array, "B T D"] = x) -> Float[Array, "B T _ H"]:
        normed = norm(heads(name, width, x), params[f"{name}_norm.weight"], config.rms_norm_eps)
        return _rounded(rope(normed, positions, config), x)  # rounded once, after the rotation

    q, k = (normed_and_rotated(name, config.head_dim) for name in "qk")  # [B T N H], [B T K H]
    v = _rounded(heads("v", config.head_dim), x)  # [B T K H]
    values = {"q": q, "k": k, "v": v}
    if "index_q_proj.weight" in params:
        for_index = jax.lax.stop_gradient(x)
        index_q = normed_and_rotated("index_q", config.index_head_dim, for_index)  # [B T K I]
        index_k = normed_and_rotated("index_k", config.index_head_dim, for_index)[:, :, 0]  # [B T I]
        rules = SelectionRules(
            config.index_topk_blocks, config.index_local_blocks, config.index_init_blocks, config.index_score_type
        )
        size = config.index_block_size
        scores = block_scores(index_q, index_k, positions, lengths, size, rules.score)  # [B K T M]
        blocks = select_blocks(scores, positions, lengths, rules, block_size=size)  # [B K T J]
        out = sparse_attention(q, k, v, blocks, positions, lengths, block_size=size)  # [B T N H]
        values |= {"index_q": index_q, "index_k": index_k, "block_scores": scores, "blocks": blocks}
    else:
        out = dense_attention(q, k, v, positions, lengths)  # [B T N H]
    return linear(out.reshape(*x.shape[:2], -1), params["o_proj.weight"]), values | {"attention": out}


def rope(x: Float[Array, "B T _ H"], positions: Int[Array, "B T"], config: M3Config) -> Float[Array, "B T _ H"]:
    """Rotate dims i and i + R of each head by position x theta^(-i / R), for i < R; dims from 2R on stay as they are.

    Args:
      x: Heads, in float32 at least.
      positions: Position of each token.
      config: The model's configuration: rotary_dim = 2R, rope_theta.
    """
    half = config.rotary_dim // 2  # R
    exponent = jnp.arange(0, config.rotary_dim, 2, dtype=x.dtype) / config.rotary_dim  # [R]
    angles = positions[..., None].astype(x.dtype) * (1.0 / jnp.asarray(config.rope_theta, x.dtype) ** exponent)
    cos, sin = jnp.cos(angles)[:, :, None], jnp.sin(angles)[:, :, None]  # [B T 1 R]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=-1)


# Feed-forward


def mixture_of_experts(
    params: Parameters, x: Float[Array, "B T D"], config: M3Config
) -> tuple[Float[Array, "B T D"], Values]:
    """Return the weighted sum of each token's experts times routed_scaling_factor, plus the shared expert.

    A token chooses the A experts with the highest score plus bias; the lower id among equal ones. They are weighted by
    their scores alone, divided by the sum of these A scores. No expert has a capacity, and no token is dropped.

    Args:
      params: The layer's parameters, by the part of their names after "block_sparse_moe.".
      x: Output of the layer's second norm.
      config: The model's configuration.

    Returns:
      (the sum, not rounded; expert_ids and expert_weights [B T A]). A NaN score makes the token's output NaN; otherwise
      top-k would silently skip that expert. So do A scores of 0, whose weights are 0 / 0: the sum has no epsilon, as in
      transformers (T45).
    """
    gate = params["gate.weight"]  # [E D], float32 in every model
    scores = jax.nn.sigmoid(linear(x.astype(gate.dtype), gate))  # [B T E]
    biased = scores + params["e_score_correction_bias"]
    # The bias balances the load among experts: it changes the choice, and no weight.
    _, expert_ids = jax.lax.top_k(biased, config.num_experts_per_tok)  # [B T A]
    weights = jnp.take_along_axis(scores, expert_ids, axis=-1)
    weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
    weights = jnp.where(jnp.any(jnp.isnan(biased), axis=-1, keepdims=True), jnp.nan, weights)

    routed = jnp.zeros(x.shape, _wide(x))  # [B T D]
    for expert in range(config.num_local_experts):
        out = mlp(_below(params, f"experts.{expert}."), x, config, names=("w1", "w3", "w2"))  # [B T D]
        weight = jnp.sum(jnp.where(expert_ids == expert, weights, 0.0), axis=-1, keepdims=True)  # [B T 1]
        # The output of an expert that was not chosen does not count, not even as 0 x NaN.
        is_chosen = jnp.any(expert_ids == expert, axis=-1, keepdims=True)
        routed += jnp.where(is_chosen, out * weight, 0.0)
    shared = mlp(_below(params, "shared_experts."), x, config)
    values = {"expert_ids": expert_ids.astype(jnp.int32), "expert_weights": weights}
    return config.routed_scaling_factor * routed + shared, values


def mlp(
    params: Parameters,
    x: Float[Array, "B T D"],
    config: M3Config,
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
) -> Float[Array, "B T D"]:
    """Run an MLP by SwiGLU-OAI: (up + 1) * gate * sigmoid(alpha * gate), gate clamped above, up on both sides at limit.

    The 1 is swiglu_beta. With beta 0, alpha 1 and a limit that no number reaches this is the SwiGLU of other models.

    Args:
      params: The three matrices.
      x: Activations.
      config: The model's configuration: swiglu_alpha, swiglu_limit, swiglu_beta.
      names: Names of gate [F D], up [F D] and down [D F].

    Returns:
      The product with `down`, not rounded.
    """
    gate, up = (linear(x, params[f"{name}.weight"]) for name in names[:2])  # [B T F] twice
    limit = config.swiglu_limit
    gate = jnp.where(gate > limit, limit, gate)  # by comparisons: a minimum may turn NaN into a number
    up = jnp.where(up > limit, limit, jnp.where(up < -limit, -limit, up))
    hidden = _rounded((up + config.swiglu_beta) * gate * jax.nn.sigmoid(config.swiglu_alpha * gate), x)
    return linear(hidden, params[f"{names[2]}.weight"])


# Building blocks


def norm(x: Float[Array, "... D"], weight: Float[Array, " D"], eps: float) -> Float[Array, "... D"]:
    """Return x / sqrt(mean(x^2) + eps) times 1 + weight, in float32 at least."""
    x = x.astype(_wide(x))
    # Gemma's form: the stored weight is the factor minus 1, which bfloat16 resolves more finely than the factor.
    return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + eps) * (1.0 + weight.astype(x.dtype))


def linear(x: Float[Array, "... D"], weight: Float[Array, "F D"]) -> Float[Array, "... F"]:
    """Return x times the transposed matrix, summed and left in float32 at least."""
    return jnp.einsum("...d,fd->...f", x, weight, precision="highest", preferred_element_type=_wide(x))


def _wide(x: Float[Array, "..."]) -> jnp.dtype:
    """Return the dtype of arithmetic on x: float64 for float64, else float32."""
    return jnp.promote_types(x.dtype, jnp.float32)


def _rounded(x: Float[Array, "..."], like: Float[Array, "..."]) -> Float[Array, "..."]:
    """Return x in the dtype of the activations: the only rounding of the expression in its argument."""
    return x.astype(like.dtype)


def _below(params: Parameters, prefix: str) -> Parameters:
    """Return the parameters whose names start with a prefix, by the rest of their names."""
    return {name.removeprefix(prefix): value for name, value in params.items() if name.startswith(prefix)}
