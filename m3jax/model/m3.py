"""MiniMax-M3: the text model, and the vision tower where it has one."""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int, PyTree

from m3jax.cache import Cache, CallPages, Places
from m3jax.config import M3Config
from m3jax.execution import (
    Compute,
    Edit,
    Execution,
    Inside,
    KeepBoth,
    KeepNamed,
    KeepNothing,
    KeepOfEach,
    KeepResidual,
    Probe,
    Remat,
    execution_of,
    run_layers,
    take_apart,
)
from m3jax.make import Frozen, Make
from m3jax.media import MediaBatch
from m3jax.model.calls import model_call
from m3jax.model.choices import NAMES, Choices, shapes_of
from m3jax.model.context import Context, selection_rules
from m3jax.model.decoder import Decoder
from m3jax.model.layers import rope_table
from m3jax.model.media import WithTower, vision_of
from m3jax.model.names import OF_LAYERS, check_recorded, expand
from m3jax.model.summary import table
from m3jax.msa import SCHEDULES
from m3jax.msa.rules import check_score
from m3jax.mxfp8 import with_activations
from m3jax.ops import check_backend_name, check_schedule

Edits = Mapping[str, Edit]
Intermediates = dict[str, Array | list[dict[str, Array]]]


class M3(WithTower):
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

    @model_call()
    def __call__(
        self,
        tokens: Int[Array, "B T"],
        *,
        cache: Cache | None = None,
        positions: Int[Array, "B T"] | None = None,
        lengths: Int[Array, " B"] | None = None,
        embeddings: Float[Array, "B T D"] | None = None,
        choices: Choices | None = None,
        media: MediaBatch | None = None,
        edits: Edits | None = None,
    ) -> Float[Array, "B T V"] | tuple[Float[Array, "B T V"], Cache]:
        """Return the logits of every token.

        Args:
          tokens: token ids, right-padded.
          cache: what was seen before; token t of row b is written at slot positions[b, t] and sees slots up to it.
          positions: absolute positions; 0, 1, 2, ... by default, and without a cache no others but for padding. A
            position < 0 or >= lengths marks padding, which is not written, is seen by no query, and has meaningless
            logits.
          lengths: valid tokens of each row after this call; all of `tokens` by default. Needed with a cache.
          embeddings: what the first layer reads, from `embed`; by default the tokens' own.
          choices: experts and blocks that some tokens take in place of those that the model would choose.
          media: the images and videos whose placeholders are in `tokens`, from `m3jax.media.batch`.
          edits: functions of named values, by names such as "layers.7.attention", "layers.*.blocks" or "embedding", of
            the shapes that `intermediates` has: what a function returns stands in the value's place from where it
            arises. It is traced and must be pure. One of two arguments also gets a dictionary of the layer's earlier
            values, "layer", "positions" and "lengths".

        Returns:
          Logits in float32 (float64 for a float64 model), and the new cache if one was given.

        Raises:
          ValueError: a cache without positions and lengths, arrays of other shapes or dtypes, more tokens than the
            model's context, an edit of no value, that is not pure, or that returns another shape; where the arrays are
            at hand, or under `m3jax.checks()`, also ids outside the vocabulary and lengths beyond the context or the
            cache, placeholders that are not those of the media, and edited blocks or experts that no layer can choose.
        """
        if media is not None:
            embeddings = self.embed(tokens, self.features(media), self.places(tokens, media))
        x, context = self._start(tokens, cache, positions, lengths, embeddings, choices, edits=edits)
        x, cache, *_ = run_layers(self.stacks, x, context, cache, KeepNothing())
        final_norm = context.changed("final_norm", self.final_norm(x))
        logits = context.changed("logits", self.unembed(final_norm))
        return logits if cache is None else (logits, cache)

    def _start(
        self,
        tokens: Int[Array, "B T"],
        cache: Cache | None,
        positions: Int[Array, "B T"] | None,
        lengths: Int[Array, " B"] | None,
        embeddings: Float[Array, "B T D"] | None,
        choices: Choices | None = None,
        remat: Remat = False,
        edits: Edits | None = None,
        names: tuple[str, ...] = (),
        stop_at: int | None = None,
    ) -> tuple[Float[Array, "B T D"], Context]:
        """Return what the first layer reads, and what all layers of a call share."""
        # Right-padded rows begin at position 0: blocks are counted from a row's first token (T6).
        batch, length = tokens.shape
        if positions is None:
            positions = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (batch, length))
        if lengths is None:
            lengths = jnp.full((batch,), length, jnp.int32)
        positions, lengths = positions.astype(jnp.int32), lengths.astype(jnp.int32)
        how, config = self.execution(cache is not None, remat), self.config
        angles = partial(rope_table, rotary_dim=config.rotary_dim, theta=config.rope_theta, dtype=self.dtype)
        cos, sin = how.each_token(angles)(positions)  # [B T R] twice: one table for all layers
        places = Places.nowhere(positions) if cache is None else cache.places(positions, lengths)
        rules = selection_rules(config, self.score)
        inside = Inside(edits or {}, names, stop_at)
        context = Context(positions, lengths, cos, sin, places, config, rules, self.dense, how, choices, inside)
        return context.changed("embedding", self.embed(tokens) if embeddings is None else embeddings), context

    def final_norm(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """Apply the norm between the last layer and the head.

        Args:
          x: the residual stream.
        """
        return self.execution().norm(x, self.norm[...], self.config.rms_norm_eps)

    def unembed(self, hidden: Float[Array, "... D"]) -> Float[Array, "... V"]:
        """Return logits of normed hidden states; the product is not rounded to the model's dtype.

        Args:
          hidden: as `hidden` returns them.
        """
        return self.execution().unembed(hidden, self.lm_head[...])

    @model_call()
    def hidden(
        self,
        tokens: Int[Array, "B T"],
        *,
        cache: Cache | None = None,
        positions: Int[Array, "B T"] | None = None,
        lengths: Int[Array, " B"] | None = None,
        embeddings: Float[Array, "B T D"] | None = None,
        edits: Edits | None = None,
    ) -> tuple[Float[Array, "B T D"], Cache | None]:
        """Return the residual stream after the final norm, for callers that need the logits of a few tokens only.

        Args:
          tokens: [B T] token ids, right-padded.
          cache, positions, lengths, embeddings, edits: as in a call.

        Returns:
          (hidden states in the model's dtype, the new cache or None).
        """
        x, context = self._start(tokens, cache, positions, lengths, embeddings, edits=edits)
        x, cache, *_ = run_layers(self.stacks, x, context, cache, KeepNothing())
        return context.changed("final_norm", self.final_norm(x)), cache

    @model_call("probe", "remat")
    def trunk(
        self,
        tokens: Int[Array, "B T"],
        *,
        cache: Cache | None = None,
        positions: Int[Array, "B T"] | None = None,
        lengths: Int[Array, " B"] | None = None,
        embeddings: Float[Array, "B T D"] | None = None,
        choices: Choices | None = None,
        probe: Probe | None = None,
        remat: Remat = False,
    ) -> tuple[Float[Array, "B T D"], Cache | None, list[PyTree[Array]]]:
        """Run all layers, without the final norm and the head.

        Args:
          tokens: [B T] token ids, right-padded.
          cache, positions, lengths, embeddings, choices: as in a call.
          probe: what to keep of each layer's named values (`m3jax.execution.Probe`); None keeps nothing.
          remat: what the backward pass recomputes (`m3jax.execution.Compute`).

        Returns:
          (residual stream before the final norm, the new cache or None, what `probe` kept of each stack).
        """
        x, context = self._start(tokens, cache, positions, lengths, embeddings, choices, remat)
        keep = KeepNothing() if probe is None else KeepOfEach(probe)
        x, cache, kept, _ = run_layers(self.stacks, x, context, cache, keep)
        return x, cache, kept

    @model_call("layers")
    def tapped(
        self,
        tokens: Int[Array, "B T"],
        layers: tuple[int, ...],
        *,
        cache: Cache | None = None,
        positions: Int[Array, "B T"] | None = None,
        lengths: Int[Array, " B"] | None = None,
        embeddings: Float[Array, "B T D"] | None = None,
        edits: Edits | None = None,
    ) -> tuple[Float[Array, "B T D"], Float[Array, "B T A D"], Cache | None]:
        """Return the final hidden states, and the residual stream at some layers, before any norm, for a draft to read.

        Args:
          tokens: token ids, right-padded.
          layers: A of them: 0 is the embedding, n the output of the n-th layer, counted from 1.
          cache, positions, lengths, embeddings, edits: as in a call.

        Returns:
          (residual stream after the final norm, taps, cache).

        Raises:
          ValueError: no layer, one twice, or one that the model does not have.
        """
        depth = self.config.num_hidden_layers
        if not layers or len(set(layers)) < len(layers) or not all(0 <= n <= depth for n in layers):
            raise ValueError(f"layers = {layers}: the model has 0 (the embedding) to {depth}; give some, each once")
        x, context = self._start(tokens, cache, positions, lengths, embeddings, edits=edits)
        # The last place of the memory is where layers that nobody asked for have written (`KeepResidual`).
        x, cache, _, taps = run_layers(self.stacks, x, context, cache, KeepResidual(layers))  # [A + 1, B, T, D]
        return context.changed("final_norm", self.final_norm(x)), jnp.moveaxis(taps[:-1], 0, 2), cache

    @model_call("names", "layers")
    def recorded(
        self,
        tokens: Int[Array, "B T"],
        names: tuple[str, ...],
        layers: tuple[int, ...] = (),
        *,
        cache: Cache | None = None,
        positions: Int[Array, "B T"] | None = None,
        lengths: Int[Array, " B"] | None = None,
        embeddings: Float[Array, "B T D"] | None = None,
        choices: Choices | None = None,
        edits: Edits | None = None,
    ) -> tuple[Float[Array, "B T D"], Float[Array, "B T A D"] | None, dict[str, Array], Cache | None]:
        """Return the final hidden states, and the choices that the layers made on the way, or other named values.

        Args:
          tokens: token ids, right-padded.
          names: of choices of all layers, "expert_ids" and "blocks", or of values, as of `intermediates`; not "logits".
          layers: whose residual stream is kept too, as in `tapped`.
          cache, positions, lengths, embeddings, choices, edits: as in a call.

        Returns:
          (residual stream after the final norm, taps or None, choices by name as `Choices` has them and values
          [B T ...], cache).

        Raises:
          ValueError: another name.
        """
        of_choices, of_values = (tuple(n for n in names if (n in NAMES) is is_choice) for is_choice in (True, False))
        check_recorded(of_values, self.config, self.dense)
        inputs = tokens, cache, positions, lengths, embeddings, choices
        x, context = self._start(*inputs, edits=edits, names=of_values)
        found, of_each = {"embedding": x}, KeepNamed(of_choices)
        keep = KeepBoth(KeepResidual(layers), of_each) if layers else of_each
        x, cache, kept, taps = run_layers(self.stacks, x, context, cache, keep)
        found["final_norm"] = context.changed("final_norm", self.final_norm(x))
        of_layers = context.inside.of_layers(kept, [stack.depth for stack in self.stacks])
        for layer, values in of_layers.items():
            for name, value in values.items():  # blocks and their scores have heads before tokens: [B K T ...]
                is_by_head = name in ("blocks", "block_scores")
                found[f"layers.{layer}.{name}"] = value.swapaxes(1, 2) if is_by_head else value  # [B T ...]
        records = {name: found[name] for name in expand(of_values, self.config, self.dense)}
        for name, shape in shapes_of(self.config, *tokens.shape).items():
            if name in of_choices:
                of_stacks = [of_stack[name] for of_stack in kept if name in of_stack]  # [L B T A], [L B K T J]
                order = (1, 2, 0, 3) if name == "expert_ids" else (1, 3, 0, 2, 4)
                records[name] = (
                    jnp.transpose(jnp.concatenate(of_stacks), order) if of_stacks else jnp.zeros(shape, jnp.int32)
                )
        return found["final_norm"], jnp.moveaxis(taps[:-1], 0, 2) if layers else None, records, cache

    def recorded_names(self, names: tuple[str, ...]) -> tuple[str, ...]:
        """Return the full names of values for `recorded`, with "layers.*." written out for the layers that have them.

        Args:
          names: such as "layers.3.output", "layers.*.blocks" or "final_norm".

        Raises:
          ValueError: a name that no value has, with the nearest ones; "logits".
        """
        check_recorded(names, self.config, self.dense)
        return expand(names, self.config, self.dense)

    @model_call("names", "stop_at")
    def intermediates(
        self,
        tokens: Int[Array, "B T"],
        *,
        names: Sequence[str] | None = None,
        edits: Edits | None = None,
        stop_at: int | None = None,
        cache: Cache | None = None,
        positions: Int[Array, "B T"] | None = None,
        lengths: Int[Array, " B"] | None = None,
        embeddings: Float[Array, "B T D"] | None = None,
        choices: Choices | None = None,
    ) -> Intermediates | tuple[Intermediates, Cache]:
        """Return named values on the way from tokens to logits: all of them, or those that are asked for.

        Args:
          tokens: token ids, right-padded.
          names: of the values to return, such as "layers.7.attention", "layers.*.blocks" or "final_norm"; no other is
            held beyond its layer. All by default.
          edits: as in a call.
          stop_at: layers that run; by default all, the final norm and the head.
          cache: as in a call; a chunk or a step of a longer row.
          positions: as in a call; with a cache.
          lengths: valid tokens of each row; all by default.
          embeddings, choices: as in a call.

        Returns:
          Without names "embedding" [B T D], "final_norm" [B T D], "logits" [B T V], and "layers", one dict a layer:
          input, attention_norm, q [B T N H], k and v [B T K H], attention [B T N H], attention_out, ffn_norm, ffn_out,
          output [B T D]; in sparse layers index_q [B T K I], index_k [B T I], block_scores [B K T M], blocks [B K T J];
          in MoE layers expert_ids and expert_weights [B T A]. With names these values alone, by full name
          ("layers.7.attention"), also where "layers.*." asked for them. With a cache, that and the new cache.

        Raises:
          ValueError: a name that no value has, or a cache with `stop_at`, whose later layers would lack keys.
        """
        if cache is not None and stop_at is not None:
            raise ValueError(
                "stop_at with a cache: the layers behind it would lack these tokens; leave one of them out"
            )
        depth = self.config.num_hidden_layers if stop_at is None else stop_at
        asked = tuple(f"layers.*.{name}" for name in OF_LAYERS) if names is None else names
        inputs = tokens, cache, positions, lengths, embeddings, choices
        x, context = self._start(*inputs, edits=edits, names=asked, stop_at=stop_at)
        outside = {"embedding": x}
        x, cache, kept, _ = run_layers(self.stacks, x, context, cache, KeepNamed())
        if stop_at is None:
            outside["final_norm"] = context.changed("final_norm", self.final_norm(x))
            outside["logits"] = context.changed("logits", self.unembed(outside["final_norm"]))
        layers = context.inside.of_layers(kept, [stack.depth for stack in self.stacks])
        if names is None:
            found = outside | {"layers": [layers[layer] for layer in range(depth)]}
        else:
            found = outside | {f"layers.{n}.{name}": x for n, layer in layers.items() for name, x in layer.items()}
            found = {name: found[name] for name in expand(names, self.config, self.dense) if name in found}
        return found if cache is None else (found, cache)

    def with_schedule(self, schedule: str) -> "M3":
        """Return the model with the same parameters under another schedule.

        Args:
          schedule: "auto", or one of `m3jax.msa.SCHEDULES`.

        Raises:
          ValueError: an unknown one.
        """
        if schedule == "dense":
            raise ValueError("schedule = 'dense': attention to every block is another function; use with_dense()")
        check_schedule(schedule, SCHEDULES)
        return self._computed(schedule=schedule)

    def with_backend(self, backend: str) -> "M3":
        """Return the model with the same parameters on another backend.

        Args:
          backend: one of `m3jax.ops.BACKENDS`.

        Raises:
          ValueError: an unknown one.
        """
        check_backend_name(backend)
        return self._computed(backend=backend)

    def with_dense(self, dense: bool = True) -> "M3":
        """Return the model attending to every block, without selection, as in the dense warm-up of training.

        The parameters are the same, but that is another function: a model trained sparse does not work dense (T18).

        Args:
          dense: False selects again.
        """
        return self._with(dense=dense)

    def with_score(self, score: str) -> "M3":
        """Return the model with the same parameters and blocks that are scored in another way.

        Args:
          score: how the scores of a block's tokens become its own: "max" or "lse" (`m3jax.msa.SelectionRules`).

        Raises:
          ValueError: an unknown one.
        """
        check_score(score)
        return self._with(score=score)

    def with_invariance(self, invariant: bool = True) -> "M3":
        """Return the model in its invariant mode: a token's own row alone decides the order of its sums.

        A token's bits are then the same alone and in a batch, in one chunk and in many, in a decode step and among
        proposals, on one backend. `Engine(..., invariant=True)` does the same for whole requests.

        Args:
          invariant: False computes as it is fastest again.
        """
        if not invariant:
            return self._computed(schedule="auto", expert_path="auto", invariant=False)
        return self._computed(schedule="invariant", expert_path="in_fixed_tiles", invariant=True, call_pages=CallPages)

    def with_activations(self, activations: str | None) -> "M3":
        """Return the model with the same MXFP8 weights and products that quantise activations too, or do not.

        With "mxfp8" each token's channels are rounded to MXFP8, in blocks of 32, before they are multiplied by a weight
        in MXFP8. That is another function ("W8A8"): the one of engines on chips that multiply MXFP8 numbers.

        Args:
          activations: "mxfp8", or None for the model's dtype.

        Raises:
          ValueError: something else, or a model whose weights are not in MXFP8.
        """
        if not self.is_mxfp8:
            raise ValueError(f"activations = {activations!r}: no weight is in MXFP8; see m3jax.quantize")
        return with_activations(self, activations)

    @property
    def is_mxfp8(self) -> bool:
        """True if the matrices of linear layers are in MXFP8."""
        return isinstance(self.stacks[0].self_attn.q_proj, Frozen)

    def with_training_paths(self, call_pages: Callable[..., CallPages], expert_path: str) -> "M3":
        """Return the model with calls without a cache computed in other ways, as training wants them.

        Args:
          call_pages: called with block_size in place of `m3jax.cache.CallPages`, for each stack in each call.
          expert_path: "auto", "trained", or one of `m3jax.ops.EXPERT_PATHS`, as of `run_experts`.
        """
        return self._computed(call_pages=call_pages, expert_path=expert_path)

    def _computed(self, **settings: object) -> "M3":
        """Return a copy that shares the parameters, computed in another way."""
        return self._with(compute=replace(self.compute, **settings))

    def _with(self, **fields: object) -> "M3":
        """Return a copy that shares the parameters, with some static fields set."""
        other = copy.copy(self)
        for name, value in fields.items():
            setattr(other, name, value)
        return other

    def with_layers_apart(self, num_rows: int) -> "M3":
        """Return the model with separate parameters for each layer, so that a call does not scan over them.

        For a program that runs many decode steps in a loop, before the loop: what is cut out of the stacks is copied
        once, where a scan copies it in each step. What a kernel reads where it lies stays there, experts too. The
        program grows with the number of layers.

        Args:
          num_rows: tokens of a call.
        """
        how = self.execution(has_cache=True)
        return self._with(stacks=nnx.List([take_apart(stack, how, num_rows, self.dtype) for stack in self.stacks]))

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
