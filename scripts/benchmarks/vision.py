"""Images a second through M3's vision tower and projector, and the share of the GPU's bfloat16 peak; random weights.

    bench.py vision                            # images of 576 tokens, 1, 8 and 64 at a time
    bench.py vision --transformers             # beside transformers' tower, where that can run

FLOP are counted, of patches alone: what is computed for padding is not counted, though it takes time. "exact" is a
batch without padding. The status is 1 where a backend fails.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.harness import Option
from benchmarks.timing import medians
from m3jax import media
from m3jax.model.build import MakeRandom
from m3jax.vision import BACKENDS, Vision, VisionConfig

PACKAGES = ("torch", "transformers")
GRID = (1, 36, 64)  # 504 x 896 pixels: 2304 patches, 576 tokens
PATCHES = 2304
TEXT_WIDTH = 6144
PEAK = 989e12  # bfloat16, dense: H100 SXM, H200
MANY = 8  # images beyond which only the fastest attention runs, unless --backends says more
OPTIONS = dict(
    batches=Option([1, 8, 64], "Images at a time", smoke=[1]),
    layers=Option(32, "Layers of the tower", smoke=1),
    seconds=Option(1.0, "Seconds for each row", smoke=0.1),
    backends=Option(None, "Backend of attention, in place of all that run here", choices=BACKENDS),
    transformers=Option(False, "Run transformers' tower too"),
)


def measure(args):
    """Yield a row for each batch and backend."""
    if min(args.batches) < 1 or args.layers < 1 or not args.seconds > 0:
        raise ValueError("--batches, --layers and --seconds must be positive")
    failures, fastest = [], "cudnn" if jax.default_backend() == "gpu" else "xla"
    config = VisionConfig(num_hidden_layers=args.layers)
    vision = Vision(config, TEXT_WIDTH, MakeRandom(jax.random.key(0), "bfloat16", None))
    run = jax.jit(lambda vision, batch, backend: vision(batch, backend), static_argnames="backend")
    theirs = transformers_tower(config) if args.transformers else None
    for count in args.batches:
        noise = [np.random.default_rng(seed).standard_normal((PATCHES, 1176), np.float32) for seed in range(count)]
        packed = media.batch([(patches, GRID) for patches in noise])
        exact = media.MediaBatch(*(x[: count * PATCHES] for x in packed[:3]), *packed[3:])
        # Of many images a call by tiles takes seconds, and says nothing new.
        both = [fastest] if count > MANY else [*dict.fromkeys((fastest, "xla"))]
        backends = [args.backends] if args.backends else both
        ways = [(backend, backend, packed) for backend in backends]
        if count * PATCHES < len(packed.segments):
            ways.append((backends[0], f"{backends[0]}, exact", exact))
        for backend, name, batch in ways:
            batch = jax.device_put(batch)
            call = lambda batch=batch, backend=backend: jax.block_until_ready(run(vision, batch, backend=backend))
            try:
                features = call()
            except Exception as error:  # what a library or a compiler refuses is said, and the others still run
                failures.append(f"{count} images, {name}: {str(error).splitlines()[0][:200]}")
                continue
            assert bool(jnp.isfinite(features.astype(jnp.float32)).all()), "features that are not finite"
            yield row(config, count, name, *medians([call], args.seconds), len(batch.segments))
        if theirs is not None:
            seconds = medians([theirs(np.asarray(exact.patches), count)], args.seconds)
            yield row(config, count, "transformers", *seconds, count * PATCHES)
    if failures:
        raise SystemExit("; ".join(failures))


def row(config: VisionConfig, count: int, name: str, seconds: float, size: int) -> dict:
    """Return one row of the table."""
    rate = flops(config, count) / seconds
    return {
        "attention": f"{count} images, {name}", "ms": 1e3 * seconds, "images/s": count / seconds,
        "TFLOP/s": rate / 1e12, "of peak": rate / PEAK, "patches": size,
    }  # fmt: skip


def flops(config: VisionConfig, images: int) -> float:
    """Return the multiplications and additions for images of `GRID`."""
    width, hidden, projected = config.hidden_size, config.intermediate_size, config.projector_hidden_size
    in_layer = PATCHES * (4 * width**2 + 2 * width * hidden) + 2 * PATCHES**2 * width
    per_patch = config.patch_values * width + width * projected + projected * TEXT_WIDTH
    per_feature = config.merged_patches * TEXT_WIDTH * projected + projected * TEXT_WIDTH
    total = config.num_hidden_layers * in_layer + PATCHES * per_patch + PATCHES // config.merged_patches * per_feature
    return 2.0 * images * total


def transformers_tower(config: VisionConfig) -> Callable[[np.ndarray, int], Callable[[], object]]:
    """Return transformers' tower and projector in bfloat16 on the GPU.

    Raises:
      ValueError: They cannot run here.
    """
    try:
        import torch
        from transformers.models.minimax_m3_vl import modeling_minimax_m3_vl as m3_vl
        from transformers.models.minimax_m3_vl.configuration_minimax_m3_vl import MiniMaxM3VLConfig
    except ImportError as error:
        raise ValueError(f"transformers' tower: {error}") from None
    if not torch.cuda.is_available():
        raise ValueError("transformers' tower: torch has no GPU here")
    whole = MiniMaxM3VLConfig(vision_config={"num_hidden_layers": config.num_hidden_layers})
    with torch.device("cuda"):
        tower = m3_vl.MiniMaxM3VLVisionModel._from_config(whole.vision_config, attn_implementation="sdpa")
        projector = m3_vl.MiniMaxM3VLMultiModalProjector(whole)
    tower, projector = tower.to(torch.bfloat16).eval(), projector.to(torch.bfloat16).eval()

    def prepare(patches: np.ndarray, count: int) -> Callable[[], object]:
        pixels = torch.from_numpy(patches).to("cuda", torch.bfloat16)
        grids = torch.tensor([GRID] * count)

        @torch.no_grad()
        def call():
            out = projector(tower(pixel_values=pixels, grid_thw=grids.to("cuda")).last_hidden_state.squeeze(0))
            torch.cuda.synchronize()
            return out

        return call

    return prepare
