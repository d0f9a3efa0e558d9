"""Readings of a model: what its values say of a prediction, and what becomes of it when they are changed.

Each is a few lines over `M3.intermediates` and `edits`. B rows, T tokens, L layers, N query heads, K KV heads,
G = N / K, H width of a head, D model width, V vocabulary, M blocks of P tokens, J blocks that a query keeps.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from m3jax.inside.edits import Add, PatchAt, WithoutExpert
from m3jax.model import M3, Choices
from m3jax.model.choices import NAMES
from m3jax.ops import project
from m3jax.spec.msa import chosen_tokens, sees

Values = Mapping[str, Array]
Metric = Callable[[Float[Array, "B T V"]], Float[Array, ""]]  # of logits, such as `logit_difference` gives one


def logit_difference(answer: int, other: int, position: int = -1) -> Metric:
    """Return a metric: how much higher one token's logit is than another's, mean of the rows.

    Args:
      answer, other: token ids.
      position: column of the logits.
    """
    return jax.tree_util.Partial(_difference, answer, other, position)


def _difference(
    answer: int | Array, other: int | Array, position: int | Array, logits: Float[Array, "B T V"]
) -> Float[Array, ""]:
    at = logits[:, position]
    return jnp.mean(at[:, answer] - at[:, other])


def logit_lens(model: M3, tokens: Int[Array, "B T"], position: int = -1) -> Float[Array, "L B V"]:
    """Return the logits that each layer's residual stream would give if the model ended there; the embedding's first.

    Args:
      model: of L - 1 layers.
      tokens: token ids.
      position: column whose next token is looked at.

    Source: nostalgebraist, "interpreting GPT: the logit lens", 2020.
    """
    values = model.intermediates(tokens, names=("embedding", "layers.*.output"))
    streams = [values["embedding"], *(values[f"layers.{n}.output"] for n in range(model.config.num_hidden_layers))]
    ends = jnp.stack([stream[:, position] for stream in streams])  # [L B D]
    return model.unembed(model.final_norm(ends))


def direct_logits(
    model: M3, tokens: Int[Array, "B T"], answer: int, other: int, position: int = -1
) -> dict[str, Float[Array, " B"]]:
    """Return the part of a logit difference that each layer's attention and feed-forward write.

    The final norm divides by one number a token, which is that of the whole run: the parts then add up to the
    difference, but for rounding. The embedding's part comes first.

    Args:
      model: the model.
      tokens: token ids.
      answer, other: token ids whose logits are compared.
      position: column of the logits.

    Source: Elhage et al., "A mathematical framework for transformer circuits", 2021 (direct path).
    """
    written = ("embedding", "layers.*.attention_out", "layers.*.ffn_out")
    values = model.intermediates(tokens, names=(*written, _last_output(model)))
    direction = _direction(model, values[_last_output(model)][:, position], answer, other)  # [B D]
    parts = {name: value for name, value in values.items() if name != _last_output(model)}
    parts = {name: jnp.sum(value[:, position].astype(jnp.float32) * direction, -1) for name, value in parts.items()}
    order = ["embedding", *(f"layers.{n}.{part}_out" for n in range(model.config.num_hidden_layers)
                            for part in ("attention", "ffn"))]  # fmt: skip
    return {name: parts[name] for name in order}


def head_logits(
    model: M3, tokens: Int[Array, "B T"], answer: int, other: int, position: int = -1
) -> Float[Array, "B L N"]:
    """Return the part of a logit difference that each query head writes, as `direct_logits` splits it by layers.

    Args:
      model, tokens, answer, other, position: as of `direct_logits`.
    """
    values = model.intermediates(tokens, names=("layers.*.attention", _last_output(model)))
    direction = _direction(model, values[_last_output(model)][:, position], answer, other)  # [B D]
    of_layers = []
    for layer in range(model.config.num_hidden_layers):
        o_proj = model.layer(layer).self_attn.o_proj[...][0]  # [N H D]
        heads = values[f"layers.{layer}.attention"][:, position]  # [B N H]
        out = jax.vmap(lambda head, matrix: project("bh,hd->bd", head, matrix), (1, 0), 1)(heads, o_proj)  # [B N D]
        of_layers.append(jnp.einsum("bnd,bd->bn", out.astype(jnp.float32), direction))
    return jnp.stack(of_layers, axis=1)


def _last_output(model: M3) -> str:
    """Return the name of the residual stream behind the last layer."""
    return f"layers.{model.config.num_hidden_layers - 1}.output"


def _direction(model: M3, stream: Float[Array, "B D"], answer: int, other: int) -> Float[Array, "B D"]:
    """Return the vectors whose product with a part of the residual stream is its part of a logit difference."""
    stream = stream.astype(jnp.float32)
    norm = jax.lax.rsqrt(jnp.mean(jnp.square(stream), axis=-1, keepdims=True) + model.config.rms_norm_eps)  # [B 1]
    head = model.lm_head[...].astype(jnp.float32)
    return norm * (1.0 + model.norm[...].astype(jnp.float32)) * (head[answer] - head[other])


def patch_effects(
    model: M3,
    tokens: Int[Array, "B T"],
    source: Int[Array, "B T"],
    metric: Metric,
    *,
    name: str = "output",
    positions: Sequence[int] | None = None,
) -> Float[Array, "L P"]:
    """Return a metric of a run in which one layer's value at one token is taken from another run, for each of both.

    One program runs for all layers and positions, one after the other.

    Args:
      model: the model.
      tokens: of the run that is patched.
      source: of the run that values are taken from; as long.
      metric: of the patched run's logits.
      name: of a value with an axis of tokens first, which all layers have.
      positions: P tokens to patch; all by default.

    Source: Meng et al., "Locating and editing factual associations in GPT", 2022 (causal tracing).
    """
    num_layers = model.config.num_hidden_layers
    taken = model.intermediates(source, names=(f"layers.*.{name}",))
    taken = jnp.stack([taken[f"layers.{layer}.{name}"] for layer in range(num_layers)])  # [L B T ...]
    columns = np.arange(tokens.shape[1]) if positions is None else np.asarray(positions)
    pairs = np.stack(np.meshgrid(np.arange(num_layers), columns, indexing="ij"), -1).reshape(-1, 2)  # [L*P 2]

    effects = _patched(model, tokens, taken, jnp.asarray(pairs, jnp.int32), _as_tree(metric), f"layers.*.{name}")
    return effects.reshape(num_layers, len(columns))


@partial(jax.jit, static_argnames=("name",))
def _patched(
    model: M3, tokens: Int[Array, "B T"], taken: Array, pairs: Int[Array, "X 2"], metric: Metric, name: str
) -> Float[Array, " X"]:
    return jax.lax.map(lambda pair: metric(model(tokens, edits={name: PatchAt(taken, pair[0], pair[1])})), pairs)


def expert_effects(model: M3, tokens: Int[Array, "B T"], layer: int, metric: Metric) -> Float[Array, " E"]:
    """Return a metric of the run without each of a layer's experts in turn, their weights 0 and the others' as before.

    Args:
      model: the model.
      tokens: token ids.
      layer: one with experts.
      metric: of the logits.
    """

    return _without_each_expert(model, tokens, _as_tree(metric), f"layers.{layer}.expert_weights")


@partial(jax.jit, static_argnames=("name",))
def _without_each_expert(model: M3, tokens: Int[Array, "B T"], metric: Metric, name: str) -> Float[Array, " E"]:
    run = lambda expert: metric(model(tokens, edits={name: WithoutExpert(expert)}))
    return jax.lax.map(run, jnp.arange(model.config.num_local_experts, dtype=jnp.int32))


def choices_of(model: M3, tokens: Int[Array, "B T"]) -> Choices:
    """Return the experts and blocks that a run chose, to be given to another run.

    Args:
      model: the model.
      tokens: token ids.
    """
    return Choices(**model.run(tokens, names=NAMES, logits=False).values)


def gradients(
    model: M3, tokens: Int[Array, "B T"], metric: Metric, names: Sequence[str], choices: Choices | None = None
) -> dict[str, Float[Array, "..."]]:
    """Return the gradient of a metric to named values, by full name: all of them from one backward pass.

    No gradient goes through a choice of blocks or experts: it is that of the choices that the run makes, or is given.

    Args:
      model: the model.
      tokens: token ids.
      metric: of the logits.
      names: of values that are floats.
      choices: experts and blocks of the run (`choices_of`); its own by default.
    """
    shapes = jax.eval_shape(lambda model, tokens: model.intermediates(tokens, names=tuple(names)), model, tokens)
    zeros = {name: jnp.zeros(shape.shape, shape.dtype) for name, shape in shapes.items()}

    return _slopes(zeros, model, tokens, choices, _as_tree(metric))


@jax.jit
@jax.grad
def _slopes(
    zeros: dict[str, Array], model: M3, tokens: Int[Array, "B T"], choices: Choices | None, metric: Metric
) -> Float[Array, ""]:
    edits = {name: Add(delta) for name, delta in zeros.items()}
    return metric(model(tokens, edits=edits, choices=choices))


def _as_tree(metric: Metric) -> Metric:
    """Return a metric as a compiled program takes it: a function that is no pytree is a part of the program."""
    is_leaf = jax.tree_util.treedef_is_leaf(jax.tree.structure(metric))
    return jax.tree_util.Partial(metric) if is_leaf else metric


def attributions(
    model: M3,
    tokens: Int[Array, "B T"],
    source: Int[Array, "B T"],
    metric: Metric,
    names: Sequence[str],
    choices: Choices | None = None,
) -> dict[str, Float[Array, "B T"]]:
    """Return the effect of patching each value at each token, to first order: one backward pass in place of many runs.

    Args:
      model, tokens, metric, names, choices: as of `gradients`; values have an axis of tokens first.
      source: tokens of the run that values would be taken from; as many.

    Source: Nanda, "Attribution patching", 2023.
    """
    slopes = gradients(model, tokens, metric, names, choices)
    old, new = (model.intermediates(ids, names=tuple(names)) for ids in (tokens, source))
    effect = lambda name: (new[name] - old[name]).astype(jnp.float32) * slopes[name].astype(jnp.float32)
    return {name: jnp.sum(effect(name).reshape(*tokens.shape, -1), axis=-1) for name in slopes}


def attention_weights(values: Values, layer: int, block_size: int, is_dense: bool = False) -> Float[Array, "B N T S"]:
    """Return the weights with which each query head reads each token, in whole rows without padding.

    Args:
      values: with the layer's "q", "k", and, if its attention is sparse, "blocks", by full name.
      layer: index in the model.
      block_size: P.
      is_dense: whether to return what the queries would read if they attended to every block.
    """
    q, k = values[f"layers.{layer}.q"], values[f"layers.{layer}.k"]
    batch, length, heads, width = q.shape
    by_group = q.reshape(batch, length, k.shape[2], -1, width)
    scores = jnp.einsum("btkgh,bskh->bkgts", by_group, k, preferred_element_type=jnp.float32) * width**-0.5
    visible = _visible(values, layer, block_size, is_dense)[:, :, None]  # [B K 1 T S]
    return jax.nn.softmax(jnp.where(visible, scores, -jnp.inf), axis=-1).reshape(batch, heads, length, -1)


def _visible(values: Values, layer: int, block_size: int, is_dense: bool) -> Bool[Array, "B K T S"]:
    """Return True for the keys that a KV head's queries read."""
    batch, length, kv_heads = values[f"layers.{layer}.k"].shape[:3]
    positions = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (batch, length))
    seen = sees(positions, jnp.full(batch, length, jnp.int32), jnp.arange(length, dtype=jnp.int32))[:, None]
    if is_dense or f"layers.{layer}.blocks" not in values:
        return jnp.broadcast_to(seen, (batch, kv_heads, length, length))
    return seen & chosen_tokens(values[f"layers.{layer}.blocks"], length, block_size)


def block_reads(values: Values, layer: int, block_size: int) -> Float[Array, "B N M M"]:
    """Return how much of its attention each block of queries gives to each block of keys, by query head, on average.

    Args:
      values, layer, block_size: as of `attention_weights`.
    """
    weights = attention_weights(values, layer, block_size)  # [B N T S]
    batch, heads, length = weights.shape[:3]
    room = -length % block_size
    padded = jnp.pad(weights, ((0, 0), (0, 0), (0, room), (0, room)))
    by_block = padded.reshape(batch, heads, -1, block_size, (length + room) // block_size, block_size).sum((3, 5))
    queries = np.bincount(np.arange(length) // block_size)  # of each block; the last may have fewer
    return by_block / jnp.asarray(queries, by_block.dtype)[:, None]


def dense_reads(values: Values, layer: int, block_size: int) -> tuple[Float[Array, "B N T M"], Float[Array, "B N T"]]:
    """Return what dense attention would have read of each block, and how much of that lies in the selected blocks.

    Args:
      values, layer, block_size: as of `attention_weights`; a layer whose attention is sparse.
    """
    weights = attention_weights(values, layer, block_size, is_dense=True)
    selected = jnp.repeat(_visible(values, layer, block_size, False), weights.shape[1] // values[
        f"layers.{layer}.k"].shape[2], axis=1)  # [B N T S]  # fmt: skip
    caught = jnp.sum(jnp.where(selected, weights, 0.0), axis=-1)
    padded = jnp.pad(weights, ((0, 0),) * 3 + ((0, -weights.shape[-1] % block_size),))
    return padded.reshape(*padded.shape[:3], -1, block_size).sum(-1), caught


def weights_on(
    values: Values, block_size: int, query: int, keys: Sequence[int], layers: Sequence[int]
) -> Float[Array, "B L N"]:
    """Return how much each query head reads some tokens at one position: which heads carry a needle to its question.

    Args:
      values, block_size: as of `attention_weights`, for all these layers.
      query: position that reads.
      keys: positions that are read.
      layers: L of them.
    """
    of_layers = [attention_weights(values, layer, block_size)[:, :, query] for layer in layers]  # [B N S] each
    return jnp.stack([weights[..., np.asarray(keys)].sum(-1) for weights in of_layers], axis=1)
