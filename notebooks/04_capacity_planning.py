# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # How many devices for how much context
#
# The published model has 426 billion parameters in its text part and a context of a million tokens. This notebook
# asks the planner, [`m3jax.planning`](../docs/planning.md), what that means for a cluster:
#
# 1. what a token of context costs, and when the cache outweighs the weights;
# 2. the longest context of a slice, for four accelerators and two storage types;
# 3. what each way to divide 64 devices holds;
# 4. what bounds a decode step as the context grows;
# 5. the same question to a TPU's own compiler, for a small model and four devices that are not there.
#
# Times are rooflines from public chip rates: nothing runs faster, everything runs slower. Each claim is an assertion
# too.

# %%
import dataclasses
import math

import matplotlib.pyplot as plt
import numpy as np

from m3jax import M3Config
from m3jax.planning import GIB, Job, candidates, evaluate, parse_slice
from m3jax.planning.compiler import compile_programs

plt.rcParams.update({"figure.dpi": 90, "font.size": 10, "axes.titlesize": 11, "figure.constrained_layout.use": True})

M3 = M3Config.m3()
MILLION = M3.max_position_embeddings
FLOAT8 = dict(kv_dtype="float8_e4m3fn", index_dtype="float8_e4m3fn")


def job(topology: str, **changes) -> Job:
    return Job(**dict(config=M3, slice=parse_slice(topology), context=MILLION, batch=1) | changes)


# %% [markdown]
# ## 1. What a token of context costs
#
# Each of 60 layers keeps keys and values of 4 heads, each of 57 sparse layers one index key more. Sparse attention
# reads little of it, but all of it must lie somewhere.

# %%
ONE = dict(data=1, context=1, expert=1, tensor=1)
whole = evaluate(job("b200:1"), ONE).memory
per_token = (whole.cache + whole.index_keys) / MILLION
print(f"weights {whole.weights / GIB:.0f} GiB, of them experts {whole.experts / GIB:.0f} GiB")
print(f"a token of context {per_token / 1024:.1f} KiB, of it index keys {whole.index_keys / MILLION / 1024:.1f} KiB")
print(f"a row of a million tokens {MILLION * per_token / GIB:.0f} GiB")
print(f"cache and weights are equal at {whole.weights / per_token / MILLION:.1f} million tokens of all rows together")
assert 134 < per_token / 1024 < 135

# %%
tokens = np.geomspace(1e4, 64 * MILLION, 50)
plt.figure(figsize=(6.5, 3))
plt.loglog(tokens, tokens * per_token / GIB, label="cache, bfloat16")
plt.loglog(tokens, tokens * per_token / 2 / GIB, label="cache, float8")
plt.axhline(whole.weights / GIB, color="k", ls="--", label="weights, bfloat16")
plt.xlabel("tokens of all rows together")
plt.ylabel("GiB of all devices")
plt.title("The cache outweighs the model after six million tokens")
plt.legend()
plt.show()

# %% [markdown]
# ## 2. The longest context of a slice
#
# For each slice and storage type: the most tokens that one row can have on the best mesh, in powers of two. "Fits"
# counts weights, cache and a guess of temporaries.

# %%
SLICES = {
    "v5e": [f"v5e:{s}" for s in ("4x8", "8x8", "8x16", "16x16")],
    "v6e": [f"v6e:{s}" for s in ("4x4", "4x8", "8x8", "8x16", "16x16")],
    "v5p": [f"v5p:{s}" for s in ("2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8")],
    "h200": [f"h200:{n}" for n in (4, 8)],
}
CONTEXTS = [2**n for n in range(12, 21)]


def longest(topology: str, batch: int, **types) -> float:
    """Tokens a row of the best mesh; NaN if not even the weights fit."""
    fits = lambda context: candidates(job(topology, context=context, batch=batch, **types))[0].memory.fits
    low, high = -1, len(CONTEXTS) - 1
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(CONTEXTS[middle]) else (low, middle - 1)
    return CONTEXTS[low] if low >= 0 else math.nan


BATCH = 4
found = {(t, bool(types)): longest(t, BATCH, **types) for ts in SLICES.values() for t in ts for types in ({}, FLOAT8)}
assert all(not found[t, False] > found[t, True] for t, _ in found)  # smaller storage never holds less

# %%
figure, panels = plt.subplots(1, 2, figsize=(8, 3.2), sharey=True)
for panel, small in zip(panels, (False, True), strict=True):
    for name, slices in SLICES.items():
        count = [parse_slice(t).num_devices for t in slices]
        panel.plot(count, [found[t, small] for t in slices], "o-", label=name)
    panel.set_xscale("log", base=2)
    panel.set_yscale("log", base=2)
    panel.set_xlabel("devices")
    panel.set_title("cache in float8" if small else "cache in bfloat16")
panels[0].set_ylabel(f"longest context of {BATCH} rows")
panels[0].legend()
plt.show()

# %% [markdown]
# ## 3. Ways to divide 64 devices
#
# Experts are divided over the expert and tensor axes, pages over those of `m3jax.parallel.PAGE_AXES`, KV heads over
# at most four devices. So a mesh that is good for weights can be bad for the cache. Each bar is one mesh of a
# v5p:4x4x4 with four rows of a million tokens; the ten smallest are shown.

# %%
sixty_four = job("v5p:4x4x4", batch=4)
meshes = sorted(candidates(sixty_four), key=lambda c: c.memory.total)[:10]
parts = ("experts", "other_weights", "cache", "index_keys", "temporaries")
plt.figure(figsize=(8, 3.8))
left = np.zeros(len(meshes))
for part in parts:
    values = np.array([getattr(c.memory, part) for c in meshes]) / GIB
    plt.barh(range(len(meshes)), values, left=left, label=part.replace("_", " "))
    left += values
plt.axvline(sixty_four.slice.chip.hbm / GIB, color="k", ls="--")
plt.yticks(range(len(meshes)), [c.name for c in meshes], fontsize=8)
plt.gca().invert_yaxis()
plt.xlabel("GiB of one device; the dashed line is what it has")
plt.legend(fontsize=8)
plt.show()
print(f"smallest: {meshes[0].name}, {meshes[0].memory.total / GIB:.1f} GiB")

# %% [markdown]
# ## 4. What bounds a decode step
#
# Sparse attention reads 16 blocks a query and head, however long the context is; what grows is reading the index
# keys, and the three dense layers. At a short context a step reads weights, mostly.

# %%
contexts = [2**n for n in range(13, 21)]
steps = [evaluate(job("v5p:4x4x4", context=n, batch=4, **FLOAT8), meshes[0].sizes).decode for n in contexts]
chip = sixty_four.slice.chip
plt.figure(figsize=(6.5, 3))
for resource in ("compute", "memory", "links"):
    plt.loglog(contexts, [s.seconds(chip)[resource] * 1e3 for s in steps], "o-", base=2, label=resource)
plt.xlabel("context")
plt.ylabel("ms at best")
plt.title(f"a decode step of 4 rows on v5p:4x4x4, {meshes[0].name}", fontsize=9)
plt.legend()
plt.show()
times = [s.roofline(chip) for s in steps]
print(f"128 times the context, {times[-1] / times[0]:.1f} times the time")
assert times == sorted(times) and times[-1] / times[0] < 64

# %% [markdown]
# ## 5. Asking the compiler
#
# For a TPU slice the planner also compiles both programs of the engine with the TPU's own compiler, which needs no
# TPU. `python -m m3jax.plan --topology v5p:4x4x4 --context 1048576 --batch 4` does that for the whole model. Here a
# model of two layers and four devices of a v5e, to stay within seconds: the decode step.

# %%
small = dataclasses.replace(
    M3, num_hidden_layers=2, layer_types=M3.layer_types[2:4], mlp_layer_types=M3.mlp_layer_types[2:4], hidden_size=256,
    vocab_size=1024, num_attention_heads=8, intermediate_size=256, dense_intermediate_size=512,
    shared_intermediate_size=256, num_local_experts=8, bos_token_id=None, eos_token_id=(),
)  # fmt: skip
question = job("v5e:2x2", config=small, context=4096, batch=2)
sizes = dict(data=1, context=1, expert=2, tensor=2)
answer = compile_programs(question, sizes, ("decode",))["decode"]
print(f"arguments {answer['arguments'] / 2**20:.1f} MiB, temporaries {answer['temporaries'] / 2**20:.1f} MiB")
for kind, count in sorted(answer["collectives"].items()):
    print(f"{kind:20s} {count:4d} x, {answer['collective_bytes'][kind] / 1024:8.1f} KiB together")
planned = evaluate(question, sizes).memory
held = planned.weights + planned.cache + planned.index_keys
print(f"planned arguments {held / 2**20:.1f} MiB")
assert held < answer["arguments"] < 1.1 * held
