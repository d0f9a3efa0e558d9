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
# # From a thousand users to ten million
#
# For whoever plans a service. [Notebook 04](04_capacity_planning.ipynb) asks what fits on a slice; this one asks how
# many devices serve agents, how many of them should [read prompts](../docs/disaggregated.md), what travels between
# them, and what the next bottleneck is. All numbers are the planner's ([`m3jax.planning`](../docs/planning.md)): floors
# from public rates, and *expected* times, which are floors over the share of them that one H200 reached on four layers.
# The whole model was not run: a mesh's expected time leaves out what collectives take beside their bytes, so the counts
# below are the least that one could hope for.
#
# **The shape.** Every turn of an agent begins with the same 64k tokens (instructions, tools, a repository), then has
# 2,048 of its own, and writes 500. A user has a turn a minute. A token may take 50 ms.
#
# 1. what a decode step reads, and how many rows a node can have;
# 2. what a turn's prompt costs, with and without its prefix in the cache;
# 3. devices for a thousand, a hundred thousand and ten million users, and their ratio;
# 4. bytes between nodes;
# 5. where the bottleneck moves as the prefix grows.

# %%
import dataclasses
import math

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from m3jax import M3Config
from m3jax.planning import GIB, Job, evaluate, expected, parse_slice

plt.rcParams.update({"figure.dpi": 90, "font.size": 10, "axes.titlesize": 11, "figure.constrained_layout.use": True})
BLUE, ORANGE, GREEN, PURPLE, SKY = "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9"  # told apart by all eyes

M3 = M3Config.m3()
SHARED, OWN, NEW = 65_536, 2_048, 500  # tokens of a turn
TURN_SECONDS, TOKEN_SECONDS = 60.0, 0.050
USERS = {"1k": 1_000, "100k": 100_000, "10M": 10_000_000}
NODE = parse_slice("h200:8")
MESHES = [
    dict(data=1, context=1, expert=8 // tensor, tensor=tensor) for tensor in (1, 2, 4, 8)
]  # of a node; experts are most of the weights


def job(**changes) -> Job:
    shared = dict(config=M3, slice=NODE, context=SHARED + OWN + NEW, chunk=OWN, weights="mxfp8")
    return Job(**shared | changes)


def number_axis(axis, values, name) -> None:
    """Ticks at these values of a logarithmic axis and nowhere else, written by `name`."""
    axis.set_major_locator(FixedLocator(values))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: name(value)))


# %% [markdown]
# ## 1. How many rows a node can have
#
# All rows read the same shared pages, which lie on a node once: memory holds 64k tokens and 2,548 of each row. But each
# row *reads* them by itself: its index keys in every sparse layer, and all keys and values of the three dense layers.


# %%
def held_bytes(mesh: dict[str, int], rows: int) -> float:
    """Bytes on one device of a node where `rows` share their prefix."""
    found = evaluate(job(), mesh).memory
    per_token = (found.cache + found.index_keys) / job().context
    return found.weights + found.temporaries + per_token * (SHARED + rows * (OWN + NEW))


def step(rows: int, mesh: dict[str, int], **changes):
    """(seconds that a step is expected to take, the least that it can take)."""
    question = job(batch=rows, **changes)
    work = evaluate(question, mesh).decode
    return expected(question, work, "decode").seconds, work.roofline(NODE.chip)


ROWS = [2**n for n in range(12)]
fits = {rows: [mesh for mesh in MESHES if held_bytes(mesh, rows) <= NODE.chip.hbm] for rows in ROWS}
best = {rows: min(fits[rows], key=lambda mesh: step(rows, mesh)[0]) for rows in ROWS if fits[rows]}
seconds = {rows: step(rows, mesh) for rows, mesh in best.items()}
allowed = [rows for rows in best if seconds[rows][0] <= TOKEN_SECONDS]
rows_of_node = max(allowed)
tokens_a_second = rows_of_node / seconds[rows_of_node][0]
print(f"a node of 8 H200s holds up to {max(best)} rows and decodes {rows_of_node} within {TOKEN_SECONDS * 1e3:.0f} ms:")
print(f"{seconds[rows_of_node][0] * 1e3:.1f} ms a step on {best[rows_of_node]}, {tokens_a_second:,.0f} tokens a second")
assert len(allowed) < len(best)  # time ends it, not memory


# %%
def parts(question: Job, mesh: dict[str, int]) -> dict[str, float]:
    """Bytes that one device reads in a step, by what they are: halving a type's width shows its part."""
    whole = evaluate(question, mesh).decode.traffic
    narrow = lambda **types: 2 * (whole - evaluate(dataclasses.replace(question, **types), mesh).decode.traffic)
    index, kv = narrow(index_dtype="float8_e4m3fn"), narrow(kv_dtype="float8_e4m3fn")
    return {"weights": whole - index - kv, "index keys": index, "keys and values": kv}


mesh = best[rows_of_node]
read = {rows: parts(job(batch=rows), mesh) for rows in best}
colours = {"weights": BLUE, "index keys": "black", "keys and values": ORANGE}
fig, axis = plt.subplots(figsize=(8, 3.8))
left = np.zeros(len(read))
for name, colour in colours.items():
    values = np.array([of_rows[name] / sum(of_rows.values()) for of_rows in read.values()])
    axis.bar(range(len(read)), values, bottom=left, color=colour, label=name)
    left += values
for x, of_rows in enumerate(read.values()):
    axis.text(x, 1.02, f"{sum(of_rows.values()) / 1e9:.0f} GB", ha="center", fontsize=9)
axis.set_ylim(0, 1.12)
axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0%}"))
axis.set_xticks(range(len(read)), [f"{rows:,}" for rows in read])
axis.set(xlabel="rows that decode together", ylabel="of what one device of eight reads")
axis.set_title("More rows share the weights; the context is read for each of them")
fig.legend(loc="outside lower center", ncols=3, frameon=False)
plt.show()
many, few = read[rows_of_node], read[1]
share = (many["index keys"] + many["keys and values"]) / sum(many.values())
print(f"at {rows_of_node} rows {share:.0%} of what a step reads is context")
assert few["weights"] > sum(few.values()) / 2 and share > 0.3

# %% [markdown]
# ## 2. A turn's prompt
#
# With the shared pages in its cache a node computes 2,048 tokens a turn, and attends to 64k more. Without, it computes
# all of them. One prompt is read at a time; several short ones in a call would cost less.


# %%
def prefill_seconds(tokens: int, start: int) -> float:
    """Expected seconds to read `tokens` of a prompt behind `start` others, on the best mesh of a node."""

    def of_mesh(mesh: dict[str, int]) -> float:
        total = 0.0
        for begin in range(start, start + tokens, 8192):
            size = min(8192, start + tokens - begin)
            question = job(context=begin + size, chunk=size)
            total += expected(question, evaluate(question, mesh).prefill, "prefill").seconds
        return total

    return min(of_mesh(mesh) for mesh in MESHES)


cached, whole = prefill_seconds(OWN, SHARED), prefill_seconds(SHARED + OWN, 0)
print(
    f"a prompt takes a node {cached:.2f} s with its prefix in the cache, {whole:.1f} s without: {whole / cached:.0f} x"
)
assert whole > 10 * cached

# %% [markdown]
# ## 3. Devices
#
# Turns a second, times what a turn takes of a node. Queues need room: nodes are planned to be busy 70% of the time.

# %%
BUSY = 0.7


def nodes(users: int, prompt_seconds: float) -> tuple[int, int]:
    """(nodes that read prompts, nodes that decode)."""
    turns = users / TURN_SECONDS
    return math.ceil(turns * prompt_seconds / BUSY), math.ceil(turns * NEW / tokens_a_second / BUSY)


counts = {(name, kind): nodes(users, time) for name, users in USERS.items() for kind, time in
          (("prefix cached", cached), ("read anew", whole))}  # fmt: skip
for (name, kind), (reading, decoding) in counts.items():
    ratio = f"{reading / decoding:5.2f} : 1"
    print(f"{name:>4s} users, {kind:13s}: {8 * reading:9,} devices read, {8 * decoding:9,} decode: {ratio}")

# %%
fig, axis = plt.subplots(figsize=(8, 3.6))
labels = []
for y, ((name, kind), (reading, decoding)) in enumerate(counts.items()):
    axis.barh(y - 0.2, 8 * reading, 0.38, color=ORANGE, label="read prompts" if y == 0 else None)
    axis.barh(y + 0.2, 8 * decoding, 0.38, color=BLUE, label="decode" if y == 0 else None)
    for shift, number in ((-0.2, reading), (0.2, decoding)):
        axis.text(8 * number * 1.1, y + shift, f"{8 * number:,}", va="center", fontsize=9)
    labels.append(f"{name}, {kind}")
axis.set_yticks(range(len(labels)), labels)
axis.invert_yaxis()
axis.set_xscale("log")
axis.set_xlim(4, 3e8)
number_axis(axis.xaxis, [8, 100, 1e4, 1e6, 1e8], "{:,.0f}".format)
axis.set(xlabel="H200s, at least", title="Without the prefix cache twenty times as many devices read prompts")
fig.legend(loc="outside lower center", ncols=2, frameon=False)
plt.show()
assert counts["10M", "read anew"][0] > 10 * counts["10M", "prefix cached"][0]

# %% [markdown]
# Beyond the first nodes devices grow as users do: nodes share nothing. The ratio of readers to decoders does not depend
# on the number of users; it follows the shape: longer answers need decoders, longer own parts need readers.

# %%
owns, news = [256, 1024, 4096, 16384], [100, 500, 2000, 8000]
of_own = {own: prefill_seconds(own, SHARED) for own in owns}
ratios = np.array([[of_own[own] * tokens_a_second / new for new in news] for own in owns])
fig, axis = plt.subplots(figsize=(5.6, 3.4))
axis.imshow(np.log10(ratios), cmap="PuOr_r", vmin=-2, vmax=2, aspect="auto")
for y, of_row in enumerate(ratios):
    for x, value in enumerate(of_row):
        axis.text(
            x, y, f"{value:.2g}", ha="center", va="center", color="white" if abs(math.log10(value)) > 1.3 else "black"
        )
axis.set_xticks(range(len(news)), [f"{n:,}" for n in news])
axis.set_yticks(range(len(owns)), [f"{n:,}" for n in owns])
axis.set(xlabel="new tokens of a turn", ylabel="own tokens of a prompt", title="Nodes that read for one that decodes")
plt.show()
assert (np.diff(ratios, axis=0) > 0).all() and (np.diff(ratios, axis=1) < 0).all()

# %% [markdown]
# ## 4. Bytes between nodes
#
# A token's pages take 134 KiB. If the decoding node knows the shared prefix, a turn moves 2,048 tokens
# ([m3jax](../docs/disaggregated.md) leaves known pages out); to a node that does not, 33 times as much. A node has
# eight links of 400 Gbit/s.

# %%
LINKS = 8 * 400e9 / 8  # bytes a second of a node, one way
one = evaluate(job(), dict(data=1, context=1, expert=1, tensor=1)).memory
per_token = (one.cache + one.index_keys) / job().context
moved = {"own tokens": OWN * per_token, "whole prompt": (SHARED + OWN) * per_token}
turns_of_node = tokens_a_second * BUSY / NEW
fig, axis = plt.subplots(figsize=(8, 2.6))
for y, (name, size) in enumerate(moved.items()):
    rate = size * turns_of_node
    print(f"{name}: {size / GIB:.2f} GiB a turn, {rate / 1e9:.2f} GB/s into a node: {rate / LINKS:.1%} of its links")
    axis.barh(y, rate / 1e9, color=(BLUE, ORANGE)[y])
    axis.text(rate / 1e9 * 1.1, y, f"{rate / 1e9:.2f} GB/s", va="center")
axis.axvline(LINKS / 1e9, color="black", ls="--")
axis.text(LINKS / 1e9 * 0.93, 1.45, "links of a node", ha="right", va="top", fontsize=9)
axis.set_yticks(range(2), moved)
axis.set_xscale("log")
axis.set_xlim(0.1, 1000)
number_axis(axis.xaxis, [0.1, 1, 10, 100, 1000], "{:g}".format)
axis.set(xlabel="GB a second into one decoding node", title="What a node takes in")
plt.show()
assert 134 < per_token / 1024 < 135 and moved["own tokens"] * turns_of_node < LINKS

# %% [markdown]
# ## 5. Where the bottleneck moves
#
# As the shared prefix grows, a step's reading goes from weights to context. Index keys are read once for each row,
# though all rows have the same ones. A step that scored the shared pages for all rows at once would read them once: the
# dotted line. m3jax does not do that.

# %%
prefixes = [2**n for n in range(12, 20)]
rows = rows_of_node
taken = [parts(job(context=prefix + OWN + NEW, batch=rows), mesh) for prefix in prefixes]
fig, axis = plt.subplots(figsize=(8, 3.8))
for name, colour in colours.items():
    axis.plot(prefixes, [of_prefix[name] / 1e9 for of_prefix in taken], "o-", color=colour, label=name)
once = [
    t["index keys"] * (prefix / rows + OWN + NEW) / (prefix + OWN + NEW) / 1e9
    for prefix, t in zip(prefixes, taken, strict=True)
]
axis.plot(prefixes, once, ":", color=PURPLE, lw=2, label="index keys, if shared pages were read once")
axis.set_xscale("log")
axis.set_yscale("log")
number_axis(axis.xaxis, prefixes, lambda n: f"{n / 1024:g}k")
number_axis(axis.yaxis, [1, 10, 100, 1000], "{:g} GB".format)
axis.set(xlabel="tokens of the shared prefix", ylabel=f"read in a step of {rows} rows, one device")
axis.set_title("Beyond a length the context outweighs the weights")
fig.legend(loc="outside lower center", ncols=2, frameon=False)
plt.show()
crossing = next(
    p for p, t in zip(prefixes, taken, strict=True) if t["index keys"] + t["keys and values"] > t["weights"]
)
print(f"with {rows} rows the context is more than the weights from {crossing // 1024}k shared tokens on")
assert prefixes[0] < crossing < prefixes[-1]
