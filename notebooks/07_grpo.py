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
# # GRPO, round by round
#
# For whoever wants to see what reinforcement learning does between two updates. A model with random weights, small
# enough to train in seconds, is rewarded for even token ids. This notebook
#
# 1. draws a group of answers to each prompt, and turns rewards into advantages;
# 2. reads the same tokens as a trainer: by how much do engine and trainer differ, and what do choices add to it?
# 3. takes a few rounds, and watches the reward and that difference.
#
# What stands behind it is described in [docs/training.md](../docs/training.md). Each claim here is an assertion too.

# %%
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax

from m3jax.config import SPARSE, M3Config
from m3jax.decoding import Engine, Params, Sampling
from m3jax.model import init
from m3jax.train.policy import PolicyLoss, group_advantages, mismatch
from m3jax.train.rollouts import RolloutLoss, as_batch, read_logprobs, roll_out
from m3jax.train.step import cast_weights, init_state, make_optimizer, train_step

plt.rcParams.update({"figure.dpi": 90, "font.size": 10, "axes.titlesize": 11, "figure.constrained_layout.use": True})

BLUE, ORANGE, GREEN = "#0072B2", "#E69F00", "#009E73"  # told apart by all eyes

# Two layers, both with selected blocks and with experts.
config = M3Config.tiny(num_hidden_layers=2, layer_types=(SPARSE,) * 2, mlp_layer_types=("sparse",) * 2)
optimizer = make_optimizer(optax.constant_schedule(1e-2), weight_decay=0.0, frozen_index=True)
larger = jax.jit(lambda model: jax.tree.map(lambda x: 4 * x, model))  # larger weights: choices that differ more
served = jax.jit(lambda model: cast_weights(model, "bfloat16"))  # what the engine is given of the float32 weights
state = init_state(larger(init(config)), optimizer)
rng = np.random.default_rng(0)
size = config.index_block_size
length = 8 * size
prompts = [rng.integers(0, config.vocab_size, length - 16 - extra).tolist() for extra in (0, 5)]
RECORDS = ("expert_ids", "blocks")
asked = Params(max_new_tokens=16, sampling=Sampling(), record=RECORDS)
engine = Engine(
    served(state.model), pages=160, max_batch=16, max_length=length, prefill_chunk=length,
    prefill_rows=2, steps_per_call=8, records=RECORDS,
)  # fmt: skip
print(f"blocks of {size} tokens, of which a token reads {config.index_topk_blocks} of up to {length // size}")

# %% [markdown]
# ## 1. A group of answers
#
# Eight answers to each prompt, which is computed once. The reward of an answer is the share of even ids in it; what
# counts is by how much it is better than the others of its group.


# %%
def rewards_of(groups):
    share = lambda episode: np.mean(np.array(episode.tokens)[episode.is_drawn] % 2 == 0)
    return np.array([[share(episode) for episode in group] for group in groups])


groups = roll_out(engine, prompts, asked, count=8, seed=1)
rewards = rewards_of(groups)
advantages = group_advantages(rewards)
assert np.allclose(advantages.mean(axis=1), 0, atol=1e-6)

figure, axes = plt.subplots(1, 2, figsize=(8, 2.6), sharey=True)
for axis, of_group, of_answers, number in zip(axes, rewards, advantages, (1, 2), strict=True):
    axis.bar(range(8), of_group, color=[BLUE if a > 0 else ORANGE for a in of_answers])
    axis.axhline(of_group.mean(), color="black", linewidth=0.8)
    for i, a in enumerate(of_answers):
        axis.text(i, of_group[i] + 0.01, f"{a:+.1f}", ha="center", fontsize=8)
    axis.set(title=f"answers to prompt {number}", xlabel="answer", ylim=(0, 1))
axes[0].set_ylabel("reward, and its advantage")
plt.show()

# %% [markdown]
# ## 2. The trainer reads the same tokens
#
# It has the same weights, in the same dtype, bfloat16, and computes whole rows where the engine computed one token at a
# time. Rounding differs everywhere, by a hundredth or so; where it swaps an expert or a block, by a tenth and more.
# With the engine's records replayed only rounding is left.

# %%
batch = as_batch([episode for group in groups for episode in group], length, RECORDS)
tokens, mask = jnp.asarray(batch["tokens"]), batch["mask"]
none_given = jax.tree.map(lambda ids: np.full_like(ids, -1), batch["choices"])  # each token chooses for itself
live = np.asarray(read_logprobs(state.model, tokens, none_given, "bfloat16"))
replayed = np.asarray(read_logprobs(state.model, tokens, batch["choices"], "bfloat16"))
found = {"live": mismatch(batch["sampler"], live, mask), "replayed": mismatch(batch["sampler"], replayed, mask)}
for name, figures in found.items():
    print(f"{name:9} k3_kl {figures['k3_kl']:.2e}, largest difference of a probability "
          f"{figures['rollout_probs_diff_max']:.4f}")  # fmt: skip
assert found["replayed"]["k3_kl"] < found["live"]["k3_kl"]

figure, axis = plt.subplots(figsize=(7, 2.8))
edges = np.linspace(-6, 0.5, 40)
for name, own, color in (("live choices", live, ORANGE), ("replayed", replayed, BLUE)):
    away = np.log10(np.maximum(np.abs(own - batch["sampler"])[mask], 1e-6))
    axis.hist(away, edges, histtype="step", linewidth=1.6, color=color, label=name)
axis.set(xlabel="log10 of |log-probability, trainer - engine|", ylabel="tokens", yscale="log")
axis.legend()
plt.show()

# %% [markdown]
# What was replayed, of one answer: the blocks that each new token read in the first sparse layer, for one key head. A
# column is a token, and its own block is always among those it reads.

# %%
episode = groups[0][0]
start = len(prompts[0]) - 1
chosen = np.asarray(episode.choices.blocks)[0, start : start + 16, 0, 0]  # [X J]
read = np.zeros((length // size, 16))
for column, blocks in enumerate(chosen):
    read[blocks[blocks >= 0], column] = 1
own_blocks = (start + np.arange(16)) // size
assert all(read[own_blocks[column], column] == 1 for column in range(16))
figure, axis = plt.subplots(figsize=(6, 2.6))
axis.pcolormesh(
    np.arange(17) - 0.5, np.arange(len(read) + 1) - 0.5, read, cmap="Blues", edgecolors="white", linewidth=0.8
)
axis.plot(range(16), own_blocks, ".", color=ORANGE, label="own block")
axis.set(xlabel="new token", ylabel="block", title="blocks that were recorded, and are read again")
axis.legend(loc="lower right", fontsize=8)
plt.show()

# %% [markdown]
# ## 3. Rounds
#
# Draw, reward, learn, and give the engine the new weights: it drops its pages, since they were made by the old ones.
# The first reading of the tokens is the old policy, so the ratio is 1 and nothing is clipped.

# %%
loss = RolloutLoss(PolicyLoss(), compute_dtype="bfloat16")
history, ROUNDS = [], 14
for number in range(ROUNDS):
    groups = roll_out(engine, prompts, asked, count=8, seed=100 * number)
    assert {episode.version for group in groups for episode in group} == {number}
    rewards = rewards_of(groups)
    batch = as_batch([episode for group in groups for episode in group], length, RECORDS)
    batch |= {"advantages": group_advantages(rewards).reshape(-1), "old": batch["sampler"]}
    batch["is_on_policy"] = np.array(True)
    state, metrics = train_step(state, batch, optimizer=optimizer, loss_fn=loss, balance_rate=0.0)
    away = mismatch(batch["sampler"], np.asarray(metrics["logprobs"]), batch["mask"])
    assert float(metrics["clipped"]) == 0
    engine.update(served(state.model))
    history.append((rewards.mean(), away["k3_kl"]))

reward, k3_kl = np.array(history).T
print(f"reward: {reward[:3].mean():.2f} in the first rounds, {reward[-3:].mean():.2f} in the last ones")
assert reward[-3:].mean() > reward[:3].mean() + 0.1
figure, (left, right) = plt.subplots(1, 2, figsize=(8, 2.6))
left.plot(range(1, ROUNDS + 1), reward, ".-", color=BLUE)
left.set(xlabel="round", ylabel="mean reward", ylim=(0, 1))
right.plot(range(1, ROUNDS + 1), 1e4 * k3_kl, ".-", color=GREEN)
right.set(xlabel="round", ylabel="k3_kl x 10000, choices replayed", ylim=(0, None))
plt.show()
