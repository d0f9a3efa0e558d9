"""The tower, the projector, and both together."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from m3jax.make import Make
from m3jax.media import MediaBatch
from m3jax.numerics import accumulator
from m3jax.spec.vision import rotary_angles, rotate
from m3jax.vision.config import VisionConfig
from m3jax.vision.layers import LayerNorm, Linear, gelu
from m3jax.vision.schedules import AttendSegments, schedule_of


class Attention(nnx.Module):
    """Attention of all layers: projections to heads with biases, rotation, attention in each segment, and back."""

    def __init__(self, config: VisionConfig, make: Make):
        depth, width = (config.num_hidden_layers,), (config.hidden_size,)
        heads = (config.num_attention_heads, config.head_dim)
        to_heads, from_heads = (None, "vision_heads", None), ("vision_heads", None, None)
        self.q_proj = Linear(depth, width, heads, to_heads, make)
        self.k_proj = Linear(depth, width, heads, to_heads, make)
        self.v_proj = Linear(depth, width, heads, to_heads, make)
        self.out_proj = Linear(depth, heads, width, from_heads, make)

    def __call__(
        self,
        x: Float[Array, "X W"],
        cosines: Float[Array, "X R"],
        sines: Float[Array, "X R"],
        attend: AttendSegments,
    ) -> Float[Array, "X W"]:
        """Return the output of one layer's attention, in the accumulator's dtype."""
        q, k, v = (project("xw,wnh->xnh", x) for project in (self.q_proj, self.k_proj, self.v_proj))
        q, k = rotate(q, cosines, sines).astype(x.dtype), rotate(k, cosines, sines).astype(x.dtype)
        return self.out_proj("xnh,nhw->xw", attend(q, k, v.astype(x.dtype)))


class MLP(nnx.Module):
    """Two products with GELU between them, of all layers."""

    def __init__(self, config: VisionConfig, make: Make):
        depth, width, hidden = (config.num_hidden_layers,), (config.hidden_size,), (config.intermediate_size,)
        self.fc1 = Linear(depth, width, hidden, (None, "vision_mlp"), make)
        self.fc2 = Linear(depth, hidden, width, ("vision_mlp", None), make)

    def __call__(self, x: Float[Array, "X W"]) -> Float[Array, "X W"]:
        """Return the output of one layer's MLP, in the accumulator's dtype."""
        return self.fc2("xf,fw->xw", gelu(self.fc1("xw,wf->xf", x), x.dtype))


class Layers(nnx.Module):
    """Pre-norm layers with two residuals; every parameter has a leading layer axis, and the layers are scanned."""

    def __init__(self, config: VisionConfig, make: Make):
        shape = (config.num_hidden_layers, config.hidden_size)
        self.layer_norm1 = LayerNorm(shape, make)
        self.self_attn = Attention(config, make)
        self.layer_norm2 = LayerNorm(shape, make)
        self.mlp = MLP(config, make)

    def __call__(
        self,
        x: Float[Array, "X W"],
        angles: Float[Array, "X R"],
        attend: AttendSegments,
        eps: float,
        every_layer: bool,
    ) -> tuple[Float[Array, "X W"], Float[Array, "L X W"] | None]:
        """Run all layers; return the last one's output, and each one's if they are asked for."""
        cosines, sines = jnp.cos(angles), jnp.sin(angles)

        def run_layer(x, layer):
            x = _add(x, layer.self_attn(layer.layer_norm1(x, eps), cosines, sines, attend))
            x = _add(x, layer.mlp(layer.layer_norm2(x, eps)))
            return x, x if every_layer else None

        return jax.lax.scan(run_layer, x, self)


class Projector(nnx.Module):
    """An MLP on each patch, then one on each merge block, whose patches stand one behind the other.

    D is the text model's width, Q the hidden width of both MLPs. The hub calls the second one patch_merge_mlp.
    """

    def __init__(self, config: VisionConfig, width: int, make: Make):
        hidden, width = (config.projector_hidden_size,), (width,)
        merged = (config.merged_patches * width[0],)
        into, out_of = (None, "vision_mlp"), ("vision_mlp", None)
        self.linear_1 = Linear((), (config.hidden_size,), hidden, into, make)
        self.linear_2 = Linear((), hidden, width, out_of, make)
        self.merge_linear_1 = Linear((), merged, hidden, into, make)
        self.merge_linear_2 = Linear((), hidden, width, out_of, make)

    def __call__(self, x: Float[Array, "X W"]) -> Float[Array, "R D"]:
        """Return the features [R D] of the tower's output [X W], one for each merge block."""
        patches = self.linear_2("xq,qd->xd", gelu(self.linear_1("xw,wq->xq", x), x.dtype)).astype(x.dtype)
        blocks = patches.reshape(-1, self.merge_linear_1.weight.shape[0])  # [R 4*D]
        hidden = gelu(self.merge_linear_1("rm,mq->rq", blocks), x.dtype)
        return self.merge_linear_2("rq,qd->rd", hidden).astype(x.dtype)


class Vision(nnx.Module):
    """Patches to features: a pytree of parameters with a static configuration.

    The tower has no norm behind its last layer. The weight of its patch embedding is float32 in every model, as it is
    in the hub's files, with the axes of a convolution whose steps are as long as its kernel: a product with a patch's
    numbers.
    """

    def __init__(self, config: VisionConfig, width: int, make: Make):
        self.config = config
        axes = (None,) * (len(config.kernel) + 1)
        shape = (*config.kernel, config.hidden_size)
        self.patch_embedding = make.weight(shape, axes, fan_in=config.patch_values, dtype="float32")
        self.pre_layrnorm = LayerNorm((config.hidden_size,), make)  # the hub's spelling
        self.layers = Layers(config, make)
        self.projector = Projector(config, width, make)

    @property
    def dtype(self) -> jnp.dtype:
        """The dtype of activations, and of all weights but the patch embedding's."""
        return self.pre_layrnorm.weight.dtype

    def __call__(self, media: MediaBatch, backend: str = "auto") -> Float[Array, "R D"]:
        """Return the features of a packed batch.

        Args:
          media: from `m3jax.media.batch`.
          backend: of attention, as in `attend_segments`.

        Returns:
          A row for every merge block, in the model's dtype; zeros for padding.
        """
        hidden, _ = self.tower(media.patches, media.segments, media.positions, backend)
        is_feature = media.segments[:: self.config.merged_patches] >= 0  # [R]
        return jnp.where(is_feature[:, None], self.projector(hidden), 0)

    def tower(
        self,
        patches: Float[Array, "X P"],
        segments: Int[Array, " X"],
        positions: Int[Array, "X 3"],
        backend: str = "auto",
        every_layer: bool = False,
    ) -> tuple[Float[Array, "X W"], Float[Array, "L X W"] | None]:
        """Run the tower without the projector.

        Args:
          patches, segments, positions: as in a `MediaBatch`; P may be what another configuration has.
          backend: of attention.
          every_layer: True keeps each layer's output.

        Returns:
          (the last layer's output, each layer's or None). Rows of padding hold meaningless numbers.
        """
        weight = self.patch_embedding[...]
        weight = weight.reshape(-1, weight.shape[-1])  # [P W]
        dtype = accumulator(jnp.promote_types(self.dtype, patches.dtype))
        x = jnp.einsum("xp,pw->xw", patches.astype(dtype), weight.astype(dtype), precision="highest")
        eps = self.config.layer_norm_eps
        x = self.pre_layrnorm(x.astype(self.dtype), eps)
        angles = rotary_angles(positions, self.config.head_dim, self.config.rope_theta, dtype)
        attend = schedule_of(segments, self.dtype, self.config.head_dim, backend)
        return self.layers(x, angles, attend, eps, every_layer)


def _add(x: Float[Array, "X W"], update: Float[Array, "X W"]) -> Float[Array, "X W"]:
    """Add a residual in the accumulator's dtype, rounded once."""
    return (x.astype(update.dtype) + update).astype(x.dtype)
