"""What a loop of decode steps is compiled from on a GPU, on a machine that has none."""

import re
import warnings
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import tiny
from support.lowering import H200

from m3jax.cache import Cache
from m3jax.decoding import PromptLookup, Sampling, device
from m3jax.decoding.device.step import STEP_OPTIONS
from m3jax.decoding.engine import runner
from m3jax.decoding.sampling import SamplingParams
from m3jax.model import abstract

ROWS, BLOCKS, STEPS = 4, 16, 8
# Heads, blocks and widths that the kernels take, and partial selection.
CONFIG = tiny.config(
    "dMMM", head_dim=128, index_head_dim=128, index_block_size=128, index_topk_blocks=4, rotary_dim=64,
    hidden_size=256, intermediate_size=128, max_position_embeddings=BLOCKS * 128,
)  # fmt: skip


@cache
def lowered(name: str) -> str:
    """One of the device's programs for an H200, before XLA has seen it."""
    model = abstract(CONFIG, "bfloat16")
    rows = lambda dtype, *shape: jnp.zeros((ROWS, *shape), dtype)
    pages = Cache.pool(CONFIG, 8, ROWS, BLOCKS)
    sampling = SamplingParams.stack([Sampling.greedy()] * ROWS)
    counts = rows(jnp.int32)
    continuations = device.Continuations(sampling, rows(jnp.int32, 8), counts, counts, rows(bool, CONFIG.vocab_size))
    with jax.sharding.use_abstract_mesh(H200), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The Pallas Triton backend is deprecated")
        if name == "decode":
            state = device.State(pages, continuations, counts, counts, counts)
            traced = device.decode_on_gpu.trace(model, state, np.int32(STEPS), max_steps=STEPS)
        else:
            drafter = PromptLookup()
            memory = drafter.begin(model, ROWS, BLOCKS * 128)
            state = device.State(drafter.join(model, pages), continuations, counts, counts, counts, memory)
            traced = device.rounds_on_gpu.trace(
                model, drafter, state, np.int32(STEPS), draft_tokens=3, max_rounds=STEPS
            )
        return traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("name", ["decode", "rounds"])
def test_a_loop_of_steps_has_no_loop_inside(name):
    """A loop over layers takes each layer's weights out of the stack by copying them,, in each step."""
    text = lowered(name)
    assert "triton" in text, "no kernel is in the program"
    loops = re.findall(r"stablehlo\.while", text)
    assert len(loops) == 1, f"{len(loops)} loops, expected that over steps alone"


def test_weights_are_cut_into_layers_before_the_loop():
    """Inside the loop XLA would cut them in each step."""
    before, _, inside = lowered("decode").partition("stablehlo.while")
    layer = "tensor<3x256x8x128xbf16>"  # the queries' projections of the stack of three layers
    cut = re.compile(rf"stablehlo\.(dynamic_)?slice.*{re.escape(layer)}")
    assert len(cut.findall(before)) == 3
    assert not cut.search(inside)


def test_an_engine_on_a_gpu_runs_the_programs_with_its_options(monkeypatch):
    monkeypatch.setattr(runner, "platform", lambda: "gpu")
    programs = runner._programs(is_invariant=False)
    assert programs.decode is device.decode_on_gpu and programs.decode_in_rounds is device.rounds_on_gpu
    kinds = STEP_OPTIONS["xla_gpu_enable_command_buffer"].split(",")
    assert {"WHILE", "CONDITIONAL"} <= set(kinds), "the host would wait for each step"
