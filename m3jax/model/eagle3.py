"""EAGLE3's draft: one Llama layer that goes on from the target's hidden states."""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from m3jax.cache import LayerCall, Places, StackCache
from m3jax.config import FULL, M3Config
from m3jax.execution import Compute, Execution, Fast, OverMesh, Projections, Tap
from m3jax.make import MakeArrays
from m3jax.model.build import MakeEach, dtype_name, parameter_dtype
from m3jax.model.layers import apply_rope, rope_table
from m3jax.numerics import accumulator, einsum
from m3jax.ops import Heads
from m3jax.parallel import as_mesh, sharding

ONE_DEVICE = Compute()


@dataclass(frozen=True, kw_only=True)
class Eagle3Config:
    """Every number of a draft that changes its arithmetic.

    Attributes:
      hidden_size: D, the target's too.
      vocab_size: V, of the target.
      draft_vocab_size: tokens that the draft can propose.
      taps: where the target's residual stream is read, low layer first: 0 is the embedding, n the output of the n-th
        layer (counted from 1).
      fc_norm: whether each tap is normed before `fc`.
      norm_output: whether the next draft step goes on from the output after the final norm, or before it.
      norm_before_residual: whether the residual is the normed feature.
      own_embedding: whether the draft has an embedding, or reads the target's.
      own_head: the same of the head. The final norm is always its own.

    Raises:
      ValueError: a number that no draft can have.
    """

    hidden_size: int
    vocab_size: int
    draft_vocab_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    taps: tuple[int, ...]
    rms_norm_eps: float = 1e-6
    rope_theta: float = 1e4
    fc_norm: bool = False
    norm_output: bool = False
    norm_before_residual: bool = False
    own_embedding: bool = True
    own_head: bool = True

    def __post_init__(self):
        counts = ("hidden_size", "vocab_size", "draft_vocab_size", "num_attention_heads", "num_key_value_heads",
                  "head_dim", "intermediate_size")  # fmt: skip
        problems = [f"{n} = {getattr(self, n)!r}: must be at least 1" for n in counts if not getattr(self, n) >= 1]
        if not problems and self.num_attention_heads % self.num_key_value_heads:
            problems.append(
                f"num_attention_heads = {self.num_attention_heads} is no multiple of num_key_value_heads = "
                f"{self.num_key_value_heads}"
            )
        if self.head_dim % 2:
            problems.append(f"head_dim = {self.head_dim}: must be even, all of it is rotated")
        if not self.taps or list(self.taps) != sorted(set(self.taps)) or self.taps[0] < 0:
            problems.append(f"tapped layers {list(self.taps)}: need different ones in ascending order, none below 0")
        if self.draft_vocab_size != self.vocab_size and not self.own_head:
            problems.append(f"draft_vocab_size = {self.draft_vocab_size}: needs a head of the draft's own")
        if problems:
            raise ValueError("unsupported draft: " + "; ".join(problems))

    def check_fits(self, target: M3Config) -> None:
        """Raise ValueError, with every reason, if this draft was not made for such a target."""
        layers = target.num_hidden_layers
        pairs = (("hidden_size", target.hidden_size), ("vocab_size", target.vocab_size))
        problems = [
            f"its {name} is {getattr(self, name)}, the target's {target_size}"
            for name, target_size in pairs
            if getattr(self, name) != target_size
        ]
        if self.taps[-1] > layers:
            problems.append(f"it reads the target after layers {list(self.taps)}, and the target has {layers} layers")
        if self.draft_vocab_size > target.vocab_size:
            problems.append(f"it proposes {self.draft_vocab_size} tokens of a vocabulary of {target.vocab_size}")
        if problems:
            raise ValueError("the draft does not fit the target: " + "; ".join(problems))

    def as_layer(self, block_size: int) -> M3Config:
        """Return the draft's layer as a configuration of dense attention over pages of `block_size` tokens."""
        return M3Config(
            vocab_size=self.vocab_size, hidden_size=self.hidden_size, num_hidden_layers=1,
            num_attention_heads=self.num_attention_heads, num_key_value_heads=self.num_key_value_heads,
            head_dim=self.head_dim, intermediate_size=1, dense_intermediate_size=self.intermediate_size,
            shared_intermediate_size=1, num_local_experts=1, num_experts_per_tok=1, layer_types=(FULL,),
            mlp_layer_types=("dense",), rotary_dim=self.head_dim, index_n_heads=self.num_key_value_heads,
            index_head_dim=self.head_dim, index_block_size=block_size, rope_theta=self.rope_theta,
        )  # fmt: skip


@runtime_checkable
class MakeDraft(MakeArrays, Protocol):
    """A maker of a draft's parameters: those of a model's kinds, and the ids of a reduced vocabulary."""

    def token_ids(self, count: int) -> nnx.Param:
        """Return the target's token for each of the draft's tokens: int32, never divided over devices."""
        ...


class Eagle3(nnx.Module):
    """A draft: a pytree of parameters with a static configuration.

    A step takes a feature and a token. The feature of the target's position t, from `features`, goes with the token at
    t + 1 (shift by one), both at position t. What comes out predicts the token at t + 2, and is the feature of the next
    draft step. Norms are ordinary ones: the stored weight is the factor.

    Source: vLLM `llama_eagle3.py`; the options fc_norm and norm_output are those of EAGLE 3.1.
    """

    def __init__(self, config: Eagle3Config, make: MakeDraft):
        width, num_taps, hidden = config.hidden_size, len(config.taps), config.intermediate_size
        heads, kv_heads, head_dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        head_axes, kv_axes, vocab_axes = (None, "heads", None), (None, "kv_heads", None), ("vocab", None)
        self.config = config
        self.fc = make.weight((num_taps, width, width), (None, None, None), fan_in=num_taps * width)
        self.fc_norm = make.norm((num_taps, width)) if config.fc_norm else None
        self.hidden_norm = make.norm((width,))
        self.input_layernorm = make.norm((width,))
        self.post_attention_layernorm = make.norm((width,))
        self.q_proj = make.weight((2 * width, heads, head_dim), head_axes, fan_in=2 * width)
        self.k_proj = make.weight((2 * width, kv_heads, head_dim), kv_axes, fan_in=2 * width)
        self.v_proj = make.weight((2 * width, kv_heads, head_dim), kv_axes, fan_in=2 * width)
        self.o_proj = make.weight((heads, head_dim, width), ("heads", None, None), fan_in=heads * head_dim)
        self.gate_proj = make.weight((width, hidden), (None, "mlp"), fan_in=width)
        self.up_proj = make.weight((width, hidden), (None, "mlp"), fan_in=width)
        self.down_proj = make.weight((hidden, width), ("mlp", None), fan_in=hidden)
        self.norm = make.norm((width,))
        vocab, draft_vocab = (config.vocab_size, width), (config.draft_vocab_size, width)
        self.embed_tokens = make.weight(vocab, vocab_axes, fan_in=1) if config.own_embedding else None
        self.lm_head = make.weight(draft_vocab, ("logits", None), fan_in=width) if config.own_head else None
        is_reduced = config.draft_vocab_size != config.vocab_size
        self.target_ids = make.token_ids(config.draft_vocab_size) if is_reduced else None

    @property
    def dtype(self) -> jnp.dtype:
        """The dtype of weights and activations."""
        return self.fc.dtype

    def features(self, taps: Float[Array, "B T A D"]) -> Float[Array, "B T D"]:
        """Return one feature for each position: the target's taps, normed if the draft has `fc_norm`, times `fc`."""
        if self.fc_norm is not None:
            taps = rms_norm(taps, self.fc_norm[...], self.config.rms_norm_eps).astype(self.dtype)
        return einsum("btad,ade->bte", taps.astype(self.dtype), self.fc[...]).astype(self.dtype)

    def inputs(
        self,
        feature: Float[Array, "B T D"],
        tokens: Int[Array, "B T"],
        embedding: Float[Array, "V D"],
        compute: Compute = ONE_DEVICE,
    ) -> tuple[Float[Array, "B T W"], Float[Array, "B T D"]]:
        """Return the input of attention, the embedding and then the feature (W = 2D), and the residual.

        Args:
          feature: of each position.
          tokens: the one after each position.
          embedding: the target's, for a draft that has none.
          compute: the target's; its mesh divides the embedding.
        """
        eps = self.config.rms_norm_eps
        table = embedding if self.embed_tokens is None else self.embed_tokens[...]
        token = _beside(compute).embed(tokens, table).astype(self.dtype)
        token = rms_norm(token, self.input_layernorm[...], eps).astype(self.dtype)
        normed = rms_norm(feature, self.hidden_norm[...], eps).astype(self.dtype)
        return jnp.concatenate([token, normed], axis=-1), normed if self.config.norm_before_residual else feature

    def project(self, x: Float[Array, "B T W"], positions: Int[Array, "B T"]) -> dict[str, Array]:
        """Return queries and keys, rotated by their positions on all dims, and values."""
        cos, sin = rope_table(positions, self.config.head_dim, self.config.rope_theta, self.dtype)
        head = lambda weight: einsum("btw,wnh->btnh", x, weight[...])
        rotated = lambda weight: apply_rope(head(weight), cos, sin).astype(self.dtype)
        return {"q": rotated(self.q_proj), "k": rotated(self.k_proj), "v": head(self.v_proj).astype(self.dtype)}

    def outputs(self, attention: Float[Array, "B T N H"], residual: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """Run the layer after attention, output projection and MLP, up to the final norm."""
        flat = attention.reshape(*attention.shape[:2], -1)
        out = einsum("btx,xd->btd", flat, self.o_proj[...].reshape(flat.shape[-1], -1))
        x = (residual.astype(out.dtype) + out).astype(self.dtype)
        h = rms_norm(x, self.post_attention_layernorm[...], self.config.rms_norm_eps).astype(self.dtype)
        gate, up = (einsum("btd,df->btf", h, w[...]) for w in (self.gate_proj, self.up_proj))
        out = einsum("btf,fd->btd", (jax.nn.silu(gate) * up).astype(self.dtype), self.down_proj[...])
        return (x.astype(out.dtype) + out).astype(self.dtype)

    def cached(
        self,
        feature: Float[Array, "B T D"],
        tokens: Int[Array, "B T"],
        slots: Int[Array, "B T"],
        lengths: Int[Array, " B"],
        places: Places,
        pages: StackCache,
        embedding: Float[Array, "V D"],
        compute: Compute = ONE_DEVICE,
    ) -> tuple[Float[Array, "B T D"], StackCache]:
        """Run one step over the draft's own pages.

        Args:
          feature: of the position before each token.
          tokens: the token after each feature's position.
          slots: where each token stands in its row, at least 1; below that it is padding. What is kept lies there. Its
            rotary position is that of the feature, one less.
          lengths: slots of each row that hold something after this call.
          places: of these slots.
          pages: what the rows have; slot 0 is never seen (`m3jax.cache.drafted`).
          embedding: the target's, for a draft that has none.
          compute: the target's.

        Returns:
          (output before the final norm, pages).
        """
        x, residual = self.inputs(feature, tokens, embedding, compute)
        # A pair lies in its token's slot, and has the position of its feature: the one before.
        values = self.project(x, slots - 1)
        call = LayerCall(jnp.int32(0), places, slots, lengths)
        projections = Projections.of_heads(Heads(**values))
        attention, pages = _beside(compute).attend(projections, pages, call, rules=None, tap=Tap())  # [B T N H]
        return self.outputs(attention, residual), pages

    def read(self, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
        """Return the final norm of an output, which the head reads."""
        return rms_norm(x, self.norm[...], self.config.rms_norm_eps).astype(self.dtype)

    def recur(self, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
        """Return the feature of the next draft step."""
        return self.read(x) if self.config.norm_output else x

    def logits(
        self, x: Float[Array, "... D"], head: Float[Array, "V D"], compute: Compute = ONE_DEVICE
    ) -> Float[Array, "... U"]:
        """Return logits over the U = draft_vocab_size tokens that the draft can propose.

        Args:
          x: outputs before the final norm.
          head: the target's, for a draft that has none.
          compute: the target's; its mesh divides the head.
        """
        head = head if self.lm_head is None else self.lm_head[...]
        return _beside(compute).unembed(self.read(x), head)


def _beside(target: Compute) -> Execution:
    """Return what computes a draft beside its target: by the target's schedule and mesh, and by nothing else of it.

    A draft only proposes, so its sums need no order even where the target's have one. Its attention, which alone asks
    for it, always has a cache.
    """
    compute = Compute(schedule=target.schedule, mesh=target.mesh)
    return OverMesh(compute, has_cache=True) if compute.is_divided else Fast(compute, has_cache=True)


def rms_norm(x: Float[Array, "... D"], weight: Float[Array, "..."], eps: float) -> Float[Array, "... D"]:
    """Return the root-mean-square norm times the weight, in the accumulator's dtype; the caller rounds."""
    dtype = accumulator(x.dtype)
    x = x.astype(dtype)
    return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + eps) * weight.astype(dtype)


@dataclass(frozen=True)
class MakeEachOfDraft(MakeEach):
    """A maker of a draft's parameters by one function of shape, axes and dtype."""

    def token_ids(self, count: int) -> nnx.Param:
        """Return the target's token for each of the draft's tokens."""
        return nnx.Param(self.make((count,), (None,), "int32"))


@dataclass(frozen=True)
class MakeRandomDraft:
    """A maker of random weights with deviation fan_in**-0.5; norms are 1, a reduced vocabulary is the first ids."""

    rng: np.random.Generator  # jax.random would compile a program for each shape
    dtype: str

    def weight(self, shape, axes, *, fan_in, dtype=None):
        """Return a matrix, or a stack of them."""
        return nnx.Param(jnp.asarray(self.rng.normal(size=shape) * fan_in**-0.5, self.dtype))

    def norm(self, shape, *, dtype=None):
        """Return the weights of a norm."""
        return nnx.Param(jnp.ones(shape, self.dtype))

    def token_ids(self, count):
        """Return the target's token for each of the draft's tokens."""
        return nnx.Param(jnp.arange(count, dtype=jnp.int32))


def abstract(config: Eagle3Config, dtype: DTypeLike = "bfloat16", mesh: Mesh | str | None = None) -> Eagle3:
    """Return the draft with `jax.ShapeDtypeStruct` leaves; dtype and mesh as in `m3jax.init`."""
    name, mesh = dtype_name(dtype), as_mesh(mesh)

    def describe(shape, axes, least_dtype):
        return jax.ShapeDtypeStruct(shape, parameter_dtype(least_dtype, name), sharding=sharding(shape, axes, mesh))

    return Eagle3(config, MakeEachOfDraft(describe))


def init(config: Eagle3Config, seed: int = 0, dtype: DTypeLike = "float32") -> Eagle3:
    """Return a draft with random weights (`MakeRandomDraft`)."""
    return Eagle3(config, MakeRandomDraft(np.random.default_rng(seed), dtype_name(dtype)))
