"""The mixture of experts: a float32 router, and dropless experts (docs/numerics.md)."""

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from m3jax.config import M3Config
from m3jax.model.layers import MLP, swiglu_oai
from m3jax.model.params import Make
from m3jax.msa import api
from m3jax.msa.csr import invert
from m3jax.numerics import accumulator, einsum
from m3jax.parallel import spec
from m3jax.platform import platform

_UP, _DOWN = ("layers", "experts", None, "mlp"), ("layers", "experts", "mlp", None)
_FEW = 16  # (token, expert) pairs up to which each pair fetches its own expert's weights
_MOST_SHARES = 4  # a pair of another device's expert is skipped, but not for nothing: more than 64 are not looked at
_TILE = 64  # tokens that meet an expert at once on a CPU
_GPU_TILES = (16, 32, 64)  # likewise in a kernel: as many as an expert has, on average


def route(
    x: Float[Array, "X D"], gate: Float[Array, "D E"], bias: Float[Array, " E"], top_k: int
) -> tuple[Int[Array, "X A"], Float[Array, "X A"]]:
    """Choose experts by sigmoid score plus bias, and weigh them by their scores alone, which sum to 1.

    Always in float32 (or float64): the checkpoint keeps the router in float32 and vLLM and SGLang compute it so.

    Returns:
      (ids, weights), best first; of equal scores the lower id.
    """
    scores = jax.nn.sigmoid(einsum("xd,de->xe", x.astype(gate.dtype), gate))
    ids = checkpoint_name(jax.lax.top_k(scores + bias, top_k)[1], "expert_ids")
    weights = jnp.take_along_axis(scores, ids, axis=-1)
    return ids.astype(jnp.int32), weights / jnp.sum(weights, axis=-1, keepdims=True)


class Experts(nnx.Module):
    """The routed experts of a whole stack of layers.

    They stay stacked while the layers are scanned and are read by (layer, expert): a scan over them would copy
    all experts of a layer to use a few.
    """

    def __init__(self, depth: int, config: M3Config, make: Make):
        experts, width, hidden = config.num_local_experts, config.hidden_size, config.intermediate_size
        self.gate_proj = nnx.Param(make((depth, experts, width, hidden), _UP, None, width))
        self.up_proj = nnx.Param(make((depth, experts, width, hidden), _UP, None, width))
        self.down_proj = nnx.Param(make((depth, experts, hidden, width), _DOWN, None, hidden))

    def __call__(
        self,
        x: Float[Array, "X D"],
        ids: Int[Array, "X A"],
        weights: Float[Array, "X A"],
        layer: Int[Array, ""],
        alpha: float,
        limit: float,
        backend: str = "xla",
        mesh: Mesh | None = None,
    ) -> Float[Array, "X D"]:
        """The weighted sum of each token's experts, in the accumulator's dtype; no token is dropped.

        On a mesh every device computes the pairs of a token and an expert whose expert it holds, for the tokens of its
        place on the data axis. Experts are whole on each device of the context axis: those share out the pairs.
        """
        act = lambda gate, up: swiglu_oai(gate, up, alpha, limit).astype(x.dtype)
        if mesh is None or mesh.size == 1:
            return _weighted(self._outputs(x, ids, layer, act, backend), weights)
        where = jax.tree_util.tree_map_with_path(lambda path, w: spec(w.shape, _axes(path), mesh), self)
        tokens = P(*spec(x.shape[:1], ("tokens",), mesh))

        def run(experts, *args):
            return experts._share(*args, act, backend, mesh)

        in_specs = where, tokens, tokens, tokens, P()
        on_mesh = jax.shard_map(run, mesh=mesh, in_specs=in_specs, out_specs=tokens, check_vma=False)
        return on_mesh(self, x, ids, weights, layer)

    def _share(self, x, ids, weights, layer, act, backend, mesh):
        """What one device of a mesh does; `self` has the experts, and the part of their width, that it holds."""
        here = ids - jax.lax.axis_index("expert") * self.gate_proj.shape[1]
        here = jnp.where((here >= 0) & (here < self.gate_proj.shape[1]), here, -1)
        rows, mine, restore = _deal(x, here, mesh.shape["context"])
        out = self._outputs(rows, mine, layer, act, backend, mesh.shape["expert"])
        out = restore(jnp.where(mine[..., None] >= 0, out, 0.0))
        return jax.lax.psum(_weighted(out, weights), ("context", "expert", "tensor"))

    def _outputs(self, x, ids, layer, act, backend, shares=None):
        """What each pair's expert makes of its token [X A D].

        One of `shares` devices has a part of the experts. An id of -1 is none of them, and gives anything.
        """
        few = ids.size <= _FEW * min(shares or 1, _MOST_SHARES)
        one_by_one = partial(self._one_by_one, skips=shares is not None)
        cpu = one_by_one if few else self._tiled
        gpu = self._gathered if ids.size <= _FEW else partial(self._on_gpu, backend=backend)
        tpu = self._ragged if not few else self._gathered if shares is None else one_by_one
        return {"cpu": cpu, "gpu": gpu}.get(platform(), tpu)(x, ids, layer, act)

    def _weights(self):
        return self.gate_proj[...], self.up_proj[...], self.down_proj[...]

    def _gathered(self, x, ids, layer, act):
        """A few tokens: each (token, expert) pair reads its expert's weights."""
        gate, up, down = (w[layer, ids] for w in self._weights())
        hidden = act(einsum("xd,xadf->xaf", x, gate), einsum("xd,xadf->xaf", x, up))
        # Else XLA computes the activation again for every element of `down`: 1 ms instead of 0.05 at M3's widths.
        return einsum("xaf,xafd->xad", jax.lax.optimization_barrier(hidden), down)

    def _one_by_one(self, x, ids, layer, act, skips=False):
        """A few tokens: one pair after the other, whose weights then stay in the cache of a CPU's core."""
        gate, up, down = self._weights()

        def work(row, expert):
            hidden = act(einsum("d,df->f", row, gate[layer, expert]), einsum("d,df->f", row, up[layer, expert]))
            return einsum("f,fd->d", hidden, down[layer, expert])

        def step(_, xs):
            idle = lambda row, expert: jnp.zeros(row.shape, accumulator(row.dtype))
            return None, jax.lax.cond(xs[1] >= 0, work, idle, *xs) if skips else work(*xs)

        rows = jnp.repeat(x, ids.shape[1], axis=0)
        return jax.lax.scan(step, None, (rows, ids.reshape(-1)))[1].reshape(*ids.shape, -1)

    def _ragged(self, x, ids, layer, act):
        """Many tokens on a TPU: sort the pairs by expert, three ragged products, sort back."""
        # ragged_dot can be vmapped only with all its operands batched, so the weights follow the choice of experts.
        gate, up, down = (w[layer + 0 * ids[0, 0]] for w in self._weights())
        key = jnp.where(ids < 0, gate.shape[0], ids).reshape(-1)  # what is not held comes last, in no expert's part
        order = jnp.argsort(key, stable=True)
        sizes = jnp.bincount(key, length=gate.shape[0]).astype(jnp.int32)
        # A TPU multiplies 16-bit numbers exactly, and refuses to be told so.
        precision = None if x.dtype.itemsize == 2 else "highest"
        dot = lambda a, w: jax.lax.ragged_dot(
            a, w, sizes, precision=precision, preferred_element_type=accumulator(a.dtype)
        )
        rows = x[order // ids.shape[1]]
        out = dot(act(dot(rows, gate), dot(rows, up)), down)
        return jnp.zeros_like(out).at[order].set(out, unique_indices=True).reshape(*ids.shape, -1)

    def _on_gpu(self, x, ids, layer, act, backend):
        """Many tokens on a GPU; training has another way (`m3jax.train.fused`)."""
        weights = self._weights()
        if not api.runs_experts(x.dtype, *weights[0].shape[2:], backend=backend):
            return self._tiled(x, ids, layer, act)

        def by_kernel(x, gate, up, down, ids, layer):
            share = ids.size // gate.shape[1]
            tile = next((n for n in _GPU_TILES if n >= share), _GPU_TILES[-1])
            tiles = invert(ids[None, None], gate.shape[1], tile)
            out = api.experts(x, (gate, up, down), tiles, layer, act)
            return out.reshape(-1, x.shape[1])[tiles.slot_of[0, 0]]

        tiled = lambda x, gate, up, down, ids, layer: self._tiled(x, ids, layer, act, (gate, up, down))
        return api.differentiable(by_kernel, tiled, 4)(x, *weights, ids, layer)

    def _tiled(self, x, ids, layer, act, weights=None):
        """Many tokens on a CPU or GPU, where XLA computes a ragged product as a dense one per expert: tiles of tokens.

        The same inversion as attention's: token -> experts becomes expert -> tokens.
        """
        gate, up, down = weights or self._weights()
        tile = min(_TILE, max(8, ids.size // gate.shape[1]))
        tiles = invert(ids[None, None], gate.shape[1], tile)

        def work(xs):
            expert, rows = xs[0], x[xs[1]]
            hidden = act(einsum("cd,df->cf", rows, gate[layer, expert]), einsum("cd,df->cf", rows, up[layer, expert]))
            return einsum("cf,fd->cd", hidden, down[layer, expert])

        def step(_, xs):
            idle = lambda xs: jnp.zeros((tile, x.shape[1]), accumulator(x.dtype))
            return None, jax.lax.cond(jnp.any(xs[2]), work, idle, xs)

        _, out = jax.lax.scan(step, None, (tiles.block, tiles.query, tiles.valid))
        return out.reshape(-1, x.shape[1])[tiles.slot_of[0, 0]]


def _axes(path) -> tuple[str | None, ...]:
    return _DOWN if "down_proj" in jax.tree_util.keystr(path) else _UP


def _weighted(out: Float[Array, "X A D"], weights: Float[Array, "X A"]) -> Float[Array, "X D"]:
    return jnp.sum(out * weights[..., None].astype(out.dtype), axis=1)


def _deal(x: Float[Array, "X D"], ids: Int[Array, "X A"], parts: int):
    """One device's part of the pairs, as in dealing cards: (rows, their ids, how outputs go back to [X A D]).

    Outputs of the others' pairs are 0.
    """
    if parts == 1:
        return x, ids, lambda out: out
    (tokens, slots), turn = ids.shape, jax.lax.axis_index("context")
    dealt = jnp.pad(ids.reshape(-1), (0, -ids.size % parts), constant_values=-1).reshape(-1, parts)
    pair = jnp.arange(len(dealt), dtype=jnp.int32) * parts + turn
    rows = x[jnp.minimum(pair // slots, tokens - 1)]

    def restore(out):
        whole = jnp.zeros((*dealt.shape, out.shape[-1]), out.dtype).at[:, turn].set(out[:, 0])
        return whole.reshape(-1, out.shape[-1])[: ids.size].reshape(tokens, slots, -1)

    return rows, dealt[:, turn, None], restore


class MoE(nnx.Module):
    """Router, routed experts and the shared expert of a stack of layers."""

    def __init__(self, depth: int, config: M3Config, make: Make):
        width, experts = config.hidden_size, config.num_local_experts
        self.gate = nnx.Param(make((depth, width, experts), ("layers", None, None), "float32", width))
        self.e_score_correction_bias = nnx.Param(make((depth, experts), ("layers", None), "float32", None))
        self.experts = Experts(depth, config, make)
        self.shared_experts = MLP(depth, width, config.shared_intermediate_size, make)

    def __call__(
        self,
        x: Float[Array, "X D"],
        experts: Experts,
        layer: Int[Array, ""],
        config: M3Config,
        backend: str = "xla",
        mesh: Mesh | None = None,
    ):
        """One layer's routed plus shared experts: (output in the accumulator's dtype, expert ids, weights)."""
        alpha, limit = config.swiglu_alpha, config.swiglu_limit
        ids, weights = route(x, self.gate[...], self.e_score_correction_bias[...], config.num_experts_per_tok)
        routed = experts(x, ids, weights, layer, alpha, limit, backend, mesh)
        out = config.routed_scaling_factor * routed + self.shared_experts(x, alpha, limit)
        return out, ids, weights
