"""The question to the planner: a model, a slice, and the requests it shall serve."""

from dataclasses import dataclass

from m3jax.cache.storage import DTYPES as CACHE_DTYPES
from m3jax.config import M3Config
from m3jax.decoding.engine import PREFILL_CHUNKS
from m3jax.model.build import DTYPES, WEIGHTS
from m3jax.model.eagle3 import Eagle3Config
from m3jax.planning.chips import Slice

# Published facts of Inferact/MiniMax-M3-EAGLE3 (its config.json was not read).
M3_DRAFT = Eagle3Config(
    hidden_size=6144, vocab_size=200064, draft_vocab_size=200064, num_attention_heads=64, num_key_value_heads=64,
    head_dim=128, intermediate_size=18432, taps=(2, 30, 57), rope_theta=5e6, fc_norm=True, norm_output=True,
)  # fmt: skip
DRAFT_TOKENS = 3


@dataclass(frozen=True, kw_only=True)
class Job:
    """A model on a slice, and the requests that it serves there: the input of a plan.

    Attributes:
      config: the model.
      slice: the accelerators that it runs on.
      context: tokens that every row can have.
      batch: rows that decode together.
      dtype: of weights and activations.
      weights: "dequantize" has all weights in `dtype`, "mxfp8" those of linear layers in MXFP8.
      kv_dtype: of cached keys and values.
      index_dtype: of cached index keys.
      chunk: prompt tokens of one prefill call, of one row; None becomes the engine's largest by default there, or the
        context where that is shorter.
      draft: an EAGLE3 draft that is planned too.
      backend: one of `m3jax.ops.BACKENDS`, that the programs are compiled with.
      images: the number of images in one call of the vision tower; 0 plans none.
      image_tokens: tokens of each image.

    Raises:
      ValueError: a number outside its range, with the nearest valid choice.
    """

    config: M3Config
    slice: Slice
    context: int
    batch: int = 1
    dtype: str = "bfloat16"
    kv_dtype: str | None = None
    index_dtype: str | None = None
    chunk: int | None = None
    draft: Eagle3Config | None = None
    backend: str = "auto"
    images: int = 0
    image_tokens: int = 576
    weights: str = "dequantize"

    def __post_init__(self):
        longest = self.config.max_position_embeddings
        _check_range("context", self.context, longest, "the model's context")
        _check_range("batch", self.batch, 1 << 20, "the most rows that are planned")
        if self.chunk is None:
            object.__setattr__(self, "chunk", min(PREFILL_CHUNKS[self.slice.chip.kind][-1], self.context))
        _check_range("prefill-chunk", self.chunk, longest, "the model's context")
        if self.images:
            _check_range("images", self.images, 1 << 12, "the most that are planned for a call")
            _check_range("image-tokens", self.image_tokens, 1 << 14, "16,384, an image of 3584 x 3584 pixels")
            if self.config.vision_config is None:
                raise ValueError(f"--images {self.images}: this model has no vision_config: it takes text alone")
        cache_dtypes = [dtype for dtype in CACHE_DTYPES if dtype != "float64"]
        _check_choice("dtype", self.dtype, [dtype for dtype in DTYPES if dtype != "float64"])
        _check_choice("weights", self.weights, list(WEIGHTS))
        if self.kv_dtype is not None:
            _check_choice("kv-dtype", self.kv_dtype, cache_dtypes)
        if self.index_dtype is not None:
            _check_choice("index-dtype", self.index_dtype, cache_dtypes)

    @property
    def blocks(self) -> int:
        """The number of blocks (= pages) of a row, M."""
        return -(-self.context // self.config.index_block_size)

    @property
    def kv(self) -> str:
        """The dtype of cached keys and values."""
        return self.kv_dtype or self.dtype

    @property
    def index(self) -> str:
        """The dtype of cached index keys."""
        return self.index_dtype or self.dtype


def _check_range(name: str, value: int, largest: int, reason: str) -> None:
    if not 1 <= value <= largest:
        nearest = min(max(value, 1), largest)
        raise ValueError(f"--{name} {value}: must be 1 to {largest} ({reason}); the nearest is {nearest}")


def _check_choice(name: str, value: str, allowed: list[str]) -> None:
    if value not in allowed:
        raise ValueError(f"--{name} {value!r}: allowed are {', '.join(allowed)}")
