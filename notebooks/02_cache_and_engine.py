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
# # Pages, and an engine that shares them
#
# For whoever serves the model, or wants to see what an engine does with memory. The cache of a model is a pool of
# [*pages*](../docs/glossary.md#page), each for the keys, values and
# [index keys](../docs/glossary.md#index-branch) of one [block](../docs/glossary.md#block) of tokens. An engine serves
# many requests from one pool. This notebook
#
# 1. watches who has which page while three requests run;
# 2. shares the pages of a prefix, and copies one when two requests part;
# 3. makes the pool too small, so that a request is preempted and resumed;
# 4. counts bytes, and measures the time to the first token with and without the prefix;
# 5. leaves keys and values in host memory, and brings in the pages that were selected.
#
# How it works is described in [docs/cache.md](../docs/cache.md). Each claim here is an assertion too.

# %%
import heapq
import inspect
import time

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.colors import ListedColormap, to_rgb
from matplotlib.patches import Patch

import m3jax
from m3jax.cache import Cache
from m3jax.decoding import Engine, Params, Sampling

plt.rcParams.update({"figure.dpi": 90, "font.size": 10, "axes.titlesize": 11, "figure.constrained_layout.use": True})

lm = m3jax.TextModel.from_pretrained(dtype="float32")
model, tokenizer = lm.model, lm.tokenizer
config = model.config
P = config.index_block_size
code = [config.bos_token_id, *tokenizer.encode(inspect.getsource(heapq))]
print(f"pages of {P} tokens; {len(code)} tokens of Python to make prompts of")

# %% [markdown]
# ## 1. Who has which page
#
# 48 pages, at most three requests at a time, prompts in [chunks](../docs/glossary.md#chunk) of 64 tokens, four
# [decode](../docs/glossary.md#decode) steps a round. All programs are compiled by `warmup`, for the whole notebook:
# requests are data. There are no pictures here, so none for the vision tower (`media_patches=()`).

# %%
engine = Engine(model, pages=48, max_batch=3, prefill_chunk=64, steps_per_call=4, media_patches=())
engine.warmup()
print(f"compiled in {engine.timings.compile_seconds:.0f} s; a request can have {engine.max_length} tokens")


def greedy(new):
    """Params for so many new tokens."""
    return Params(max_new_tokens=new, sampling=Sampling.greedy())


# %% [markdown]
# After each round we look at the engine's table: a request that runs has a row of it, with its pages. A page in no row
# is *free*, or *cached*: full, and kept for whoever comes with the same tokens. (Names with an underscore are the
# engine's own; `engine.pages` has the counts.)

# %%
FREE, CACHED, SHARED = -3, -2, -1
# Colours that all eyes tell apart. A free page is nothing: the picture's white ground.
COLOURS = {
    FREE: ("white", "free"),
    CACHED: ("#CCCCCC", "cached"),
    SHARED: ("black", "shared by several"),
    0: ("#0072B2", "request 0"),
    1: ("#E69F00", "request 1"),
    2: ("#56B4E9", "request 2"),
}


def owners(engine, handles):
    """For each page which of the requests has it, SHARED if several do, else CACHED or FREE."""
    engine.check()  # raises if a page is lost, or owned by two
    table, free = engine._runner.table, engine._pages.free
    state = np.array([FREE if page in free else CACHED for page in range(engine._pages.num_pages)])
    for page in np.unique(table[table >= 0]):
        rows = np.nonzero((table == page).any(1))[0]
        state[page] = handles.index(engine._scheduler.request_of_row[rows[0]].handle) if len(rows) == 1 else SHARED
    return state


def watch(engine, *arrivals):
    """Add (round, prompt, params), and note the owners after each round: (rounds [R pages], handles)."""
    rounds, handles = [], []
    while len(handles) < len(arrivals) or engine.busy:
        for when, prompt, params in arrivals[len(handles) :]:
            if when == len(rounds):
                handles.append(engine.add(prompt, params))
        engine.step()
        rounds.append(owners(engine, handles))
    return np.stack(rounds), handles


def widest_stripe(is_own):
    """Where a name has most room in [R pages]: (page, first round, last round) of the middle of the largest area.

    The area of a run of rounds is its length times the pages, one above the other, that have all of it.
    """
    best = 0, 0, 0, 0
    for page in range(is_own.shape[1]):
        edges = np.flatnonzero(np.diff(np.r_[0, is_own[:, page], 0]))
        for start, end in edges.reshape(-1, 2):
            whole = is_own[start:end].all(axis=0)
            above = page + np.argmin(np.r_[whole[page:], False])
            best = max(best, ((end - start) * (above - page), (page + above - 1) / 2, start, end - 1))
    return best[1:]


def draw(rounds, title):
    """Pages over rounds, coloured by owner; each owner's longest stripe has its name."""
    fig, axis = plt.subplots(figsize=(11, 4.4))
    colours = ListedColormap([colour for colour, _ in COLOURS.values()])
    axis.imshow(rounds.T, cmap=colours, vmin=FREE, vmax=2, aspect="auto", origin="lower", interpolation="nearest")
    axis.set(xlabel="after round", ylabel=f"page (of {rounds.shape[1]})", title=title)
    owners = [owner for owner in COLOURS if (rounds == owner).any()]
    for owner in owners:
        page, start, end = widest_stripe(rounds == owner)
        if owner != FREE:
            dark = np.mean(to_rgb(COLOURS[owner][0])) < 0.5
            axis.text((start + end) / 2, page, COLOURS[owner][1], ha="center", va="center", fontsize=9,
                      color="white" if dark else "black")  # fmt: skip
    handles = [Patch(fc=COLOURS[owner][0], ec="black", lw=0.6, label=COLOURS[owner][1]) for owner in owners]
    fig.legend(handles=handles, loc="outside right center", frameon=False)
    plt.show()


rounds, handles = watch(
    engine, (0, code[:30], greedy(60)), (3, code[200:360], greedy(40)), (5, code[400:450], greedy(30))
)
draw(rounds, "Who has which page: three requests in one pool")
results = [engine.result(handle) for handle in handles]
for handle, result in zip(handles, results, strict=True):
    print(f"request {handle}: a prompt of {result.prompt_tokens} tokens, {len(result.tokens)} new ones")
print(engine.pages)

# %% [markdown]
# A request gets pages as it grows, not for its longest possible length. The prompt of 160 tokens takes three rounds, a
# chunk each; request 0 decodes meanwhile. When a request ends, its full pages stay as cached ones, and the last one,
# which is not full, is free again. (The newest token of a request is never in the cache: nothing was computed from it.)

# %%
pages_of_first = (rounds == 0).sum(1)
assert pages_of_first[0] == 3 and pages_of_first.max() == 6  # 30 tokens and those of the first round; 89 in the end
assert [int((rounds[r] == 1).sum()) for r in (3, 4)] == [4, 8]  # 64 and 128 tokens
full = sum((result.prompt_tokens + len(result.tokens) - 1) // P for result in results)
assert engine.pages["cached"] == full and engine.pages["used"] == 0

# %% [markdown]
# ## 2. Sharing
#
# Three requests begin with the same 330 tokens. The first computes them. The others come later and find the 20 full
# pages of it (320 tokens): they compute the rest only, and read the same pages.


# %%
def forget_all():
    """An empty prefix cache."""
    if engine.pages["cached"]:
        engine._pages.evict(engine.pages["cached"])


forget_all()
before, computed = engine.pages, engine.timings.prompt_tokens
prefix, own = code[:330], [code[1000 + 20 * i : 1020 + 20 * i] for i in range(3)]
prompts = [prefix + each for each in own]
rounds, handles = watch(engine, (0, prompts[0], greedy(40)), (7, prompts[1], greedy(24)), (8, prompts[2], greedy(24)))
draw(rounds, "Three requests that begin with the same 330 tokens")
hits = engine.pages["hit_tokens"] - before["hit_tokens"]
computed = engine.timings.prompt_tokens - computed
print(f"of 3 x {len(prompts[0])} prompt tokens {hits} were found and {computed} computed")
assert hits == 2 * (len(prefix) // P) * P
assert hits + computed == sum(map(len, prompts))
assert (rounds == SHARED).sum(1).max() == len(prefix) // P

# %% [markdown]
# Shared or computed anew, the tokens are the same:

# %%
for prompt, handle in zip(prompts[1:], handles[1:], strict=True):  # the first computed all of its own
    forget_all()
    alone = engine.add(prompt, greedy(len(engine.result(handle).tokens)))
    assert engine.run()[alone].tokens == engine.result(handle).tokens
print("the same tokens as with an empty cache")

# %% [markdown]
# **Copy on write.** A request can be copied in the middle: both share all pages, the last one too, which is not full.
# Whoever writes into it first gets a copy of that page. The others stay shared.

# %%
forget_all()
first = engine.add(code[:90], greedy(40))
for _ in range(4):
    engine.step()
tokens_so_far = engine.result(first).tokens
other = engine.copy(first, Params(max_new_tokens=40, sampling=Sampling(temperature=1.0, seed=1)))
engine.step()
engine.check()
first_row, other_row = (row[row >= 0].tolist() for row in engine._runner.table[:2])
print(f"{90 + len(tokens_so_far)} tokens when it was copied")
print("pages of the first:", first_row)
print("pages of the copy: ", other_row)
shared = (90 + len(tokens_so_far) - 1) // P  # full pages
assert first_row[:shared] == other_row[:shared] and not set(first_row[shared:]) & set(other_row[shared:])
results = engine.run()
assert results[first].tokens[: len(tokens_so_far)] == results[other].tokens[: len(tokens_so_far)] == tokens_so_far
assert results[first].tokens != results[other].tokens
for handle in (first, other):
    print(repr(tokenizer.decode(results[handle].tokens)))

# %% [markdown]
# ## 3. Too few pages
#
# Three requests of 240 tokens that grow by 48 each need 54 pages, and there are 48. When none is left, the youngest
# gives its pages back and waits. They stay cached until somebody takes them, the end of its tokens first. When it runs
# again, it finds the beginning, computes the rest, and goes on.

# %%
forget_all()
evictions, computed = engine.pages["evictions"], engine.timings.prompt_tokens
prompts = [code[start : start + 240] for start in (0, 300, 600)]
rounds, handles = watch(engine, *((0, prompt, greedy(48)) for prompt in prompts))
draw(rounds, "Three requests that do not fit: the youngest is preempted, and resumed")
preempted = [engine.result(handle).timings.preemptions for handle in handles]
computed = engine.timings.prompt_tokens - computed - sum(map(len, prompts))
evictions = engine.pages["evictions"] - evictions
print(f"preempted {preempted} times; {evictions} of the cached pages went to others; the youngest computed {computed} "
      "tokens a second time")  # fmt: skip
assert preempted[:2] == [0, 0] and preempted[2] > 0
has_pages = (rounds == 2).any(1).astype(int)
assert (np.diff(has_pages) == -1).any() and has_pages[-2]  # it loses them, and is the last to end
assert 0 < computed < 240
forget_all()
alone = engine.add(prompts[2], greedy(48))
assert engine.run()[alone].tokens == engine.result(handles[2]).tokens
print("the youngest has the same tokens as alone")

# %% [markdown]
# ## 4. What it costs, and what it saves
#
# **Bytes.** A token takes a key and a value of each [KV head](../docs/glossary.md#kv-head) in each layer, and one index
# key in each sparse layer. Types are chosen for keys and values, and for index keys.

# %%
types = {
    "float32": dict(dtype="float32"),
    "bfloat16": dict(dtype="bfloat16"),
    "float8, index keys bfloat16": dict(dtype="bfloat16", kv_dtype="float8_e4m3fn"),
    "float8, index keys too": dict(dtype="float8_e4m3fn"),
}
published = m3jax.M3Config.m3()
print(f"{'bytes of a token':30}{'embedded':>10}{'M3':>10}")
for name, kinds in types.items():
    small, large = (Cache.pool(c, 1, 1, 1, **kinds).bytes_per_token for c in (config, published))
    print(f"{name:30}{small:10.0f}{large:10.0f}")

sparse = sum(stack.num_layers for stack in config.stacks if stack.is_sparse)
numbers = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim + sparse * config.index_head_dim
assert engine.bytes_per_token == 4 * numbers  # this engine's model is float32

# %% [markdown]
# **Time to the first token.** A request alone, with a prefix of n tokens and 20 of its own: once with an empty cache,
# once with the prefix in it.


# %%
def first_token(prompt):
    """(seconds, prompt tokens computed) of one request that is alone."""
    begin, had = time.perf_counter(), engine.timings.prompt_tokens
    engine.add(prompt, greedy(1))
    engine.run()
    return time.perf_counter() - begin, engine.timings.prompt_tokens - had


lengths = np.array([160, 400, 640])
fresh, again = np.full((2, len(lengths)), np.nan), np.full((2, len(lengths)), np.nan)
for trial, i in np.ndindex(fresh.shape):
    length = int(lengths[i])
    forget_all()
    fresh[trial, i], all_of_it = first_token(code[:length] + code[1000:1020])
    again[trial, i], the_rest = first_token(code[:length] + code[1100:1120])
    assert (all_of_it, the_rest) == (length + 20, 20)

fresh, again = fresh.min(0), again.min(0)
fig, axis = plt.subplots(figsize=(7, 3.2))
axis.plot(lengths, fresh * 1e3, "o-", color="#0072B2", label="empty cache")
axis.plot(lengths, again * 1e3, "s--", color="#E69F00", label="prefix in the cache")
axis.set(xlabel="tokens of the prefix", xticks=lengths, ylabel="ms to the first token", ylim=(0, None))
axis.set_title("Time to the first token, the better of two runs")
axis.legend(frameon=False)
plt.show()
assert again[-1] < fresh[-1] / 2

# %% [markdown]
# With the prefix in the cache the time hardly depends on its length here: one chunk is computed, and its queries select
# their blocks from the cached keys.

# %% [markdown]
# ## 5. Keys and values in host memory
#
# Index keys are small, and a step needs all of them; of keys and values it needs those of the selected blocks. So the
# latter can be in host memory. A step selects first, then brings in what the device does not have. The device keeps
# the pages that were used last: here 12 of 48 in each layer. (A page of the pool is one KV head's part: heads choose
# different blocks.)


# %%
offloading = Engine(
    model, pages=48, max_batch=1, prefill_chunk=64, steps_per_call=1, prefix_cache=False, media_patches=(),
    device_pages=12,
)  # fmt: skip
offloading.warmup()
ABSENT, HOST, HERE, CHOSEN = range(4)


def pool(engine):
    """For each page that the request may have: where the first head of the first sparse layer has its part of it."""
    stack = next(s for s, p in zip(engine._runner.state.cache.stacks, engine._runner.host.pages, strict=True) if p)
    slot = np.asarray(stack.slots.slot_of[0]).reshape(-1, config.num_key_value_heads)[:, 0]
    used = np.asarray(stack.slots.used_at[0])
    pages = engine._runner.table[0]
    slot = slot[pages[pages >= 0]]
    state = np.where(slot < 0, HOST, np.where(used[slot] == used.max(), CHOSEN, HERE))
    return np.pad(state, (0, len(pages) - len(state)), constant_values=ABSENT)


handle = offloading.add(code[:640], greedy(60))
while offloading.prefill():
    pass
states, counts = [], [offloading.offload]
while offloading.busy:
    states.append(pool(offloading))
    offloading.step()
    counts.append(offloading.offload)
states = np.stack(states[1:])
names = {
    ABSENT: ("white", "no such block yet"),
    HOST: ("#CCCCCC", "in host memory only"),
    HERE: ("#E69F00", "on the device too"),
    CHOSEN: ("#0072B2", "selected by this token"),
}
fig, axis = plt.subplots(figsize=(11, 4.4))
colours = ListedColormap([colour for colour, _ in names.values()])
axis.imshow(states.T, cmap=colours, vmin=ABSENT, vmax=CHOSEN, aspect="auto", origin="lower", interpolation="nearest")
axis.set(xlabel="new token", ylabel="block of the request")
axis.set_title("Where one head of one layer has its keys and values; the device has room for 12 pages")
patches = [Patch(fc=colour, ec="black", lw=0.6, label=name) for colour, name in names.values()]
fig.legend(handles=patches, loc="outside right center", frameon=False)
plt.show()
forget_all()
expected = engine.add(code[:640], greedy(60))
assert engine.run()[expected].tokens == offloading.result(handle).tokens
print("the same tokens as with all pages on the device")

# %% [markdown]
# Neighbouring tokens select much the same blocks, so most of them are on the device already. What is brought in for a
# token is far less than what dense attention would read:

# %%
hits, misses, moved = (np.diff([count[name] for count in counts]) for name in ("hits", "misses", "bytes_in"))
fig, (left, right) = plt.subplots(1, 2, figsize=(10, 2.8))
left.step(np.arange(len(hits)), hits / (hits + misses) * 100, where="mid", color="#0072B2")
left.set(xlabel="new token", ylabel="% of the selected", ylim=(0, 103), title="Selected pages found on the device")
right.bar(np.arange(len(moved)), moved / 1024, color="#0072B2")
right.set(xlabel="new token", ylabel="KiB", title="Brought in from host memory")
plt.show()
found = hits.sum() / (hits + misses).sum()
whole = 640 * (engine.bytes_per_token - sparse * config.index_head_dim * 4)
print(f"a pool of 12 of 48 pages: {found:.0%} found, {moved.mean() / 1024:.0f} KiB a token; dense attention would read "
      f"{whole / 1024:.0f} KiB")  # fmt: skip
assert found > 0.8 and moved.mean() < whole / 10
