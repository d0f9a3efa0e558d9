"""The compiler's options of the device's programs by platform and mode, as data (docs/notes/performance.md)."""

from collections.abc import Mapping
from typing import Literal

from m3jax.tiles import GPU_OPTIONS, UNTUNED

# How a model is to be computed, as far as the compiler's options depend on it: an invariant one; one that has weights
# of 16 bits or fewer; any other.
Mode = Literal["invariant", "narrow", "wide"]
Options = Mapping[str, bool | int | str]

# A loop of steps on a GPU: whatever can be is recorded in one CUDA graph, the loop and conditions too. The host
# launches it once a call, and neither waits for a condition nor launches kernels one by one. In the graph a kernel
# waits for those alone whose results it reads, or whose memory it takes. CUB's sorts cannot be recorded, and where the
# sampler has one (of 1 or 32 rows, not of 8) nothing would be.
STEP_OPTIONS = {
    "xla_gpu_enable_cub_radix_sort": False,
    "xla_gpu_enable_command_buffer": "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,DYNAMIC_SLICE_FUSION,CONDITIONAL,WHILE",
    "xla_gpu_command_buffer_scheduling_mode": "CONCURRENT",
}

# XLA's CPU backend leaves single matrix products to YNNPACK, which takes a quarter longer than XLA's own kernels at
# the sizes of a prefill; for those of a decode step it is the faster one.
CPU_PREFILL_OPTIONS = {"xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_REDUCE"}

# XLA's CPU backend reads pages eight numbers at a time where YNNPACK takes a product together with the reshape before
# it, and one at a time otherwise, if heads have few.
CPU_DECODE_OPTIONS = {
    "xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_DOT,LIBRARY_FUSION_TYPE_REDUCE",
}

# A TPU goes on with other work while devices exchange tokens with their experts: libtpu's own default is to wait.
TPU_PREFILL_OPTIONS = {"xla_tpu_enable_async_all_to_all": True}

# By (program, platform, mode); what is not here is compiled with XLA's own defaults. On a CPU prompts and steps of an
# invariant model have one set of options, XLA's, since both are to give a token the same bits.
OPTIONS: dict[tuple[str, str, Mode], Options] = {
    **{("prefill", "tpu", mode): TPU_PREFILL_OPTIONS for mode in ("narrow", "wide", "invariant")},
    **{("prefill", "cpu", mode): CPU_PREFILL_OPTIONS for mode in ("narrow", "wide")},
    **{("decode", "cpu", mode): CPU_DECODE_OPTIONS for mode in ("narrow", "wide")},
    # XLA times its ways to compute a product for steps with narrow weights alone: nothing bounds those but how fast
    # they read. For wide ones it would time products for most of a minute, and prefill gains nothing from it.
    **{(name, "gpu", mode): UNTUNED for name in ("prefill", "read_media") for mode in ("narrow", "wide")},
    **{(name, "gpu", "narrow"): STEP_OPTIONS for name in ("decode", "decode_in_rounds")},
    **{(name, "gpu", "wide"): STEP_OPTIONS | UNTUNED for name in ("decode", "decode_in_rounds")},
    **{(name, "gpu", "invariant"): GPU_OPTIONS for name in ("prefill", "read_media")},
    **{(name, "gpu", "invariant"): STEP_OPTIONS | GPU_OPTIONS for name in ("decode", "decode_in_rounds")},
}
