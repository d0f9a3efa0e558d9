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
# For whoever has to find machines for the model. Published are 426 billion parameters in its text part and a context of
# a million tokens; this notebook asks the planner, [`m3jax.planning`](../docs/planning.md), what that means for a
# cluster. Words such as *mesh*, *expert* and *index key* are in the [glossary](../docs/glossary.md).
#
#
# 1. what a token of context costs, and when the cache outweighs the weights;
# 2. the longest context of a slice, for four accelerators and two storage types;
# 3. what each way to divide 64 devices holds;
# 4. what bounds a decode step as the context grows;
# 5. the same question to a TPU's own compiler, for a small model and four devices that are not there (where that
#    compiler is installed).
#
# Times are rooflines from public chip rates: nothing runs faster, everything runs slower. Each claim is an assertion
# too.

# %%
import dataclasses
import importlib.util
import math

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from m3jax import M3Config
from m3jax.planning import GIB, Job, candidates, evaluate, parse_slice
from m3jax.planning.compiler import compile_programs

plt.rcParams.update({"figure.dpi": 90, "font.size": 10, "axes.titlesize": 11, "figure.constrained_layout.use": True})

M3 = M3Config.m3()
MILLION = M3.max_position_embeddings
FLOAT8 = dict(kv_dtype="float8_e4m3fn", index_dtype="float8_e4m3fn")
BLUE, ORANGE, GREEN, PURPLE, SKY = "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9"  # told apart by all eyes


def job(topology: str, **changes) -> Job:
    return Job(**dict(config=M3, slice=parse_slice(topology), context=MILLION, batch=1) | changes)


def plain(number: float) -> str:
    """A number of tokens in powers of 1,024, as contexts are named: 8k, 128k, 1M."""
    return f"{number / 2**20:g}M" if number >= 2**20 else f"{number / 2**10:g}k"


def number_axis(axis, values, name) -> None:
    """Ticks at these values of a logarithmic axis and nowhere else, written by `name`."""
    axis.set_major_locator(FixedLocator(values))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: name(value)))


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
equal = whole.weights / per_token
print(f"cache and weights are equal at {equal / 1e6:.1f} million tokens of all rows together")
assert 134 < per_token / 1024 < 135

# %%
tokens = np.geomspace(1e4, 1e8, 50)
fig, axis = plt.subplots(figsize=(8, 3.6))
axis.loglog(tokens, tokens * per_token / GIB, color=BLUE, label="cache, bfloat16")
axis.loglog(tokens, tokens * per_token / 2 / GIB, color=ORANGE, ls="--", label="cache, float8")
axis.axhline(whole.weights / GIB, color="black", ls=":", label="weights, bfloat16")
axis.plot(equal, whole.weights / GIB, "o", color=BLUE)
axis.annotate(f"{equal / 1e6:.1f} million tokens", (equal, whole.weights / GIB), (-12, 6), ha="right",
              textcoords="offset points")  # fmt: skip
number_axis(axis.xaxis, [1e4, 1e5, 1e6, 1e7, 1e8], lambda n: f"{n / 1e6:g} million" if n >= 1e6 else f"{n:,.0f}")
number_axis(axis.yaxis, [1, 10, 100, 1000, 10000], "{:,.0f}".format)
axis.set(xlabel="tokens of all rows together", ylabel="GiB on all devices together")
axis.set_title("The cache outweighs the model after six million tokens")
axis.legend(frameon=False)
plt.show()

# %% [markdown]
# ## 2. The longest context of a slice
#
# For each slice and storage type: the most tokens that each of four rows can have on the best mesh, in powers of two
# and up to the million that the model was made for. "Fits" counts weights, cache and a guess of temporaries.

# %%
SLICES = {
    "v5e": [f"v5e:{s}" for s in ("4x8", "8x8", "8x16", "16x16")],
    "v6e": [f"v6e:{s}" for s in ("4x4", "4x8", "8x8", "8x16", "16x16")],
    "v5p": [f"v5p:{s}" for s in ("2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8")],
    "h200": [f"h200:{n}" for n in (4, 8)],
}
CONTEXTS = [2**n for n in range(12, 21)]


def longest(topology: str, batch: int, **types) -> float:
    """Tokens a row of the best mesh; NaN if the fewest of `CONTEXTS` are too many."""
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
ordered = [topology for slices in SLICES.values() for topology in slices]
kinds = {False: ("o", -0.16, BLUE, "cache in bfloat16"), True: ("D", 0.16, ORANGE, "cache in float8")}
fig, axis = plt.subplots(figsize=(9, 5.6))
for y, topology in enumerate(ordered):
    axis.axhline(y, color="#dddddd", lw=0.6, zorder=0)
    lacking = [name for is_float8, (*_, name) in kinds.items() if math.isnan(found[topology, is_float8])]
    note = "fewer than 4k" + (f" with the {lacking[0]}" if len(lacking) == 1 else "")
    axis.text(2**12.2 if len(lacking) == 1 else 2**11.6, y, note if lacking else "", va="center", fontsize=9)
    for is_float8, (marker, shift, colour, _) in kinds.items():
        axis.plot(found[topology, is_float8], y + shift, marker, color=colour, ms=6)
        axis.plot([2**11.5, found[topology, is_float8]], [y + shift] * 2, color=colour, lw=1.2)
for y in np.cumsum([len(slices) for slices in SLICES.values()])[:-1]:
    axis.axhline(y - 0.5, color="black", lw=0.6)
axis.axvline(MILLION, color="black", ls=":", lw=1)
axis.set_xscale("log")
axis.set(xlim=(2**11.5, 2**20.6), ylim=(len(ordered) - 0.5, -0.5))
number_axis(axis.xaxis, CONTEXTS, plain)
axis.set_yticks(range(len(ordered)), [f"{t} ({parse_slice(t).num_devices})" for t in ordered])
axis.set(xlabel=f"tokens that each of {BATCH} rows can have; dotted: the model's own limit", ylabel="slice (devices)")
axis.set_title("The longest context of a slice")
marks = [Line2D([], [], marker=m, color=c, label=name) for m, _, c, name in kinds.values()]
fig.legend(handles=marks, loc="outside lower center", ncols=2, frameon=False)
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
parts = {"experts": BLUE, "other_weights": SKY, "cache": ORANGE, "index_keys": "black", "temporaries": "#bbbbbb"}
names = {"other_weights": "other weights", "cache": "keys and values", "index_keys": "index keys"}
limit = sixty_four.slice.chip.hbm / GIB
fig, axis = plt.subplots(figsize=(9, 4.4))
left = np.zeros(len(meshes))
for part, colour in parts.items():
    values = np.array([getattr(c.memory, part) for c in meshes]) / GIB
    axis.barh(range(len(meshes)), values, left=left, color=colour, label=names.get(part, part))
    left += values
for y, total in enumerate(left):
    axis.text(total + 0.8, y, f"{total:.0f}", va="center", fontsize=9)
axis.axvline(limit, color="black", ls="--")
axis.text(limit - 1, len(meshes) - 1, f"a v5p has {limit:.0f} GiB", ha="right", va="center")
axis.set_yticks(range(len(meshes)), [c.name for c in meshes], fontsize=9)
axis.invert_yaxis()
axis.set(xlabel="GiB on one device", title="What one of 64 devices holds, by mesh")
fig.legend(loc="outside lower center", ncols=5, frameon=False, fontsize=9)
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
resources = {"memory": ("s", BLUE, -0.2), "compute": ("o", ORANGE, 0), "links": ("^", GREEN, 0.2)}
fig, axis = plt.subplots(figsize=(8, 3.8))
for resource, (marker, colour, shift) in resources.items():
    milliseconds = [step.seconds(chip)[resource] * 1e3 for step in steps]
    axis.plot(np.arange(len(contexts)) + shift, milliseconds, marker, color=colour, ms=7, label=resource)
    for x, value in enumerate(milliseconds):
        axis.vlines(x + shift, 0.02, value, color=colour, lw=2)
axis.set_yscale("log")
axis.set_ylim(0.02, 10)
number_axis(axis.yaxis, [0.1, 1, 10], "{:g} ms".format)
axis.set_xticks(range(len(contexts)), map(plain, contexts))
axis.set(xlabel=f"context of each of 4 rows (v5p:4x4x4, {meshes[0].name})", ylabel="time at best")
axis.set_title("A decode step waits for memory, however long the context is")
fig.legend(loc="outside lower center", ncols=3, frameon=False)
plt.show()
times = [s.roofline(chip) for s in steps]
print(f"128 times the context, {times[-1] / times[0]:.1f} times the time")
assert times == sorted(times) and times[-1] / times[0] < 64

# %% [markdown]
# ## 5. Asking the compiler
#
# For a TPU slice the planner also compiles both programs of the engine with the TPU's own compiler, which needs no
# TPU. `python -m m3jax.plan --topology v5p:4x4x4 --context 1048576 --batch 4` does that for the whole model. Here a
# model of two sparse layers and four devices of a v5e, to stay within seconds: the decode step.
#
# The compiler, libtpu, comes with `pip install 'jax[tpu]'`. It is no part of the extra `notebooks`: on a machine that
# has no TPU jax then looks for one at every start, with complaints and sometimes for minutes, unless
# `JAX_PLATFORMS=cpu` is set. Without it the comparison below is left out, and a line says so; all above is arithmetic
# and needs none.

# %%
small = dataclasses.replace(
    M3, num_hidden_layers=2, layer_types=M3.layer_types[-2:], mlp_layer_types=M3.mlp_layer_types[-2:], hidden_size=256,
    vocab_size=1024, num_attention_heads=8, intermediate_size=256, dense_intermediate_size=512,
    shared_intermediate_size=256, num_local_experts=8, bos_token_id=None, eos_token_id=(),
)  # fmt: skip
question = job("v5e:2x2", config=small, context=4096, batch=2)
sizes = dict(data=1, context=1, expert=2, tensor=2)
planned = evaluate(question, sizes).memory
held = planned.weights + planned.cache + planned.index_keys
print(f"planned arguments {held / 2**20:.1f} MiB")
if importlib.util.find_spec("libtpu") is None:
    print("left out: what the compiler says, because libtpu is not installed (pip install 'jax[tpu]')")
else:
    answer = compile_programs(question, sizes, ("decode",))["decode"]
    taken, temporaries = answer["arguments"], answer["temporaries"]
    print(f"compiled: arguments {taken / 2**20:.1f} MiB, temporaries {temporaries / 2**20:.1f} MiB")
    for kind, count in sorted(answer["collectives"].items()):
        print(f"{kind:20s} {count:4d} x, {answer['collective_bytes'][kind] / 1024:8.1f} KiB together")
    assert held < taken < 1.1 * held
