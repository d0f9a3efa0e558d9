"""MiniMax-M3: the text model, and the vision tower where it has one."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from m3jax.cache import Cache, Places
from m3jax.config import M3Config
from m3jax.execution import Compute, Edit, Execution, Probe, Remat, Taps, execution_of, run_layers
from m3jax.make import Make
from m3jax.media import MediaBatch
from m3jax.model import names as value_names
from m3jax.model.calls import model_call
from m3jax.model.choices import NAMES as CHOICES
from m3jax.model.choices import Choices, join_choices
from m3jax.model.context import Context, Output, selection_rules
from m3jax.model.decoder import Decoder
from m3jax.model.layers import rope_table
from m3jax.model.media import WithTower, vision_of
from m3jax.model.summary import table
from m3jax.model.variants import WithVariants

Edits = Mapping[str, Edit]
HostOrDevice = Array | np.ndarray
Intermediates = dict[str, Array | list[dict[str, Array]]]


class M3(WithVariants, WithTower):
    """MiniMax-M3 as a pytree of parameters with a static configuration; `vision` is None if it has no tower.

    A call outside `jax.jit` is one compiled program, kept for the next call of the same shapes. A call inside `jax.jit`
    is a part of the caller's program, which should take the model as an argument. Static are `config`, what
    `with_dense` and `with_score` change of the function, and `compute`, which says how it is computed
    (`m3jax.execution.Compute`).
    """

    def __init__(self, config: M3Config, make: Make, mesh: Mesh | None = None):
        vocab_shape = (config.vocab_size, config.hidden_size)
        self.config = config
        self.dense = False
        self.score = config.index_score_type
        self.compute = Compute(mesh=mesh)
        # Rows of the embedding are read, not summed over. The head is another matrix: M3 does not tie the two.
        self.embed_tokens = make.weight(vocab_shape, ("vocab", None), fan_in=1)
        # Consecutive layers of one kind are a stack, which is scanned: a program has one layer of each kind, not 60.
        self.stacks = nnx.List([Decoder(stack, config, make) for stack in config.stacks])
        self.norm = make.norm((config.hidden_size,))
        self.lm_head = make.weight(vocab_shape, ("logits", None), fan_in=config.hidden_size)
        self.vision = vision_of(config, make)

    def __call__(
        self,
        tokens: Int[HostOrDevice, "B T"],
        *,
        cache: Cache | None = None,
        positions: Int[HostOrDevice, "B T"] | None = None,
        lengths: Int[HostOrDevice, " B"] | None = None,
        embeddings: Float[HostOrDevice, "B T D"] | None = None,
        choices: Choices | None = None,
        media: MediaBatch | None = None,
        edits: Edits | None = None,
    ) -> Float[Array, "B T V"] | tuple[Float[Array, "B T V"], Cache]:
        """Return the logits of every token.

        Args:
          tokens: Token ids, right-padded.
          cache: Keys and values of earlier tokens. Token t of row b is written at slot positions[b, t] and sees slots
            up to it.
          positions: Absolute positions; 0, 1, 2, ... by default, and without a cache no others but for padding. A
            position < 0 or >= lengths marks padding, which is not written, is seen by no query, and has meaningless
            logits.
          lengths: Valid tokens of each row after this call; all of `tokens` by default. Needed with a cache.
          embeddings: Input of the first layer, from `embed`; by default the tokens' own embeddings.
          choices: Experts and blocks that replace the model's own choice for some tokens.
          media: Images and videos whose placeholders are in `tokens`, from `m3jax.media.batch`.
          edits: Functions by the name of the value they replace, such as "layers.7.attention", "layers.*.blocks" or
            "embedding", with the shapes that `intermediates` returns. A function is traced and must be pure. A function
            of two arguments also gets a dictionary of the layer's earlier values, "layer", "positions" and "lengths".

        Returns:
          Logits in float32 (float64 for a float64 model), and the new cache if one was given.

        Raises:
          ValueError: A cache without positions and lengths, arrays of other shapes or dtypes, more tokens than the
            model's context, an edit of no value, that is not pure, or that returns another shape; where the arrays are
            at hand, or under `m3jax.checks()`, also ids outside the vocabulary and lengths beyond the context or the
            cache, placeholders that are not those of the media, and edited blocks or experts that no layer can choose.
        """
        if media is not None and embeddings is not None:
            raise ValueError("a call has media or embeddings, not both: embed(tokens, features, places) joins them")
        if media is not None:
            embeddings = self.embed(tokens, self.features(media), self.places(tokens, media))
        run, call = _prepare(self, dict(
            tokens=tokens, cache=cache, positions=positions, lengths=lengths, embeddings=embeddings, choices=choices,
            edits=edits,
        ))  # fmt: skip
        out = run(self, **call)
        return out.logits if cache is None else (out.logits, out.cache)

    def hidden(
        self,
        tokens: Int[HostOrDevice, "B T"],
        *,
        cache: Cache | None = None,
        positions: Int[HostOrDevice, "B T"] | None = None,
        lengths: Int[HostOrDevice, " B"] | None = None,
        embeddings: Float[HostOrDevice, "B T D"] | None = None,
        edits: Edits | None = None,
    ) -> tuple[Float[Array, "B T D"], Cache | None]:
        """Return hidden states for `unembed` and the new cache, for callers that need the logits of a few tokens only.

        Args:
          tokens, cache, positions, lengths, embeddings, edits: As in a call.
        """
        run, call = _prepare(self, dict(
            tokens=tokens, cache=cache, positions=positions, lengths=lengths, embeddings=embeddings, edits=edits,
            logits=False,
        ))  # fmt: skip
        out = run(self, **call)
        return out.hidden, out.cache

    def run(
        self,
        tokens: Int[HostOrDevice, "B T"],
        *,
        cache: Cache | None = None,
        positions: Int[HostOrDevice, "B T"] | None = None,
        lengths: Int[HostOrDevice, " B"] | None = None,
        embeddings: Float[HostOrDevice, "B T D"] | None = None,
        choices: Choices | None = None,
        edits: Edits | None = None,
        names: tuple[str, ...] = (),
        residual_layers: tuple[int, ...] = (),
        probe: Probe | None = None,
        stop_at: int | None = None,
        logits: bool = True,
        remat: Remat = False,
    ) -> Output:
        """Run the model, and return all that the caller asks for.

        Args:
          tokens, cache, positions, lengths, embeddings, choices, edits: As in a call.
          names: Values to return, such as "layers.7.attention", "layers.*.blocks" or "final_norm", as `intermediates`
            has them; "expert_ids" and "blocks" for the choices of all layers, as `Choices` has them.
          residual_layers: Layers whose residual stream is returned: 0 is the embedding, n the output of the n-th layer,
            counted from 1. Other than with `names`, one scan runs all layers of a stack.
          probe: Function of (a layer's values by name, the call's `Context`), whose results are returned.
          stop_at: Number of layers that run; by default all, the final norm and the head.
          logits: False skips the head, for callers that need the logits of a few tokens only (`unembed`).
          remat: Activations that the backward pass recomputes (`m3jax.execution.Compute`).

        Raises:
          ValueError: A name that no value has, a layer that the model does not have, or a cache with `stop_at`, whose
            later layers would lack keys.
        """
        run, call = _prepare(self, dict(
            tokens=tokens, cache=cache, positions=positions, lengths=lengths, embeddings=embeddings, choices=choices,
            edits=edits, names=names, residual_layers=residual_layers, probe=probe, stop_at=stop_at, logits=logits,
            remat=remat,
        ))  # fmt: skip
        return run(self, **call)

    def final_norm(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """Apply the norm between the last layer and the head.

        Args:
          x: Residual stream.
        """
        return self.execution().norm(x, self.norm[...], self.config.rms_norm_eps)

    def unembed(self, hidden: Float[Array, "... D"]) -> Float[Array, "... V"]:
        """Return logits of normed hidden states; the product is not rounded to the model's dtype.

        Args:
          hidden: Hidden states after the final norm (`Output.hidden`).
        """
        return self.execution().unembed(hidden, self.lm_head[...])

    def intermediates(
        self,
        tokens: Int[HostOrDevice, "B T"],
        *,
        names: Sequence[str] | None = None,
        edits: Edits | None = None,
        stop_at: int | None = None,
        cache: Cache | None = None,
        positions: Int[HostOrDevice, "B T"] | None = None,
        lengths: Int[HostOrDevice, " B"] | None = None,
        embeddings: Float[HostOrDevice, "B T D"] | None = None,
        choices: Choices | None = None,
    ) -> Intermediates | tuple[Intermediates, Cache]:
        """Return named values on the way from tokens to logits: all of them, or those that are asked for.

        Args:
          tokens: Token ids, right-padded.
          names: Values to return, such as "layers.7.attention", "layers.*.blocks" or "final_norm"; no other is held
            beyond its layer. All by default.
          stop_at: Number of layers that run; by default all, the final norm and the head.
          edits, cache, positions, lengths, embeddings, choices: As in a call.

        Returns:
          Without names "embedding" [B T D], "final_norm" [B T D], "logits" [B T V], and "layers", one dict a layer:
          input, attention_norm, q [B T N H], k and v [B T K H], attention [B T N H], attention_out, ffn_norm, ffn_out,
          output [B T D]; in sparse layers index_q [B T K I], index_k [B T I], block_scores [B K T M], blocks [B K T J];
          in MoE layers expert_ids and expert_weights [B T A]. With names these values alone, by full name
          ("layers.7.attention"), also where "layers.*." asked for them. With a cache, that and the new cache.

        Raises:
          ValueError: A name that no value has, or a cache with `stop_at`, whose later layers would lack keys.
        """
        asked = value_names.all_names(self.config, self.dense, stop_at) if names is None else tuple(names)
        out = self.run(
            tokens, cache=cache, positions=positions, lengths=lengths, embeddings=embeddings, choices=choices,
            edits=edits, names=asked, stop_at=stop_at, logits="logits" in asked,
        )  # fmt: skip
        values = value_names.by_layer(out.values) if names is None else out.values
        return values if cache is None else (values, out.cache)

    def recorded_names(self, names: tuple[str, ...]) -> tuple[str, ...]:
        """Return full names of values that a call without logits has, with "layers.*." written out.

        Args:
          names: Names such as "layers.3.output", "layers.*.blocks" or "final_norm".

        Raises:
          ValueError: A name that no value has, with the nearest ones; "logits".
        """
        value_names.check_names(names, "names", self.config, self.dense)
        if "logits" in names:
            raise ValueError("names has 'logits', which a call that records does not compute: ask for 'final_norm'")
        return value_names.expand(names, self.config, self.dense)

    def layer(self, index: int) -> Decoder:
        """Return one layer's parameters, as a `Decoder` of depth 1: cut out of the stacks, with a layer axis of size 1.

        Args:
          index: 0 to num_hidden_layers - 1.

        Raises:
          ValueError: another index.
        """
        if not 0 <= index < self.config.num_hidden_layers:
            raise ValueError(f"layer {index}: the model has layers 0 to {self.config.num_hidden_layers - 1}")
        layers = [(stack, layer) for stack in self.stacks for layer in range(stack.depth)]
        stack, layer = layers[index]
        return jax.tree.map(lambda parameter: parameter[layer : layer + 1], stack)

    def summary(self) -> str:
        """Return a table of all parameters: name, shape, dtype, how many numbers and bytes."""
        return table(self)

    def __setattr__(self, name: str, value: object) -> None:
        if name == "_nnx_tabulate_id":  # refused before nnx replaces the methods of these classes, and leaves them so
            raise NotImplementedError("nnx.tabulate cannot follow layers that are scanned: see model.summary()")
        super().__setattr__(name, value)

    def new_cache(self, pages: int, batch: int, blocks: int, **types) -> Cache:
        """Return an empty cache for this model, on the model's mesh.

        Args:
          pages: how many there are.
          batch: rows of the table.
          blocks: how many pages a row can have.
          **types: `kv_dtype`, `index_dtype`, `scales` and `device_pages` of `Cache.pool`.
        """
        return Cache.pool(self.config, pages, batch, blocks, str(self.dtype), self.mesh, **types)

    @property
    def mesh(self) -> Mesh | None:
        """The devices that parameters are divided over; None for one device."""
        return self.compute.mesh

    @property
    def dtype(self) -> jnp.dtype:
        """The dtype of weights and activations (the router's is its own)."""
        return self.embed_tokens.dtype

    def execution(self, has_cache: bool = False, remat: Remat = False) -> Execution:
        """Return what computes a call, on the platform that a program is traced for.

        Args:
          has_cache: whether the call has a cache.
          remat: what the backward pass recomputes (`Compute`).
        """
        # Recomputing is a matter of one call, all else of the model.
        compute = replace(self.compute, remat=remat)
        return execution_of(compute, self.config, self.dtype, self.stacks, has_cache)


def _run(
    model: M3,
    tokens: Int[Array, "B T"],
    *,
    cache: Cache | None = None,
    positions: Int[Array, "B T"] | None = None,
    lengths: Int[Array, " B"] | None = None,
    embeddings: Float[Array, "B T D"] | None = None,
    choices: Choices | None = None,
    edits: Edits | None = None,
    names: tuple[str, ...] = (),
    residual_layers: tuple[int, ...] = (),
    probe: Probe | None = None,
    stop_at: int | None = None,
    logits: bool = True,
    remat: Remat = False,
) -> Output:
    """Run a model, with the arguments of `M3.run`."""
    config, how = model.config, model.execution(cache is not None, remat)
    value_names.check_reach(config, cache is not None, residual_layers, stop_at)
    # Right-padded rows begin at position 0: blocks are counted from a row's first token (T6).
    batch, length = tokens.shape
    if positions is None:
        positions = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (batch, length))
    if lengths is None:
        lengths = jnp.full((batch,), length, jnp.int32)
    positions, lengths = positions.astype(jnp.int32), lengths.astype(jnp.int32)
    angles = partial(rope_table, rotary_dim=config.rotary_dim, theta=config.rope_theta, dtype=model.dtype)
    cos, sin = how.each_token(angles)(positions)  # [B T R] twice: one table for all layers
    places = Places.nowhere(positions) if cache is None else cache.places(positions, lengths)
    rules = selection_rules(config, model.score)
    of_layers = tuple(name for name in names if name not in CHOICES)
    of_choices = tuple(name for name in names if name in CHOICES)
    taps = Taps(edits or {}, of_layers, of_choices, residual_layers, probe, stop_at)
    context = Context(positions, lengths, cos, sin, places, config, rules, model.dense, how, choices, taps)

    tap = taps.outside(positions, lengths)
    x = tap("embedding", model.embed(tokens) if embeddings is None else embeddings)
    layers, hidden = run_layers(model.stacks, x, context, cache), None
    if stop_at is None:
        hidden = tap("final_norm", model.final_norm(layers.x))
    words = tap("logits", model.unembed(hidden)) if logits and stop_at is None else None

    values = tap.kept
    for layer, of_layer in taps.by_layer(layers.kept, [stack.depth for stack in model.stacks]).items():
        values |= {f"layers.{layer}.{name}": value for name, value in of_layer.items()}
    full_names = value_names.expand(of_layers, config, model.dense)
    values = {name: values[name] for name in full_names if name in values}
    values |= {name: join_choices(name, layers.kept, config, batch, length) for name in of_choices}
    residuals = None if layers.residuals is None else jnp.moveaxis(layers.residuals[:-1], 0, 2)
    return Output(words, hidden, layers.cache, values, residuals, layers.probed)


_prepare = model_call(_run, "names", "residual_layers", "probe", "stop_at", "logits", "remat")
