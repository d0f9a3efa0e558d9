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
# # MiniMax Sparse Attention from scratch
#
# For whoever wants to see what the choice of MiniMax Sparse Attention ([MSA](../docs/glossary.md#msa)) does before
# reading formulas. Full attention lets each token look at all tokens before it. MSA lets it look at a few
# [*blocks*](../docs/glossary.md#block) of tokens, which it chooses itself. This notebook
#
# 1. builds the choice by hand on a short sequence, in NumPy, with pictures;
# 2. attends over the chosen blocks and compares with dense attention and with the schedules of `m3jax`;
# 3. asks the embedded checkpoint for a word that stands 1,400 tokens back, and looks up which block it read it from.
#
# The definition in formulas is in [docs/msa.md](../docs/msa.md). Letters: T query tokens, S key tokens, N query heads,
# K KV heads, G = N/K, H head width, P tokens of a block, M blocks, J blocks that a query keeps.

# %%
import heapq
import inspect

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.colors import ListedColormap
from matplotlib.patches import Patch, Rectangle

import m3jax
from m3jax.msa import (
    SCHEDULES,
    SelectionRules,
    block_scores,
    contiguous,
    dense_attention,
    index_topk,
    select_blocks,
    sparse_attention,
)

plt.rcParams.update({"figure.dpi": 90, "font.size": 10, "axes.titlesize": 11, "figure.constrained_layout.use": True})
BLUE, ORANGE, GREY = "#0072B2", "#E69F00", "#DDDDDD"  # told apart by all eyes, and in grey

# %% [markdown]
# ## 1. Choosing blocks
#
# 64 tokens in 8 blocks of 8. Each block is about one of three topics. The
# [*index branch*](../docs/glossary.md#index-branch) of a layer gives every token one small key, and one query for each
# [KV head](../docs/glossary.md#kv-head). Here they are made up, so that we know what should happen: head 0 looks for
# its own topic, head 1 for the next one.

# %%
T, P, K, N, H, J = 64, 8, 2, 4, 16, 3
M = T // P
topics = np.array([0, 1, 2, 1, 0, 2, 1, 0])

draw = np.random.default_rng(0)
meaning = np.linalg.qr(draw.normal(size=(H, H)))[0][:3] * 3  # three directions at right angles
topic = np.repeat(topics, P)
index_k = (meaning[topic] + draw.normal(size=(T, H)) * 0.6).astype(np.float32)
index_q = np.stack([meaning[topic], meaning[(topic + 1) % 3]], axis=1).astype(np.float32)
index_q += draw.normal(size=index_q.shape).astype(np.float32) * 0.6
print("index_q [T K H]", index_q.shape, "  index_k [S H]", index_k.shape)

# %% [markdown]
# **Token scores** are inner products. A query may see itself and what is before it, so later tokens are masked
# *first*, token by token.

# %%
token_scores = np.einsum("tkh,sh->kts", index_q, index_k)
token_scores = np.where(np.tri(T, dtype=bool), token_scores, -np.inf)


# %%
def block_lines(axis, rows=True):
    """Thin lines between blocks, and block ids as ticks."""
    for edge in np.arange(P, T, P) - 0.5:
        axis.axvline(edge, color="black", lw=0.3)
        if rows:
            axis.axhline(edge, color="black", lw=0.3)
    axis.set_xticks(np.arange(M) * P + P / 2 - 0.5, [f"{m}\n{'ABC'[t]}" for m, t in enumerate(topics)])
    axis.set_xlabel("key block, and its topic")


fig, axes = plt.subplots(1, K, figsize=(10, 4.4), sharey=True)
for head, axis in enumerate(axes):
    image = axis.imshow(np.where(np.isfinite(token_scores[head]), token_scores[head], np.nan), cmap="viridis")
    axis.set_title(f"token scores, KV head {head}: " + ("looks for its own topic", "looks for the next topic")[head])
    block_lines(axis)
axes[0].set_ylabel("query token")
fig.colorbar(image, ax=axes, shrink=0.8, label="score")
plt.show()

# %% [markdown]
# **Block scores**: the best token of each block, among those that the query can see. A block that starts after the
# query has none, and scores minus infinity.

# %%
scores = token_scores.reshape(K, T, M, P).max(-1)
print("scores [K T M]", scores.shape)


# %% [markdown]
# **The choice**: a query keeps J = 3 blocks. Its own block is always one of them (and takes a slot); the others are
# the best scored ones, of equal ones the lower id. Early queries see fewer than J blocks and keep them all. The answer
# is written as ascending block ids, then -1.


# %%
def choose(scores, own):
    """The ids that one query keeps, from its block scores [M]."""
    wanted = scores[: own + 1].copy()
    wanted[own] = np.inf
    best = np.argsort(-wanted, kind="stable")[:J]
    return np.sort(best)


blocks = np.full((K, T, J), -1)
for head, t in np.ndindex(K, T):
    ids = choose(scores[head, t], own=t // P)
    blocks[head, t, : len(ids)] = ids

for t in (3, 12, 40, 63):
    print(f"token {t:2}, own block {t // P}:  head 0 reads {blocks[0, t]},  head 1 reads {blocks[1, t]}")

# %%
fig, axes = plt.subplots(1, 2 * K, figsize=(12, 4.8), sharey=True)
chosen = (blocks[..., None] == np.arange(M)).any(2).astype(float)
own = np.arange(T)[:, None] // P == np.arange(M)
seen = np.arange(T)[:, None] // P >= np.arange(M)
state = np.where(seen, chosen + 1 + own, 0)  # 0 not visible, 1 dropped, 2 chosen, 3 own
colours = ListedColormap(["white", GREY, BLUE, ORANGE])
low, high = scores[np.isfinite(scores)].min(), scores.max()
for head in range(K):
    for axis, picture, how in (
        (axes[2 * head], np.where(seen, scores[head], np.nan), dict(cmap="viridis", vmin=low, vmax=high)),
        (axes[2 * head + 1], state[head], dict(cmap=colours, vmin=0, vmax=3)),
    ):
        axis.imshow(picture, aspect="auto", interpolation="nearest", **how)
        axis.set_xticks(np.arange(M), [f"{m}\n{'ABC'[t]}" for m, t in enumerate(topics)])
        axis.set_yticks(np.arange(0, T, P))
        axis.set_xlabel("key block, and its topic")
    axes[2 * head].set_title(f"block scores, KV head {head}")
    axes[2 * head + 1].set_title(f"blocks kept, KV head {head}")
axes[0].set_ylabel("query token (a tick starts a block)")
names = ("own block: always kept", "chosen by score", "seen and dropped")
handles = [Patch(facecolor=colours(i), edgecolor="grey", label=name) for i, name in zip((3, 2, 1), names, strict=True)]
fig.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False)
fig.colorbar(axes[0].images[0], ax=axes, shrink=0.8, pad=0.01, label="block score")
plt.show()

# %% [markdown]
# Where a topic has not come up often enough, the rest is chosen by chance, in the noise. The heads of one token read
# different blocks: the choice is made for each KV head, and shared only by the G query heads of its group. One list
# for all heads would be wrong for nearly all of the late tokens:

# %%
late = np.arange(T) // P >= J
differ = (blocks[0] != blocks[1]).any(-1)
print(f"the two heads differ for {differ[late].mean():.0%} of the tokens that drop a block")

# %% [markdown]
# The package does the same, for a batch of rows (B = 1 here), with positions and lengths that say which token stands
# where. These functions are its definition of MSA, one file that can be read beside this notebook:
# `m3jax/spec/msa.py`.

# %%
row = lambda x: jnp.asarray(x, jnp.float32)[None]
positions, lengths = jnp.arange(T)[None], jnp.array([T])

# Compiled as one program each; the names in `static_argnames` are no data.
score = jax.jit(block_scores, static_argnames="block_size")
select = jax.jit(select_blocks, static_argnames=("rules", "block_size"))
topk = jax.jit(index_topk, static_argnames=("block_size", "top_k"))
sparse = jax.jit(sparse_attention, static_argnames=("block_size", "return_lse"))

ours = score(row(index_q), row(index_k), positions, lengths, block_size=P)
np.testing.assert_allclose(ours[0], scores, rtol=1e-5, atol=1e-5)
rules = SelectionRules(top_k=J)
np.testing.assert_array_equal(select(ours, positions, lengths, rules, block_size=P)[0], blocks)
fused = topk(row(index_q), row(index_k), positions, lengths, block_size=P, top_k=J)
np.testing.assert_array_equal(fused[0], blocks)
print("block_scores, select_blocks and index_topk: the same scores and the same blocks [B K T J]", fused.shape)

# %% [markdown]
# ## 2. Attention over the chosen blocks
#
# The main branch is ordinary grouped-query attention, with a softmax over the tokens of the chosen blocks alone. By
# hand:

# %%
q = draw.normal(size=(T, N, H)).astype(np.float32)
k, v = (draw.normal(size=(T, K, H)).astype(np.float32) for _ in range(2))


def attend_by_hand(q, k, v, blocks):
    """Softmax over the visible tokens of the chosen blocks, a query and a head at a time."""
    out = np.zeros_like(q)
    for t, n in np.ndindex(T, N):
        head = n * K // N
        tokens = np.arange(t + 1)
        tokens = tokens[np.isin(tokens // P, blocks[head, t])]
        weights = np.exp(k[tokens, head] @ q[t, n] / np.sqrt(H))
        out[t, n] = weights / weights.sum() @ v[tokens, head]
    return out


expected = attend_by_hand(q, k, v, blocks)
qkv = row(q), row(k), row(v)
out = sparse(*qkv, fused, positions, lengths, block_size=P)
print(f"the definition  differs from the one by hand by at most {np.abs(out[0] - expected).max():.1e}")
view = contiguous(row(k), row(v), P)  # a schedule reads keys and values by blocks, wherever they are
for name, schedule in SCHEDULES.items():
    out, lse = jax.jit(schedule)(row(q), view, fused, positions, lengths)
    print(f"{name:15} differs from the one by hand by at most {np.abs(out[0] - expected).max():.1e}")

# %% [markdown]
# One definition, four [schedules](../docs/glossary.md#schedule). `mask` is the definition: it computes all T x S
# scores and hides most of them. `query_major` gathers the blocks of each query; so does `invariant`, always 16 queries
# at a time, whose [bits](../docs/numerics.md#the-invariant-mode) then do not depend on their company. `kv_block_major`
# goes the other way round: it takes a block, and with it all queries that chose it; each query's partial outputs are
# then **merged** by their log-sum-exp ([LSE](../docs/glossary.md#lse)). The merge by hand, for the last query of
# head 0:

# %%
parts = []
for m in blocks[0, T - 1]:
    only = jnp.full((1, K, T, 1), m, jnp.int32)  # a selection of this one block
    parts.append(sparse(*qkv, only, positions, lengths, block_size=P, return_lse=True))

outs, lses = (np.stack([np.asarray(part[i][0, T - 1, 0], np.float64) for part in parts]) for i in (0, 1))
lse = np.log(np.exp(lses).sum())
merged = (np.exp(lses - lse)[:, None] * outs).sum(0)
print("weights of the three blocks:", np.exp(lses - lse).round(3))
print(f"merged and whole differ by at most {np.abs(merged - expected[T - 1, 0]).max():.1e}")

# %% [markdown]
# **Against dense attention.** With J = M every block is chosen, and MSA is dense causal attention. With J = 3 it is so
# for the first J x P = 24 tokens, which cannot see more than three blocks (in the picture 0 is drawn as $10^{-8}$).
# Beyond that it is another function: these keys and values are random, so whatever is dropped is missed. A trained
# model learns to drop what it does not need.

# %%
dense = jax.jit(dense_attention)(*qkv, positions, lengths)
every = topk(row(index_q), row(index_k), positions, lengths, block_size=P, top_k=M)
out, _ = jax.jit(SCHEDULES["kv_block_major"])(row(q), view, every, positions, lengths)
print(f"all {M} blocks against dense: {np.abs(out - dense).max():.1e}")

distance = np.abs(expected - dense[0]).max(axis=(1, 2))
assert distance[: J * P].max() < 1e-5
fig, axis = plt.subplots(figsize=(9, 2.6))
axis.semilogy(np.maximum(distance, 1e-8), marker=".", lw=0.8, color=BLUE)
axis.axvline(J * P - 0.5, color="black", lw=0.8, ls="--")
axis.text(J * P, 3e-8, " from here on blocks are dropped")
axis.set(
    xlabel="query token", ylabel="largest difference", title=f"Attention over 3 blocks of {P} tokens, and over all"
)
plt.show()

# %% [markdown]
# ## 3. Which block did the word come from?
#
# The embedded checkpoint is a small MSA model with trained weights: one dense layer, then four with MSA; blocks of 16
# tokens, of which a query keeps 8. A sparse layer thus reads 128 tokens. It has learnt to recall records, lines such
# as `# harbor -> lantern`, over thousands of tokens of Python. We write one record near the start, and ask for it at
# the end.

# %%
lm = m3jax.TextModel.from_pretrained(dtype="float32")
model, tokenizer = lm.model, lm.tokenizer
config = model.config
P, J, G = config.index_block_size, config.index_topk_blocks, config.num_attention_heads // config.num_key_value_heads


def prompt(key, value, before=200, length=1600):
    """Tokens of code with one record in it and the question at the end; where the record's value stands."""
    code = tokenizer.encode(inspect.getsource(heapq))[:length]
    record, question = tokenizer.encode(f"\n# {key} -> {value}\n"), tokenizer.encode(f"\n# {key} ->")
    ids = [config.bos_token_id, *code[:before], *record, *code[before:], *question]
    return np.array(ids, np.int32), 1 + before + record.index(tokenizer.encode(f" {value}")[0])


tokens, place = prompt("harbor", "lantern")
T, home = len(tokens), place // P
M = -(-T // P)
print(f"{T} tokens in {M} blocks; the value is token {place}, in block {home}, {T - place} tokens before the answer")

# %%
values = jax.device_get(model.intermediates(tokens[None]))
answer = int(values["logits"][0, -1].argmax())
print("# harbor ->" + tokenizer.decode([answer]))
assert tokenizer.decode([answer]) == " lantern"

# %% [markdown]
# `intermediates` gives all values on the way, by layer and by name. The answer is predicted at the last token, so we
# look at its block scores and its chosen blocks, for each sparse layer and KV head: the rank of the record's block
# among all blocks (by score; the own block aside), whether it was kept, and how much of their attention the heads of
# the group pay to the value itself.


# %%
def attention_paid(layer, head):
    """What the last token's G query heads of one KV head pay to each token [G T]."""
    q = layer["q"][0, -1, head * G : (head + 1) * G]
    x = q @ layer["k"][0, :, head].T / np.sqrt(config.head_dim)
    x = np.where(np.isin(np.arange(T) // P, layer["blocks"][0, head, -1]), x, -np.inf)
    weights = np.exp(x - x.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


branches = [
    (i, head, layer)
    for i, layer in enumerate(values["layers"])
    if "blocks" in layer
    for head in range(config.num_key_value_heads)
]
found = []
print("layer  KV head  rank of the record's block    kept   attention to the value, by query head")
for i, head, layer in branches:
    past = layer["block_scores"][0, head, -1, : M - 1]
    rank, kept = 1 + int((past > past[home]).sum()), home in layer["blocks"][0, head, -1]
    paid = attention_paid(layer, head)[:, place]
    found += [(i, head, layer)] if kept else []
    print(f"{i:5}  {head:7}  {rank:15} of {M - 1:4}  {'yes' if kept else '-':>10}   {paid.round(3)}")
assert {i for i, _, _ in found} == {config.num_hidden_layers - 1}

# %%
fig, axis = plt.subplots(figsize=(12, 4))
last = np.stack([layer["block_scores"][0, head, -1] for _, head, layer in branches])
spread = (last - last.mean(1, keepdims=True)) / last.std(1, keepdims=True)
image = axis.imshow(spread, aspect="auto", cmap="Blues", interpolation="nearest", vmin=-2.5, vmax=4)
for y, (_, head, layer) in enumerate(branches):
    for block in layer["blocks"][0, head, -1]:
        axis.add_patch(Rectangle((block - 0.5, y - 0.4), 1, 0.8, fill=False, ec="#D55E00", lw=1.8))
axis.set_yticks(range(len(branches)), [f"layer {i}, KV head {head}" for i, head, _ in branches])
axis.set_xlabel("key block")
arrow = dict(arrowstyle="->")
axis.annotate("the record", (home, -0.5), (home, -1.3), ha="center", annotation_clip=False, arrowprops=arrow)
axis.set_title("Block scores of the last token; framed: the blocks that it keeps", loc="right")
fig.colorbar(image, ax=axis, label="standard deviations\nfrom the mean of the row", pad=0.01)
plt.show()

# %% [markdown]
# Most branches look at what is near, where code is predicted from. In the last layer both KV heads kept the record's
# block, far back: it is the best scored of all. To keep a block is not to read it: the query heads of KV head 0 pay
# the value next to nothing, while three of the four of KV head 1 pay it nearly all of their attention. These are the
# tokens of the block, with what each query head of that group pays to them.

# %%
i, head, layer = max(found, key=lambda branch: attention_paid(branch[2], branch[1])[:, place].max())
assert attention_paid(layer, head)[:, place].max() > 0.9 > 0.1 > attention_paid(layer, 1 - head)[:, place].max()
inside = np.arange(home * P, home * P + P)
paid = attention_paid(layer, head)[:, inside]
fig, axis = plt.subplots(figsize=(12, 2.6))
axis.imshow(paid, aspect="auto", cmap="Blues", vmin=0, vmax=1)
axis.set_xticks(range(P), [repr(tokenizer.decode([int(t)])) for t in tokens[inside]], rotation=45, ha="right")
axis.set_yticks(range(G), [f"query head {head * G + g}" for g in range(G)])
for g, s in zip(*np.nonzero(paid > 0.01), strict=True):
    axis.text(s, g, f"{paid[g, s]:.2f}", ha="center", va="center", color="white" if paid[g, s] > 0.5 else "black")
axis.set_title(f"layer {i}, KV head {head}: attention of the last token within block {home}")
plt.show()

# %% [markdown]
# All choices of that layer. Above, a square is a block of queries and a block of keys, the darker the more of the 16
# queries keep it: the diagonal is the own block and its neighbours, and what is dark far from it was picked for what it
# holds. Below are the last tokens one by one, the ends of the rows above, with the record's block in orange: the last
# token keeps it under both heads.

# %%
SHOWN = 24  # queries of the lower pictures
kinds = ListedColormap(["white", "#555555", "#D55E00"])  # not kept, kept, the record kept
fig, axes = plt.subplots(2, config.num_key_value_heads, figsize=(12, 9), height_ratios=(5, 3))
for other, (above, below) in enumerate(axes.T):
    kept = (layer["blocks"][0, other, :, :, None] == np.arange(M)).any(1)  # [T M]
    starts = np.arange(0, T, P)
    share = np.add.reduceat(kept, starts, dtype=float) / np.diff(starts, append=T)[:, None]  # [M M]
    image = above.imshow(share, cmap="Greys", vmin=0, vmax=1, interpolation="nearest")
    frame = (-0.5, (T - SHOWN) / P - 0.5), M, SHOWN / P
    above.add_patch(Rectangle(*frame, fill=False, ec="#D55E00", lw=1.5, clip_on=False))
    above.set(xlabel="key block", ylabel="block of queries", title=f"KV head {other}: blocks kept")
    state = np.where(np.arange(M) == home, 2, 1) * kept
    edges = (-0.5, M - 0.5, T - 0.5, T - SHOWN - 0.5)
    below.imshow(state[-SHOWN:], aspect="auto", interpolation="nearest", cmap=kinds, vmin=0, vmax=2, extent=edges)
    note = dict(va="center", arrowprops=arrow, bbox=dict(fc="white", ec="none", pad=1))
    below.annotate("the last token keeps the record", (home, T - 1), (home + 5, T - 5), **note)
    below.set(xlabel="key block", ylabel="query token", title=f"KV head {other}: the last {SHOWN} tokens, framed above")
    assert kept[-1, home]
fig.colorbar(image, ax=axes[0], label="share of the block's queries", shrink=0.9, pad=0.01)
plt.show()

# %% [markdown]
# And the answer follows the record: another value in the same place is recalled from there.

# %%
for value in ("castle", "onion"):
    changed, _ = prompt("harbor", value)
    logits = model(changed[None])[0, -1]
    print(f"# harbor -> {value}: the model says{tokenizer.decode([int(logits.argmax())])}")
