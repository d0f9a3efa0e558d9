"""What the Triton kernels share: pages, padding, and the few operations that Pallas spells differently on a GPU."""

import dataclasses
import warnings
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Bool, Float, Int, Num, Shaped

# JAX 0.11 deprecates the backend as a whole; it says so at each lowering.
warnings.filterwarnings("ignore", message="The Pallas Triton backend is deprecated", category=DeprecationWarning)

LOG2E = 1.4426950408889634
UNSEEN = -1e30  # a score no key can have: finite, so that no row of nothing but this makes a NaN
LOWEST = float(np.finfo(np.float32).min)  # ranks a NaN
ABOVE = float(np.nextafter(np.float32(LOWEST), np.float32(0)))  # ranks -inf


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("pool", "table", "layer"),
    meta_fields=("layer_stride", "page_count", "page_stride", "row_stride", "head_stride", "num_blocks"),
)
@dataclasses.dataclass(frozen=True)
class Pages:
    """Where block m of row b and head k lies: `pool[layer * layer_stride + k * head_stride + where]`.

    `where` is `table[b, m] * page_stride` with a table, else `b * row_stride + m`. Made by `contiguous` and `paged`.
    """

    pool: Num[Array, "X P H"]
    table: Int[Array, "B M"] | None
    layer: Int[Array, ""]
    layer_stride: int
    page_count: int
    page_stride: int
    row_stride: int
    head_stride: int
    num_blocks: int

    @property
    def block_size(self) -> int:
        """P, tokens of a block."""
        return self.pool.shape[1]

    @property
    def width(self) -> int:
        """H, numbers of a token."""
        return self.pool.shape[2]

    def operands(self) -> tuple[Array, ...]:
        """What a kernel takes: the pool, the layer, and the table where there is one."""
        table = () if self.table is None else (self.table,)
        return (self.pool, self.layer.reshape(1), *table)

    def locate(self, layer_ref, table_ref, row, head, block) -> tuple[Array, Array]:
        """Inside a kernel: (page, held) of a block; a page that is not held reads as some other one."""
        base = layer_ref[0] * self.layer_stride + head * self.head_stride
        if self.table is None:
            return base + row * self.row_stride + block, block >= 0
        page = table_ref[row, block]
        held = self.holds(page)
        return base + jnp.where(held, page, 0) * self.page_stride, held

    def holds(self, page: Int[Array, "..."]) -> Bool[Array, "..."]:
        """Which entries of the table are pages."""
        return (page >= 0) & (page < self.page_count)


def contiguous(x: Num[Array, "..."], block_size: int, layer: Int[Array, ""] | int | None = None) -> Pages:
    """Keys, values or index keys without a table.

    Args:
      x: `[B K S H]` head-major, or `[B S H]` index keys; with `layer`, a stack of these. S is padded to whole blocks.
      block_size: P.
      layer: which one of a stack to read; the stack is not copied.

    Raises:
      ValueError: another rank.
    """
    rank = x.ndim - (layer is not None)
    if rank not in (3, 4):
        raise ValueError(f"x has shape {x.shape}: need [B K S H] or [B S H], or a stack of these with layer=")
    if pad := -x.shape[-2] % block_size:
        x = jnp.pad(x, [(0, 0)] * (x.ndim - 2) + [(0, pad), (0, 0)])
    count = x.shape[-2] // block_size
    heads = x.shape[-3] if rank == 4 else 1
    rows = x.shape[-rank]
    pool = x.reshape(-1, block_size, x.shape[-1])
    layer = jnp.asarray(0 if layer is None else layer, jnp.int32)
    return Pages(pool, None, layer, rows * heads * count, len(pool), 1, heads * count, count, count)


def paged(x: Num[Array, "..."], table: Int[Array, "B M"], layer: Int[Array, ""] | int | None = None) -> Pages:
    """Keys, values or index keys in pages.

    Args:
      x: `[pages K P H]`, or `[pages P H]` index keys; with `layer`, a stack of these.
      table: page of each block of each row; one outside [0, pages) is not held: nothing sees its tokens.
      layer: which one of a stack to read; the stack is not copied.

    Raises:
      ValueError: another rank.
    """
    rank = x.ndim - (layer is not None)
    if rank not in (3, 4):
        raise ValueError(f"x has shape {x.shape}: need [pages K P H] or [pages P H], or a stack of these with layer=")
    heads = x.shape[-3] if rank == 4 else 1
    count = x.shape[-rank]
    pool = x.reshape(-1, *x.shape[-2:])
    layer = jnp.asarray(0 if layer is None else layer, jnp.int32)
    return Pages(pool, table.astype(jnp.int32), layer, count * heads, count, heads, 0, 1, table.shape[1])


def matmul_dtype(dtype: jax.typing.DTypeLike, stored: jax.typing.DTypeLike) -> jnp.dtype:
    """What to multiply in: e4m3 becomes float16 in one instruction, and is exact in it; bfloat16 takes several."""
    return jnp.dtype(jnp.float16 if stored == jnp.float8_e4m3fn and dtype == jnp.bfloat16 else dtype)


def seen_positions(positions: Int[Array, "B T"], lengths: Int[Array, " B"], padded: int) -> Int[Array, "B T2"]:
    """Positions with -1 for every padding token, and up to `padded` tokens."""
    at = jnp.where((positions >= 0) & (positions < lengths[:, None]), positions, -1).astype(jnp.int32)
    return jnp.pad(at, ((0, 0), (0, padded - at.shape[1])), constant_values=-1)


def seen_position(positions_ref, lengths_ref, row, token) -> Int[Array, "..."]:
    """`seen_positions` inside a kernel, for one row."""
    at = positions_ref[row, token]
    return jnp.where((at >= 0) & (at < lengths_ref[row]), at, -1)


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << max(0, n - 1).bit_length()


def div(x: Int[Array, "..."], n: int) -> Int[Array, "..."]:
    """x // n for x >= 0, without the code that `//` spends on signs."""
    return x if n == 1 else jax.lax.div(x, jnp.full(x.shape, n, x.dtype))


def rem(x: Int[Array, "..."], n: int) -> Int[Array, "..."]:
    """x % n for x >= 0."""
    return jnp.zeros_like(x) if n == 1 else jax.lax.rem(x, jnp.full(x.shape, n, x.dtype))


def dot(a: Shaped[Array, "R C"], b: Shaped[Array, "_ _"], transpose: bool = False) -> Float[Array, "R _"]:
    """Matrix product into float32; float32 operands keep their precision (no tf32). `transpose` reads b as `[N C]`."""
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    dims = (((1,), (1 if transpose else 0,)), ((), ()))
    return jax.lax.dot_general(a, b, dims, precision=precision, preferred_element_type=jnp.float32)


def exp2(x: Shaped[Array, "..."], interpret: bool) -> Shaped[Array, "..."]:
    """2**x by the hardware's instruction alone: results below 1e-38 are 0, and no code is spent on saving them."""
    if interpret:
        return jnp.exp2(x)
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    out = plgpu.elementwise_inline_asm(
        "ex2.approx.ftz.f32 $0, $1;", args=[x], constraints="=f,f", pack=1, result_shape_dtypes=[shape]
    )
    return out[0]


def check_pages(name: str, pages: Pages, batch: int) -> None:
    """Raise ValueError where a table has another number of rows than the queries, or a pool is out of a kernel's reach.

    Offsets are 32-bit numbers up to 4 GiB: of one-byte numbers, those would overflow between 2 and 4 GiB.
    """
    if pages.table is not None and pages.table.shape[0] != batch:
        raise ValueError(f"{name}: the table has {pages.table.shape[0]} rows and the queries {batch}")
    if pages.pool.dtype.itemsize == 1 and 2**31 <= pages.pool.size <= 2**32:
        raise ValueError(f"{name}: a pool of {pages.pool.size} one-byte numbers: use below 2**31, or above 2**32")
