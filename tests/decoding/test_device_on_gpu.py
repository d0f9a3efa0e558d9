"""The program of a loop of decode steps on a GPU, lowered on a machine that has none."""

import re
import warnings
from functools import cache
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import tiny
from support.engines import runner_of
from support.lowering import H200

from m3jax.cache import Cache
from m3jax.decoding import Engine, PromptLookup, Sampling, device
from m3jax.decoding.device.compiler_options import OPTIONS, STEP_OPTIONS, TPU_PREFILL_OPTIONS
from m3jax.decoding.engine import runner
from m3jax.decoding.sampling import WORD_TOKENS, SamplingParams
from m3jax.model import abstract
from m3jax.ops import measured
from m3jax.tiles import GPU_OPTIONS, UNTUNED

ROWS, BLOCKS, STEPS = 4, 16, 8
# Heads, blocks and widths that the kernels take, and partial selection.
CONFIG = tiny.config(
    "dMM", head_dim=128, index_head_dim=128, index_block_size=128, index_topk_blocks=4, rotary_dim=64,
    hidden_size=256, intermediate_size=128, max_position_embeddings=BLOCKS * 128,
)  # fmt: skip

# What is read of a chunk's program is what comes behind its layers.
ONE_LAYER = tiny.config(
    "d", head_dim=128, index_head_dim=128, index_block_size=128, index_topk_blocks=4, rotary_dim=64,
    hidden_size=256, intermediate_size=128, max_position_embeddings=BLOCKS * 128,
)  # fmt: skip


@cache
def lowered(name: str, max_steps: int = STEPS) -> str:
    """One of the device's programs for an H200, before XLA has seen it; prefill is of one prompt."""
    config = ONE_LAYER if name.endswith("prefill") else CONFIG
    model = abstract(config, "bfloat16")
    if name == "invariant prefill":
        model = model.with_invariance()
    rows = lambda dtype, *shape: jnp.zeros((ROWS, *shape), dtype)
    pages = Cache.pool(config, 8, ROWS, BLOCKS)
    sampling = SamplingParams.stack([Sampling.greedy()] * ROWS)
    counts = rows(jnp.int32)
    continuations = device.Continuations(
        sampling, rows(jnp.int32, 8), counts, counts, counts, counts, rows(jnp.int32, CONFIG.vocab_size),
        rows(jnp.int32, WORD_TOKENS - 1),
    )  # fmt: skip
    steps = np.full(ROWS, STEPS, np.int32)
    with jax.sharding.use_abstract_mesh(H200), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The Pallas Triton backend is deprecated")
        if name == "decode":
            state = device.State(pages, continuations, counts, counts, counts)
            traced = device.program("decode", "gpu", "narrow").trace(model, state, steps, max_steps=max_steps)
        elif name.endswith("prefill"):
            state = device.State(pages, continuations, counts, counts, counts)
            of_prompt = jax.tree.map(lambda x: x[:1], (counts, rows(jnp.int32, 256), counts, counts, continuations))
            traced = device.program("prefill", "gpu", "narrow").trace(model, state, device.Chunk(*of_prompt))
        else:
            drafter = PromptLookup()
            memory = drafter.begin(model, ROWS, BLOCKS * 128)
            state = device.State(drafter.join(model, pages), continuations, counts, counts, counts, memory)
            traced = device.program("decode_in_rounds", "gpu", "narrow").trace(
                model, drafter, state, steps, draft_tokens=3, max_rounds=max_steps
            )
        return traced.lower(lowering_platforms=("cuda",)).as_text()


QUERIES = re.compile(r"stablehlo\.(dynamic_)?slice.*tensor<2x256x8x128xbf16>")  # cut out of the stack of two layers


@pytest.mark.parametrize("name", ["decode", pytest.param("rounds", marks=pytest.mark.further)])
def test_a_loop_of_steps_has_no_loop_inside(name):
    """A loop over layers takes each layer's weights out of the stack by copying them,, in each step."""
    text = lowered(name)
    assert "triton" in text, "no kernel is in the program"
    loops = re.findall(r"stablehlo\.while", text)
    assert len(loops) == 1, f"{len(loops)} loops, expected that over steps alone"


def test_the_host_does_not_wait_for_what_prefill_draws():
    """A condition of the sampler comes last in a chunk: the host would wait for all of it before it prepares the next
    one."""
    main, *_ = lowered("prefill").split("func.func private")  # layers are functions of their own
    assert "stablehlo.sort" in main, "the sampler is not where it was looked for"
    assert "stablehlo.case" not in main and "stablehlo.if" not in main


def test_in_the_invariant_mode_prefill_draws_as_a_step_does():
    """Computed otherwise a draw could round otherwise: a preempted request's next token is drawn by prefill."""
    assert "stablehlo.case" in lowered("invariant prefill").split("func.func private")[0]


def test_weights_are_cut_into_layers_before_the_loop():
    """Inside the loop XLA would cut them in each step."""
    before, _, inside = lowered("decode").partition("stablehlo.while")
    assert len(QUERIES.findall(before)) == 2
    assert not QUERIES.search(inside)


@pytest.mark.further  # products read out of a stack: tests/kernels
def test_what_a_kernel_reads_in_its_stack_is_not_cut():
    """At widths and rows where it gains; the copy of all of M3's layers would be 21 GB."""
    with mock.patch.object(measured, "STACKED_ROWS", {(256, 1024): ROWS}):
        text = lowered("decode", STEPS + 1)  # another program: this one is traced already
    assert "stacked_project" in text and not QUERIES.search(text)


def test_programs_on_a_gpu_have_its_options():
    options = {"narrow": (STEP_OPTIONS, UNTUNED), "wide": (STEP_OPTIONS | UNTUNED, UNTUNED)}
    options["invariant"] = STEP_OPTIONS | GPU_OPTIONS, GPU_OPTIONS
    for mode, (of_steps, of_prompts) in options.items():
        assert OPTIONS["decode", "gpu", mode] == OPTIONS["decode_in_rounds", "gpu", mode] == of_steps
        assert OPTIONS["prefill", "gpu", mode] == OPTIONS["read_media", "gpu", mode] == of_prompts
    for name in device.PROGRAMS:
        options_of_tpu = {"prefill": TPU_PREFILL_OPTIONS}.get(name, {})
        assert OPTIONS.get((name, "tpu", "wide"), {}) == options_of_tpu
        assert device.program(name, "cpu", "invariant") is getattr(device, name)
        assert device.program(name, "gpu", "invariant") is not device.program(name, "gpu", "wide")
    assert device.program("prefill", "gpu", "wide") is device.program("prefill", "gpu", "narrow")  # compiled once
    assert not UNTUNED["xla_gpu_autotune_level"] and not UNTUNED["xla_gpu_enable_triton_gemm"], "one without the other"
    kinds = STEP_OPTIONS["xla_gpu_enable_command_buffer"].split(",")
    assert {"WHILE", "CONDITIONAL"} <= set(kinds), "the host would wait for each step"
    assert not STEP_OPTIONS["xla_gpu_enable_cub_radix_sort"], "a sort that no graph can hold"


@pytest.mark.parametrize(("mode", "dtype"), [("narrow", "bfloat16"), ("wide", "float32"), ("invariant", "bfloat16")])
def test_an_engine_on_a_gpu_runs_the_programs_of_its_mode(monkeypatch, mode, dtype):
    monkeypatch.setattr(runner, "platform", lambda: "gpu")
    small = tiny.config("dM")
    model = tiny.model(small, dtype=dtype)
    model = model.with_invariance() if mode == "invariant" else model
    served = Engine(model, pages=4, max_batch=2, prefill_chunk=16, max_length=32)
    for name, program in runner_of(served)._programs.items():
        assert program is device.program(name, "gpu", mode), f"{name} of {mode} weights"
