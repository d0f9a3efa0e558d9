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
# For whoever wants to see where a draft saves calls of the model. A small [draft](../docs/glossary.md#draft), here one
# of the kind [EAGLE3](../docs/glossary.md#eagle3), proposes a few tokens, the model looks at all of them in one call
# and keeps those that it would have written itself. This notebook
#
# 1. marks in a text who wrote each token: the draft, or the model;
# 2. counts what is accepted, by position, for the draft and for a look into the text so far;
# 3. samples, and checks that the tokens still have the model's distribution.
#
# How it works is described in [docs/speculative.md](../docs/speculative.md). Each claim here is an assertion too.

# %%
import inspect
import textwrap

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.patches import Rectangle

import m3jax
from m3jax.checkpoint import load_draft
from m3jax.decoding import DrawContext, Eagle3Drafter, Engine, Params, PromptLookup, Sampling, SamplingParams
from m3jax.decoding.speculation.verify import Proposal, verify

plt.rcParams.update({"figure.dpi": 90, "font.size": 10, "axes.titlesize": 11, "figure.constrained_layout.use": True})

BLUE, ORANGE, GREEN = "#0072B2", "#E69F00", "#009E73"  # told apart by all eyes

lm = m3jax.TextModel.from_pretrained(dtype="float32")
model, tokenizer = lm.model, lm.tokenizer
draft = load_draft(None, model.config, "float32")
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


STYLES = {
    "prompt": dict(color="#707070"),
    "own": dict(color="black"),
    "kept": dict(color="#00456E", fontweight="bold"),
    "refused": dict(color="#A63A00"),
}


def lay_out(prompt, first, rounds, width):
    """Lines of (letters with their style, refused tokens with their column)."""
    lines = [([], [])]

    def write(ids, style):
        for letter in tokenizer.decode(ids):
            if letter == "\n" or len(lines[-1][0]) == width:
                lines.append(([], []))
            if letter != "\n":
                lines[-1][0].append((letter, style))

    write(prompt[-30:], "prompt")
    write(first, "own")
    for accepted, refused, own in rounds:
        write(accepted, "kept")
        if refused:
            token = tokenizer.decode(refused[:1])
            shown = token.strip(" ").replace("\n", "↵") or "␣"
            lines[-1][1].append((len(lines[-1][0]) + len(token) - len(token.lstrip(" ")), shown.split()[0]))
        write([own], "own")
    return lines


def draw(prompt, first, rounds, width=88, size=11):
    """The text, a letter a column. A token that was refused stands crossed out below the one that replaced it."""
    lines = lay_out(prompt, first, rounds, width)
    words = {"prompt": "end of the prompt", "own": "   the model's own   ", "kept": "the draft's, kept"}
    legend = [(letter, style) for style, text in words.items() for letter in text]
    lines[:0] = [(legend, [(len(legend) - 17, "the draft's, refused")]), ([], [])]
    letters, struck, row = [], [], 0
    for text, refused in lines:
        letters += [(column, row, letter, style) for column, (letter, style) in enumerate(text)]
        ends = [0, 0]  # of the two rows below a line that refused tokens can stand in
        for column, token in refused:
            below = int(ends[0] > column)
            column = max(column, ends[below])
            letters += [(column + i, row + below + 1, letter, "refused") for i, letter in enumerate(token)]
            struck.append((column, column + len(token), row + below + 1))
            ends[below] = column + len(token) + 1
        row += 1 + sum(end > 0 for end in ends)
    columns = max(column for column, *_ in letters) + 2
    figure = plt.figure(figsize=(columns * 0.602 * size / 72, row * 1.3 * size / 72), layout="none")
    axis = figure.add_axes((0, 0, 1, 1), xlim=(-1, columns - 1), ylim=(row - 0.4, -0.6))
    axis.axis("off")
    for column, line, letter, style in letters:
        if style == "kept":
            axis.add_patch(Rectangle((column, line - 0.5), 1, 1, color="#CFE8F7", lw=0))
        axis.text(column, line, letter, family="monospace", fontsize=size, va="center_baseline", **STYLES[style])
    for begin, end, line in struck:
        axis.plot([begin, end], [line + 0.05] * 2, color=STYLES["refused"]["color"], lw=0.8, alpha=0.7)
    plt.show()


engine = Engine(model, **SHAPES, draft=Eagle3Drafter(draft), draft_tokens=K)
prompt, count_new = code(3300), 80
first, rounds = watch(engine, prompt, Params(max_new_tokens=count_new, sampling=Sampling.greedy()))
draw(prompt, first, rounds)
kept = sum(len(accepted) for accepted, _, _ in rounds)
print(f"{kept} of {count_new} tokens were the draft's; the model was called {len(rounds) + 1} times, not {count_new}")

# %% [markdown]
# Only the first refused proposal of a round is shown (what the draft went on with counts for nothing), with ↵ for a new
# line and ␣ for a space. The text is the one that the model writes alone, token for token: each is the likeliest behind
# all before it.

# %%
LENGTH = len(prompt) + count_new
whole = jax.jit(lambda model, tokens: model(tokens))


def read(tokens):
    """Logits [T V] behind each token. Texts are filled up to one length, for one program: no token sees later ones."""
    return whole(model, jnp.asarray([[*tokens, *[0] * (LENGTH - len(tokens))]], jnp.int32))[0, : len(tokens)]


drafted = first + [token for accepted, _, own in rounds for token in (*accepted, own)]
alone = read([*prompt, *drafted])[len(prompt) - 1 : -1].argmax(-1)
assert drafted == alone.tolist()
assert len(rounds) < 0.8 * count_new

# %% [markdown]
# That is so in float32, as here. In bfloat16, the default, a call for four tokens rounds otherwise than a call for one,
# and where two tokens are nearly as likely a text can part from the one without a draft:
# [docs/speculative.md](../docs/speculative.md#greedy-text-with-and-without-a-draft) says how often.

# %% [markdown]
# ## 2. How much is accepted
#
# Position $i$ counts as accepted only if all before it are, so the bars fall. One token of each call is the model's own
# whatever happens: the mean length of a round is one more than the sum of the bars. The other drafter has no model: it
# proposes what followed the last time that the text ended as it does now.


# %%
def acceptance(drafter, temperature=0.0, new=64):
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
for i, ((name, counts), colour) in enumerate(zip(done.items(), (BLUE, ORANGE, GREEN), strict=True)):
    label = f"{name}: {counts.mean_length:.2f} tokens a round"
    bars = axis.bar(np.arange(K) + 0.27 * (i - 1), counts.acceptance, 0.25, color=colour, label=label)
    axis.bar_label(bars, [f"{share:.0%}" for share in counts.acceptance], fontsize=9)
axis.set(xticks=range(K), xticklabels=[f"proposal {i + 1}" for i in range(K)], ylabel="share accepted", ylim=(0, 1))
axis.set_title("How much of what is proposed is kept, over four prompts")
axis.legend(frameon=False)
plt.show()
assert done["EAGLE3, greedy"].mean_length > 2
assert all(sorted(c.acceptance, reverse=True) == list(c.acceptance) for c in done.values())

# %% [markdown]
# ## 3. Sampling
#
# A sampled row accepts a proposal $x$ with probability $\min(1, p(x) / q(x))$; $q(x) = 1$ where the draft simply named
# its favourite. At the first refusal the token is drawn from $\max(p - q, 0)$. Then the tokens have the distribution
# $p$, the model's own after temperature and top-k, however good or bad the proposal was. One round, after a prompt that
# leaves much open, 1,000 times with 1,000 seeds: `verify` is what the engine calls in each round.

# %%
SEEDS, TEMPERATURE, TOP_K = 1000, 0.8, 6
unclear = code(1212, 48)
print(repr(tokenizer.decode(unclear[-16:])))
handle = engine.add(unclear, Params(max_new_tokens=8, sampling=Sampling.greedy()))
while engine.prefill():
    pass
newest = engine.take(handle)
proposed = np.asarray(proposals(engine._runner.drafter, model, engine._runner.state))[engine._requests[handle].row]
tokens = [*unclear, *newest, *proposed]
logits = read(tokens)[-1 - K :]  # [X V]
rows = SamplingParams.stack([Sampling(temperature=TEMPERATURE, top_k=TOP_K, seed=seed) for seed in range(SEEDS)])
every_row = lambda x: jnp.repeat(jnp.asarray(x)[None], SEEDS, axis=0)
alone, position = DrawContext(), jnp.full(SEEDS, len(tokens) - K, jnp.int32)
verdict = jax.device_get(jax.jit(verify)(every_row(logits), Proposal(every_row(proposed)), rows, alone, position))


# %%
def exact(logits):
    """The tokens that can be drawn, the likeliest first, and their probabilities."""
    best = np.argsort(-logits)[:TOP_K]
    weights = np.exp((logits[best] - logits[best[0]]) / TEMPERATURE)
    return best, weights / weights.sum()


drawn = {
    "The first token of the round": verdict.tokens[:, 0],
    "The second, where the first proposal was kept": verdict.tokens[verdict.accepted > 0, 1],
}
fig, axes = plt.subplots(1, 2, figsize=(10, 3.6), sharey=True)
for i, (axis, (title, tokens)) in enumerate(zip(axes, drawn.items(), strict=True)):
    names, p = exact(np.asarray(logits[i]))
    counts = (tokens[:, None] == names).sum(0)
    assert counts.sum() == len(tokens)  # nothing else was drawn
    error = 2 * np.sqrt(p * (1 - p) / len(tokens))
    axis.bar(range(TOP_K), p, 0.7, color="#9CCBE8", label="$p$, computed from the logits")
    axis.errorbar(range(TOP_K), counts / len(tokens), error, fmt="o", color="black", ms=4, capsize=4,
                  label="share of the draws, with two standard errors")  # fmt: skip
    words = [repr(tokenizer.decode([int(token)])) for token in names]
    axis.set_xticks(
        range(TOP_K), [f"{w}\nproposed" if t == proposed[i] else w for w, t in zip(words, names, strict=True)]
    )
    axis.set_title(f"{title}: {len(tokens):,} draws", fontsize=10)
    chi_square = ((counts - p * len(tokens)) ** 2 / (p * len(tokens))).sum()
    print(f"{title}: chi-square {chi_square:.1f} with {TOP_K - 1} degrees of freedom")
    assert chi_square < 25.7  # one in 10,000 such tests goes beyond
axes[0].set_ylabel("probability")
fig.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False)
plt.show()
