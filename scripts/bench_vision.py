"""Images a second through M3's vision tower and projector, and the share of the GPU's bfloat16 peak; random weights.

    python scripts/bench_vision.py                            # images of 576 tokens, 1, 8 and 64 at a time
    python scripts/bench_vision.py --transformers             # beside transformers' tower, where that can run
    python scripts/bench_vision.py --kernels 20               # what each call's kernels take
    python scripts/bench_vision.py --layers 2 --batches 1     # a few layers, as on a CPU

First it checks every backend of attention against the definition. FLOP are counted, of patches alone: what is computed
for padding is not counted, though it takes time. "exact" is a batch without padding. `--products` says who computes
them: the fastest of XLA's own kernels and cuBLAS's, as where nobody tells `jax.jit` otherwise; the fastest of cuBLAS's;
cuBLAS's first choice, as in an engine.
"""

import argparse
import time
from collections.abc import Callable, Iterable

import jax
import jax.numpy as jnp
import numpy as np
from measuring import medians, print_kernels

from m3jax import media
from m3jax.media.packing import bucket_size
from m3jax.model.build import MakeRandom
from m3jax.tiles import UNTUNED
from m3jax.vision import BACKENDS, Vision, VisionConfig, attend_segments, segment_attention

GRID = (1, 36, 64)  # 504 x 896 pixels: 2304 patches, 576 tokens
TEXT_WIDTH = 6144
PEAK = 989e12  # bfloat16, dense: H100 SXM, H200
PRODUCTS = {"fastest": None, "cublas": {"xla_gpu_enable_triton_gemm": False}, "engine": UNTUNED}  # compiler_options
MANY = 8  # images beyond which only the fastest attention runs, unless --backends says more


def main() -> int:
    """Print the checks and a line for each batch; ends with 1 where attention is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 64], help="images at a time (default: 1 8 64)")
    parser.add_argument("--layers", type=int, default=32, help="of the tower (default: M3's 32)")
    parser.add_argument("--seconds", type=float, default=1.0, help="for each line (default: 1)")
    parser.add_argument("--backends", nargs="+", choices=BACKENDS, help="of attention (default: all that run here)")
    parser.add_argument("--transformers", action="store_true", help="run transformers' tower too")
    parser.add_argument("--unchecked", action="store_true", help="do not check attention first")
    parser.add_argument("--products", choices=PRODUCTS, default="fastest", help="who computes them on a GPU")
    parser.add_argument("--kernels", type=int, default=0, help="print so many kernels of each call, by their time")
    args = parser.parse_args()
    if min(args.batches) < 1 or args.layers < 1 or not args.seconds > 0:
        parser.error("--batches, --layers and --seconds must be positive")
    device = jax.devices()[0]
    print(
        f"{device.device_kind}, jax {jax.__version__}, {args.layers} layers, bfloat16, products: {args.products}",
        flush=True,
    )
    fastest = "cudnn" if jax.default_backend() == "gpu" else "xla"
    is_right = args.unchecked or check_attention(dict.fromkeys((fastest, "xla")))
    config = VisionConfig(num_hidden_layers=args.layers)
    vision = Vision(config, TEXT_WIDTH, MakeRandom(jax.random.key(0), "bfloat16", None))
    options = PRODUCTS[args.products] if jax.default_backend() == "gpu" else None
    run = jax.jit(
        lambda vision, batch, backend: vision(batch, backend), static_argnames="backend", compiler_options=options
    )
    theirs = transformers_tower(config) if args.transformers else None
    heads = f"{'images':>6s} {'patches':>8s} {'attention':>13s} {'compile s':>9s} {'ms':>9s}"
    print(f"{heads} {'images/s':>9s} {'TFLOP/s':>8s} of peak")
    for count in args.batches:
        pictures = [picture(seed) for seed in range(count)]
        start = time.perf_counter()
        packed = media.batch(pictures)
        host_ms = 1e3 * (time.perf_counter() - start)
        patches = count * int(np.prod(GRID))
        exact = media.MediaBatch(*(x[:patches] for x in packed[:3]), *packed[3:])
        # Of many images a call by tiles takes seconds, and says nothing new.
        backends = args.backends or ([fastest] if count > MANY else dict.fromkeys((fastest, "xla")))
        ways = [(backend, backend, packed) for backend in backends]
        if patches < len(packed.segments):
            first = next(iter(backends))
            ways.append((first, f"{first}, exact", exact))
        for backend, name, batch in ways:
            batch = jax.device_put(batch)
            call = lambda batch=batch, backend=backend: jax.block_until_ready(run(vision, batch, backend=backend))
            start = time.perf_counter()
            try:
                features = call()
            except Exception as error:  # what a library or a compiler refuses is said, and the others still run
                is_right = False
                print(f"{count:6d} {name}: FAILED, {str(error).splitlines()[0][:200]}", flush=True)
                continue
            compile_s = time.perf_counter() - start
            assert bool(jnp.isfinite(features.astype(jnp.float32)).all()), "features that are not finite"
            [seconds] = medians([call], args.seconds)
            print(line(count, len(batch.segments), name, compile_s, seconds, flops(config, count)), flush=True)
            if args.kernels:
                print_kernels(call, args.kernels)
        print(
            f"       packing on the host: {host_ms:.1f} ms, {host_ms / count:.1f} an image, size {bucket_size(patches)}"
        )
        if theirs is not None:
            [seconds] = medians([theirs(np.asarray(exact.patches), count)], args.seconds)
            print(line(count, patches, "theirs", float("nan"), seconds, flops(config, count)), flush=True)
    return 0 if is_right else 1


def picture(seed: int) -> tuple[np.ndarray, tuple[int, int, int]]:
    """Return patches of noise: time does not depend on the picture."""
    rows = int(np.prod(GRID))
    return np.random.default_rng(seed).standard_normal((rows, 1176), np.float32), GRID


def flops(config: VisionConfig, images: int) -> float:
    """Return the multiplications and additions for images of `GRID`."""
    patches, width, hidden = int(np.prod(GRID)), config.hidden_size, config.intermediate_size
    projected = config.projector_hidden_size
    in_layer = patches * (4 * width**2 + 2 * width * hidden) + 2 * patches**2 * width
    per_patch = config.patch_values * width + width * projected + projected * TEXT_WIDTH
    per_feature = config.merged_patches * TEXT_WIDTH * projected + projected * TEXT_WIDTH
    total = config.num_hidden_layers * in_layer + patches * per_patch + patches // config.merged_patches * per_feature
    return 2.0 * images * total


def line(count: int, size: int, name: str, compile_s: float, seconds: float, work: float) -> str:
    """One row of the table."""
    rate = work / seconds
    return (
        f"{count:6d} {size:8d} {name:>13s} {compile_s:9.1f} {1e3 * seconds:9.2f} {count / seconds:9.1f} "
        f"{rate / 1e12:8.1f} {100 * rate / PEAK:6.1f}%"
    )


def check_attention(backends: Iterable[str]) -> bool:
    """Compare backends with the definition in float32, over batches that take rows of several lengths."""
    cases = {
        "one": [2300],
        "equal": [512] * 5,
        "mixed": [640, 4, 100, 256, 16],
        "many": [16] * 60,
        "uneven": [960] + [4] * 60,
    }
    is_right, rng, size = True, np.random.default_rng(0), 2560
    run = jax.jit(attend_segments, static_argnames="backend")
    for name, lengths in cases.items():
        segments = np.full(size, -1, np.int32)
        segments[: sum(lengths)] = np.repeat(np.arange(len(lengths)), lengths)
        halves = [jnp.asarray(rng.standard_normal((size, 16, 80), np.float32), jnp.bfloat16) for _ in range(3)]
        right = np.asarray(segment_attention(*(x.astype(jnp.float32) for x in halves), jnp.asarray(segments)))
        for backend in backends:
            try:
                found = np.asarray(run(*halves, jnp.asarray(segments), backend=backend), np.float32)
            except Exception as error:  # what a library or a compiler refuses is said, and the others still run
                is_right = False
                print(f"attention, {name:6s} {backend:6s}: FAILED, {str(error).splitlines()[0][:200]}", flush=True)
                continue
            error = float(np.abs(found - right).max())
            is_close = error < 0.03 and not found[segments < 0].any()
            is_right &= is_close
            verdict = "" if is_close else "  WRONG"
            print(f"attention, {name:6s} {backend:6s}: off by {error:.4f} at most{verdict}", flush=True)
    return is_right


def transformers_tower(config: VisionConfig) -> Callable[[np.ndarray, int], Callable[[], object]] | None:
    """transformers' tower and projector in bfloat16 on the GPU; None, with a line, where they cannot run."""
    try:
        import torch
        from transformers.models.minimax_m3_vl import modeling_minimax_m3_vl as m3_vl
        from transformers.models.minimax_m3_vl.configuration_minimax_m3_vl import MiniMaxM3VLConfig
    except ImportError as error:
        print(f"transformers' tower: {error}")
        return None
    if not torch.cuda.is_available():
        print("transformers' tower: torch has no GPU here")
        return None
    whole = MiniMaxM3VLConfig(vision_config={"num_hidden_layers": config.num_hidden_layers})
    with torch.device("cuda"):
        tower = m3_vl.MiniMaxM3VLVisionModel._from_config(whole.vision_config, attn_implementation="sdpa")
        projector = m3_vl.MiniMaxM3VLMultiModalProjector(whole)
    tower, projector = tower.to(torch.bfloat16).eval(), projector.to(torch.bfloat16).eval()
    print(f"transformers' tower: torch {torch.__version__}, attention by sdpa")

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


if __name__ == "__main__":
    raise SystemExit(main())
