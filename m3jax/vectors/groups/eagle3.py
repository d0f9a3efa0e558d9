"""The EAGLE3 draft: features from the target's taps, the draft's layer over a prompt, and draft steps after it."""

import re
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from m3jax.cache import Cache
from m3jax.cache.drafted import DraftedCache
from m3jax.model.eagle3 import Eagle3, Eagle3Config, abstract
from m3jax.msa import dense_attention
from m3jax.vectors.case import Arrays, Case, Group, Rule, Run, in_dtype, jitted, normal

# W = 2 D: what attention reads, the token's embedding first. Q are the positions of prompt and draft steps together.
WEIGHTS = {
    "fc": "A D E", "fc_norm": "A D", "hidden_norm": "D", "input_layernorm": "D", "post_attention_layernorm": "D",
    "norm": "D", "q_proj": "W N H", "k_proj": "W K H", "v_proj": "W K H", "o_proj": "N H D", "gate_proj": "D F",
    "up_proj": "D F", "down_proj": "F D", "embed_tokens": "V D", "lm_head": "U D", "target_ids": "U",
}  # fmt: skip
AXES = WEIGHTS | {
    "taps": "B T A D", "next_tokens": "B T", "drafted": "B C", "feature": "B T D", "q": "B Q N H", "k": "B Q K H",
    "v": "B Q K H", "hidden": "B Q D", "logits": "B Q U", "proposals": "B Q",
}  # fmt: skip
TOLERANCES = {name: "draft" for name in ("feature", "q", "k", "v", "hidden", "logits")} | {"proposals": "bits"}


def cases(large: bool) -> Iterator[Case]:
    """Yield a case with EAGLE 3.1's order of norms, and one with EAGLE 3's."""
    if large:
        return
    first = dict(fc_norm=True, norm_output=True, norm_before_residual=False)
    yield drafted(
        "eagle31", "each tap is normed before fc, and the next step goes on from the normed output", 123, first
    )
    second = dict(fc_norm=False, norm_output=False, norm_before_residual=True)
    yield drafted("eagle3", "taps as they are, the next step goes on from the output before the norm", 122, second)


def drafted(name: str, what: str, seed: int, options: dict[str, bool]) -> Case:
    """Return a case of two prompts and three draft steps with given tokens, each with the feature before it."""
    rng, rule = (
        np.random.default_rng(seed),
        options | dict(rms_norm_eps=1e-6, rope_theta=1e4, taps=[1, 2, 3], block_size=4),
    )
    config = _config(rule, dict(D=24, V=40, U=20, N=4, K=2, H=8, F=32))
    inputs = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(abstract(config, "float32"))[0]:
        weight = _name(path)
        if weight == "target_ids":
            inputs[weight] = np.sort(rng.permutation(40)[:20]).astype(np.int32)
        elif "norm" in weight:
            inputs[weight] = (1 + rng.normal(size=leaf.shape) * 0.3).astype(jnp.bfloat16)
        else:
            last = weight in ("embed_tokens", "lm_head")
            fan_in = (
                leaf.shape[-1] if last else np.prod(leaf.shape[:2] if weight in ("fc", "o_proj") else leaf.shape[0])
            )
            inputs[weight] = normal(rng, *leaf.shape, scale=1.0 if weight == "embed_tokens" else float(fan_in) ** -0.5)
    inputs["taps"] = normal(rng, 2, 9, 3, 24)
    inputs["next_tokens"] = rng.integers(0, 40, (2, 9)).astype(np.int32)
    inputs["drafted"] = rng.choice(inputs["target_ids"], (2, 3))
    what = f"{what}; the feature of position t goes with the token at t + 1, both at position t"
    return Case(name, what, rule, seed, inputs, ("T55",))


def _config(rule: Rule, sizes: dict[str, int]) -> Eagle3Config:
    letters = dict(
        hidden_size="D", vocab_size="V", draft_vocab_size="U", num_attention_heads="N", num_key_value_heads="K",
        head_dim="H", intermediate_size="F",
    )  # fmt: skip
    options = {
        name: rule[name] for name in ("fc_norm", "norm_output", "norm_before_residual", "rms_norm_eps", "rope_theta")
    }
    return Eagle3Config(
        **{name: sizes[letter] for name, letter in letters.items()}, taps=tuple(rule["taps"]), **options
    )


def _name(path: tuple) -> str:
    """Return a parameter's name, given its path in the module."""
    return re.findall(r"[a-z_0-9]+", jax.tree_util.keystr(path))[0]


def module(inputs: Arrays, rule: Rule) -> Eagle3:
    """Return the draft whose weights are the inputs."""
    (_, heads, head_dim), (vocab, width) = inputs["q_proj"].shape, inputs["embed_tokens"].shape
    sizes = dict(D=width, V=vocab, U=len(inputs["lm_head"]), N=heads, K=inputs["k_proj"].shape[1], H=head_dim,
                 F=inputs["gate_proj"].shape[1])  # fmt: skip
    empty = abstract(_config(rule, sizes), str(inputs["fc"].dtype))
    return jax.tree_util.tree_map_with_path(lambda path, leaf: inputs[_name(path)], empty)


def define(inputs: Arrays, rule: Rule) -> Arrays:
    """Run the prompt, then a step for each given token, by the module's functions and `dense_attention`."""
    draft = module(inputs, rule)
    feature, tokens, prompt = draft.features(inputs["taps"]), inputs["next_tokens"], inputs["taps"].shape[1]
    num_rows, parts, keys, features = len(tokens), [], None, feature
    for step in range(inputs["drafted"].shape[1] + 1):
        first = 0 if step == 0 else prompt + step - 1
        positions = jnp.broadcast_to(first + jnp.arange(tokens.shape[1]), tokens.shape)
        x, residual = draft.inputs(features, tokens, draft.embed_tokens[...])
        values = draft.project(x, positions)
        keys = values if keys is None else {n: jnp.concatenate([keys[n], values[n]], axis=1) for n in ("k", "v")}
        lengths = jnp.full(num_rows, first + tokens.shape[1])
        attention = dense_attention(values["q"], keys["k"], keys["v"], positions, lengths)
        hidden = draft.outputs(attention, residual)
        parts.append(values | {"hidden": hidden, "logits": draft.logits(hidden, draft.lm_head[...])})
        if step < inputs["drafted"].shape[1]:
            features, tokens = draft.recur(hidden[:, -1:]), inputs["drafted"][:, step : step + 1]
    outputs = {name: jnp.concatenate([part[name] for part in parts], axis=1) for name in parts[0]}
    return outputs | {"feature": feature, "proposals": _proposals(outputs["logits"], inputs)}


def _proposals(logits: Float[Array, "B Q U"], inputs: Arrays) -> Array:
    """Return the target's id of the token with the largest logit at each position."""
    return inputs["target_ids"][jnp.argmax(logits, axis=-1)]


def runs(inputs: Arrays, rule: Rule) -> Iterator[Run]:
    """Yield runs of the draft over its own pages, which start one slot later than the target's."""
    for dtype in ("float32", "bfloat16"):
        outputs = jitted(_paged, rule, in_dtype(inputs, dtype))
        if dtype == "bfloat16":  # roundings may swap two logits that are nearly equal
            outputs.pop("proposals")
        yield Run("the draft's pages", dtype, outputs)


def _paged(inputs: Arrays, rule: Rule) -> Arrays:
    draft = module(inputs, rule)
    features, tokens, prompt = draft.features(inputs["taps"]), inputs["next_tokens"], inputs["taps"].shape[1]
    num_rows, layer, dtype = len(tokens), draft.config.as_layer(rule["block_size"]), str(draft.dtype)
    cache = DraftedCache.join(Cache.pool(layer, 5 * num_rows, num_rows, 5, dtype), layer, dtype, None)
    cache = cache.replace(table=jnp.arange(5 * num_rows, dtype=jnp.int32).reshape(5, num_rows).T)
    outputs, pages = {"feature": features}, cache.draft
    parts = []
    for step in range(inputs["drafted"].shape[1] + 1):
        first = 1 if step == 0 else prompt + step
        slots = jnp.broadcast_to(first + jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
        lengths = jnp.full(num_rows, first + tokens.shape[1], jnp.int32)
        places, embedding = cache.places(slots, lengths), draft.embed_tokens[...]
        hidden, pages = draft.cached(features, tokens, slots, lengths, places, pages, embedding)
        parts.append(hidden)
        if step < inputs["drafted"].shape[1]:
            features, tokens = draft.recur(hidden[:, -1:]), inputs["drafted"][:, step : step + 1]
    hidden = jnp.concatenate(parts, axis=1)
    logits = draft.logits(hidden, draft.lm_head[...])
    return outputs | {"hidden": hidden, "logits": logits, "proposals": _proposals(logits, inputs)}


GROUP = Group("eagle3", cases, define, runs, AXES, TOLERANCES)
