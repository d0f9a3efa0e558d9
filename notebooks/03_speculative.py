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
# # Drafting and verifying
#
# A small draft proposes a few tokens, the model looks at all of them in one call and keeps those that it would have
# written itself. This notebook
#
# 1. colours a text by who wrote each token: the draft, or the model;
# 2. counts what is accepted, by position, for the draft and for a look into the text so far;
# 3. samples, and checks that the tokens still have the model's distribution.
#
# How it works is described in [docs/speculative.md](../docs/speculative.md). Each claim here is an assertion too.

# %%
import inspect
import textwrap

import jax
import matplotlib.pyplot as plt
import numpy as np

import m3jax
from m3jax.assets import embedded_path
from m3jax.checkpoint import load_draft
from m3jax.decoding import Eagle3Drafter, Engine, Params, PromptLookup, Sampling
from m3jax.text import Tokenizer

plt.rcParams.update({"figure.dpi": 90, "font.size": 10, "axes.titlesize": 11, "figure.constrained_layout.use": True})

model = m3jax.load(dtype="float32")
draft = load_draft(None, model.config, "float32")
tokenizer = Tokenizer.from_pretrained(embedded_path())
count = lambda tree: sum(x.size for x in jax.tree.leaves(tree))
print(f"the model has {count(model):,} parameters, its draft {count(draft):,}")
print(
    f"the draft reads the model's residual stream at {draft.config.taps}: 0 would be the embedding, n layer n's output"
)

# %% [markdown]
# ## 1. Who wrote what
#
# One round of the engine at a time: `steps_per_call=1`. Before a round we ask the drafter what it is going to propose
# (the same call that the engine makes; names with an underscore are the engine's own), and after it we see how much of
# that was kept.

# %%
K = 3
SHAPES = dict(pages=64, max_batch=4, prefill_chunk=64, max_length=256, steps_per_call=1)


def code(start, size=60):
    """Tokens of Python that end within a line."""
    return [model.config.bos_token_id, *tokenizer.encode(inspect.getsource(textwrap))[start : start + size]]


@jax.jit
def proposals(drafter, model, state):
    """What the next round will propose, [B K]."""
    sampling, is_live = state.continuations.sampling, state.stop_reasons == 0
    rows = dict(memory=state.draft_memory, sampling=sampling, newest_token=state.newest_token, lengths=state.lengths)
    proposal, _ = drafter.propose(model, state.cache, **rows, is_live=is_live, count=K)
    return proposal.tokens


def watch(engine, prompt, params):
    """Rounds of one request: (accepted, refused, the model's own token), as lists of ids."""
    handle, rounds = engine.add(prompt, params), []
    while engine.prefill():
        pass
    first = engine.take(handle)
    while engine.reason(handle) == "unfinished":
        row = engine._requests[handle].row
        proposed = np.asarray(proposals(engine._runner.drafter, model, engine._runner.state))[row].tolist()
        engine.step()
        new = engine.take(handle)
        rounds.append((new[:-1], proposed[len(new) - 1 :], new[-1]))
    return first, rounds


def draw(prompt, first, rounds, title, width=84):
    """The text, in colours; what was refused is not part of it, and stands in grey."""
    _, axis = plt.subplots(figsize=(10, 3.6))
    axis.set(xlim=(0, width), ylim=(17, -1), title=title)
    axis.axis("off")
    place = [0, 0]

    def write(ids, colour, **style):
        for char in tokenizer.decode(ids):
            if char == "\n" or place[0] >= width:
                place[:] = 0, place[1] + 1
            if char != "\n":
                axis.text(*place, char, color=colour, family="monospace", fontsize=8, **style)
                place[0] += 1

    write(prompt[-30:], "#888888")
    write(first, "#1f4e9c")
    for accepted, refused, own in rounds:
        write(accepted, "#1a8f3c", fontweight="bold")
        if refused:
            write(refused[:1], "#d9534f", alpha=0.45, fontstyle="italic")
        write([own], "#1f4e9c")
    plt.show()


TITLE = "green: drafted and kept    red: refused    blue: the model's own    grey: the prompt's end"
engine = Engine(model, **SHAPES, draft=Eagle3Drafter(draft), draft_tokens=K)
prompt = code(900)
first, rounds = watch(engine, prompt, Params(max_new_tokens=120, sampling=Sampling.greedy()))
draw(prompt, first, rounds, TITLE)
kept = sum(len(accepted) for accepted, _, _ in rounds)
print(f"{kept} of {120} tokens were the draft's; the model was called {len(rounds) + 1} times instead of 120")

# %% [markdown]
# The text is the one that the model writes alone, token for token.

# %%
plain = Engine(model, **SHAPES)
handle = plain.add(prompt, Params(max_new_tokens=120, sampling=Sampling.greedy()))
alone = plain.run()[handle].tokens
drafted = first + [token for accepted, _, own in rounds for token in (*accepted, own)]
assert drafted == alone
assert len(rounds) < 90

# %% [markdown]
# ## 2. How much is accepted
#
# Position $i$ counts as accepted only if all before it are, so the bars fall. One token of each call is the model's own
# whatever happens: the mean length of a round is one more than the sum of the bars. The other drafter has no model: it
# proposes what followed the last time that the text ended as it does now.


# %%
def acceptance(drafter, temperature=0.0, new=96):
    """What came of the proposals for four prompts."""
    engine = Engine(model, **SHAPES, draft=drafter, draft_tokens=K)
    for i in range(4):
        sampling = Sampling(temperature=temperature, seed=i)
        engine.add(code(300 + 400 * i), Params(max_new_tokens=new, sampling=sampling))
    engine.run()
    return engine.drafting


kinds = {
    "EAGLE3, greedy": (Eagle3Drafter(draft), 0.0),
    "prompt lookup, greedy": (PromptLookup(), 0.0),
    "EAGLE3, temperature 0.7": (Eagle3Drafter(draft), 0.7),
}
done = {name: acceptance(*how) for name, how in kinds.items()}
fig, axis = plt.subplots(figsize=(8, 3.2))
for i, (name, counts) in enumerate(done.items()):
    axis.bar(np.arange(K) + 0.27 * (i - 1), counts.acceptance, 0.25, label=f"{name}: {counts.mean_length:.2f} a round")
axis.set(xticks=range(K), xticklabels=[f"position {i + 1}" for i in range(K)], ylabel="share accepted", ylim=(0, 1))
axis.legend(frameon=False)
plt.show()
assert done["EAGLE3, greedy"].mean_length > 2
assert all(sorted(c.acceptance, reverse=True) == list(c.acceptance) for c in done.values())

# %% [markdown]
# ## 3. Sampling
#
# A sampled row accepts a proposal $x$ with probability $\min(1, p(x) / q(x))$; $q(x) = 1$ where the draft simply named
# its favourite. At the first refusal the token is drawn from $\max(p - q, 0)$. Then the tokens have the distribution
# $p$: here the second token of many continuations of one prompt, which leaves much open, with a draft and without.

# %%
SEEDS = 100
unclear = code(1000)
print(repr(tokenizer.decode(unclear[-16:])))


def second_tokens(**how):
    """The second new token for each seed."""
    engine = Engine(model, **SHAPES, **how)
    handles = [
        engine.add(unclear, Params(max_new_tokens=2, sampling=Sampling(temperature=0.8, top_k=6, seed=i)))
        for i in range(SEEDS)
    ]
    results = engine.run()
    return [results[handle].tokens[1] for handle in handles]


with_draft = second_tokens(draft=Eagle3Drafter(draft), draft_tokens=K)
without = second_tokens()
common = [token for token, _ in sorted(((t, without.count(t)) for t in set(without)), key=lambda x: -x[1])[:10]]
fig, axis = plt.subplots(figsize=(8, 3))
for i, (name, tokens) in enumerate({"with a draft": with_draft, "without": without}.items()):
    axis.bar(np.arange(len(common)) + 0.4 * i, [tokens.count(t) / SEEDS for t in common], 0.38, label=name)
axis.set(xticks=np.arange(len(common)) + 0.2, xticklabels=[repr(tokenizer.decode([t])) for t in common])
axis.set(ylabel="share", title=f"the second token of {SEEDS} continuations")
axis.legend(frameon=False)
plt.show()
assert len(common) == 10
for token in common:
    p = (with_draft.count(token) + without.count(token)) / (2 * SEEDS)
    assert abs(with_draft.count(token) - without.count(token)) < 5 * (2 * SEEDS * p * (1 - p)) ** 0.5
