"""MiniMax-M3's text model."""

import copy

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int, PyTree

from m3jax.cache import Cache
from m3jax.config import M3Config
from m3jax.model.context import Context
from m3jax.model.decoder import Decoder, Probe, Taps
from m3jax.model.layers import gemma_norm
from m3jax.model.params import Make
from m3jax.msa import block_scores
from m3jax.msa.backends import check_name
from m3jax.numerics import einsum


class M3(nnx.Module):
    """The model: a pytree of parameters with a static configuration.

    Call it inside or outside `jax.jit`; pass it as an argument. `config`, `mesh`, `schedule` and `backend` are static;
    the last two are those of `m3jax.msa.api.attention`. `schedule` can also be "dense": no selection at all, as in the
    dense warm-up of training. A model trained sparse does not work dense (T18).
    """

    def __init__(
        self, config: M3Config, make: Make, mesh: Mesh | None = None, schedule: str = "auto", backend: str = "auto"
    ):
        vocab = ((config.vocab_size, config.hidden_size), ("vocab", None), None)
        self.config = config
        self.mesh = mesh
        self.schedule = schedule
        self.backend = backend
        self.embed_tokens = nnx.Param(make(*vocab, 1))
        self.stacks = nnx.List([Decoder(stack, config, make) for stack in config.stacks])
        self.norm = nnx.Param(make((config.hidden_size,), (None,), None, None))
        self.lm_head = nnx.Param(make(*vocab, config.hidden_size))

    def with_schedule(self, schedule: str) -> "M3":
        """The same parameters under another schedule."""
        other = copy.copy(self)
        other.schedule = schedule
        return other

    def with_backend(self, backend: str) -> "M3":
        """The same parameters on another backend: one of `m3jax.msa.BACKENDS`.

        Raises:
          ValueError: an unknown one.
        """
        check_name(backend)
        other = copy.copy(self)
        other.backend = backend
        return other

    def new_cache(self, pages: int, batch: int, blocks: int, **types) -> Cache:
        """An empty `Cache.pool` for this model, where the model lies."""
        return Cache.pool(self.config, pages, batch, blocks, str(self.dtype), self.mesh, **types)

    @property
    def dtype(self) -> jnp.dtype:
        """The dtype of weights and activations (the router's is its own)."""
        return self.embed_tokens.dtype

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        *,
        cache: Cache | None = None,
        positions: Int[Array, "B T"] | None = None,
        lengths: Int[Array, " B"] | None = None,
    ) -> Float[Array, "B T V"] | tuple[Float[Array, "B T V"], Cache]:
        """Logits of every token.

        Args:
          tokens: token ids, right-padded.
          cache: what was seen before; token t of row b is written at slot positions[b, t] and sees slots up to it.
          positions: absolute positions; 0, 1, 2, ... by default. A position < 0 or >= lengths marks padding, which
            is not written, is seen by nobody, and has logits that mean nothing.
          lengths: valid tokens of each row after this call; all of `tokens` by default. Needed with a cache.

        Returns:
          Logits in float32 (float64 for a float64 model), and the new cache if one was given.

        Raises:
          ValueError: a cache without positions and lengths.
        """
        hidden, new = self.hidden(tokens, cache=cache, positions=positions, lengths=lengths)
        logits = self.unembed(hidden)
        return logits if cache is None else (logits, new)

    def hidden(
        self,
        tokens: Int[Array, "B T"],
        *,
        cache: Cache | None = None,
        positions: Int[Array, "B T"] | None = None,
        lengths: Int[Array, " B"] | None = None,
    ) -> tuple[Float[Array, "B T D"], Cache | None]:
        """The residual stream after the final norm, for callers that need the logits of a few tokens only."""
        x, cache, _ = self.trunk(tokens, cache=cache, positions=positions, lengths=lengths)
        return self.final_norm(x), cache

    def final_norm(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """The norm between the last layer and the head."""
        return gemma_norm(x, self.norm[...], self.config.rms_norm_eps).astype(x.dtype)

    def unembed(self, hidden: Float[Array, "... D"]) -> Float[Array, "... V"]:
        """Logits of normed hidden states; the product is not rounded to the model's dtype."""
        return einsum("...d,vd->...v", hidden, self.lm_head[...])

    def trunk(
        self,
        tokens: Int[Array, "B T"],
        *,
        cache: Cache | None = None,
        positions: Int[Array, "B T"] | None = None,
        lengths: Int[Array, " B"] | None = None,
        probe: Probe | None = None,
        remat: bool = False,
    ) -> tuple[Float[Array, "B T D"], Cache | None, list[PyTree[Array]]]:
        """The residual stream before the final norm, the cache, and what `probe` kept of each stack."""
        return self._run(tokens, cache, positions, lengths, probe, remat)[:3]

    def tapped(
        self,
        tokens: Int[Array, "B T"],
        layers: tuple[int, ...],
        *,
        cache: Cache | None = None,
        positions: Int[Array, "B T"] | None = None,
        lengths: Int[Array, " B"] | None = None,
    ) -> tuple[Float[Array, "B T D"], Float[Array, "B T A D"], Cache | None]:
        """`hidden`, and the residual stream at some layers, before any norm: what a draft reads.

        Args:
          tokens: token ids, right-padded.
          layers: A of them: 0 is the embedding, n the output of the n-th layer, counted from 1.
          cache: as in a call.
          positions: as in a call.
          lengths: as in a call.

        Returns:
          (residual stream after the final norm, taps, cache).

        Raises:
          ValueError: a layer that the model does not have.
        """
        if not all(0 <= n <= self.config.num_hidden_layers for n in layers):
            raise ValueError(f"layers = {layers}: the model has 0 (the embedding) to {self.config.num_hidden_layers}")
        x, cache, _, taps = self._run(tokens, cache, positions, lengths, layers=layers)
        return self.final_norm(x), jnp.moveaxis(taps.values[:-1], 0, 2), cache

    def _run(self, tokens, cache, positions, lengths, probe=None, remat=False, layers=()):
        """What `trunk` returns, and the taps."""
        positions, lengths = _defaults(tokens, cache, positions, lengths)
        static = self.schedule, self.mesh, self.backend
        context = Context.make(positions, lengths, cache, self.config, self.dtype, *static)
        x = self.embed_tokens[...][tokens]
        taps = Taps.start(x, layers) if layers else None
        stacks, kept = [], []
        for i, stack in enumerate(self.stacks):
            own = None if cache is None else cache.stacks[i]
            x, own, values, taps = stack(x, context.of_stack(i, cache), own, self.config, probe, remat, taps)
            stacks.append(own)
            kept.append(values)
        return x, None if cache is None else cache.replace(stacks=tuple(stacks)), kept, taps

    def intermediates(
        self, tokens: Int[Array, "B T"], *, lengths: Int[Array, " B"] | None = None
    ) -> dict[str, Array | list[dict[str, Array]]]:
        """Named values of every layer, for comparison with another engine.

        Args:
          tokens: token ids, right-padded.
          lengths: valid tokens of each row; all by default.

        Returns:
          "embedding" [B T D], "final_norm" [B T D], "logits" [B T V], and "layers", one dict a layer: input,
          attention_norm, q [B T N H], k and v [B T K H], attention [B T N H], attention_out, ffn_norm, ffn_out, output
          [B T D]; in sparse layers index_q [B T K I], index_k [B T I], block_scores [B K T M], blocks [B K T J]; in
          MoE layers expert_ids and expert_weights [B T A].
        """
        x, _, kept = self.trunk(tokens, lengths=lengths, probe=self._probe)
        final = self.final_norm(x)
        layers = [
            jax.tree.map(lambda a, i=i: a[i], values)
            for stack, values in zip(self.stacks, kept, strict=True)
            for i in range(stack.depth)
        ]
        out = {"embedding": self.embed_tokens[...][tokens], "layers": layers}
        return out | {"final_norm": final, "logits": self.unembed(final)}

    def _probe(self, values: dict[str, Array], context: Context) -> dict[str, Array]:
        if "blocks" not in values:
            return values
        args = (values["index_q"], values["index_k"], context.positions, context.lengths)
        scores = block_scores(*args, self.config.index_block_size, self.config.index_score_type)
        return values | {"block_scores": scores}


def _defaults(tokens, cache, positions, lengths):
    if cache is not None and (positions is None or lengths is None):
        raise ValueError("a call with a cache needs positions [B T] and lengths [B]")
    batch, length = tokens.shape
    if positions is None:
        positions = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (batch, length))
    if lengths is None:
        lengths = jnp.full((batch,), length, jnp.int32)
    return positions.astype(jnp.int32), lengths.astype(jnp.int32)
