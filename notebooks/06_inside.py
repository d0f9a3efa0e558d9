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
# # Inside: who carried the name?
#
# For whoever asks a model "what if". The embedded checkpoint was trained to recall: somewhere in a text of Python
# stands `# harbor -> lantern`, and hundreds of tokens later `# harbor ->` is to be completed. It answers *lantern*.
# This notebook
#
# 1. finds the heads that read the word, among the 40 of five layers;
# 2. asks which of them write the answer;
# 3. takes the [block](../docs/glossary.md#block) that holds the word away from one
#    [KV head](../docs/glossary.md#kv-head) at a time, and watches the answer change;
# 4. follows the word through layers and tokens, by patching;
# 5. writes by hand what the heads would have carried, and gets the answer back: in one call, and for single requests of
#    an engine.
#
# Every value on the way has a name, and an *edit* is a function of one: `model(tokens, edits={"layers.4.blocks": f})`.
# The names and all functions are described in [docs/inside.md](../docs/inside.md). Each claim here is an assertion too.

# %%
import heapq
import inspect

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

import m3jax
from m3jax import inside
from m3jax.decoding import Engine, Params, Sampling, Steer
from m3jax.inside import plots

plt.rcParams.update({"figure.dpi": 90, "font.size": 10, "axes.titlesize": 11, "figure.constrained_layout.use": True})

lm = m3jax.TextModel.from_pretrained(dtype="float32")
model, tokenizer = lm.model, lm.tokenizer
config = model.config
P, LAYERS, HEADS, KV_HEADS = (
    config.index_block_size, config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads,
)  # fmt: skip
CODE = inspect.getsource(heapq).splitlines()[140:164]


def question(records, key="harbor"):
    """Return token ids: lines of code with a record before every eighth, then the beginning of another record."""
    lines = []
    for number, line in enumerate(CODE):
        if number % 8 == 0:
            lines.append("# {} -> {}".format(*records[number // 8]))
        lines.append(line)
    return jnp.asarray([[config.bos_token_id, *tokenizer.encode("\n".join([*lines, f"# {key} ->"]))]], jnp.int32)


def word(text):
    """Return the one token of a word behind a space."""
    (token,) = tokenizer.encode(f" {text}")
    return token


records = [("harbor", "lantern"), ("castle", "copper"), ("toad", "apple")]
tokens = question(records)
LENGTH = tokens.shape[1]
place = {value: int(np.flatnonzero(tokens[0] == word(value))[0]) for _, value in records}
print(tokenizer.decode(tokens[0, :40].tolist()), "...", tokenizer.decode(tokens[0, -12:].tolist()))
print(f"\n{LENGTH} tokens in {-(-LENGTH // P)} blocks of {P}; lantern is token {place['lantern']}, in block 0")

# %% [markdown]
# ## 1. Who reads the word?
#
# Of all values we ask for those from which attention weights follow: queries, keys and, in the four sparse layers, the
# blocks that each KV head selected. The last token, `->`, is the one that has to know the answer.

# %%
names = ("layers.*.q", "layers.*.k", "layers.*.v", "layers.*.blocks", "layers.*.attention", "final_norm")
values = model.intermediates(tokens, names=names)
logits = model.unembed(values["final_norm"])[0, -1]
print("the model answers:", tokenizer.decode([int(logits.argmax())]))
assert int(logits.argmax()) == word("lantern")

reads = inside.weights_on(values, P, query=LENGTH - 1, keys=[place["lantern"]], layers=range(LAYERS))[0]
carriers = [(layer, head) for layer, head in np.argwhere(np.asarray(reads) > 0.5).tolist()]
print("heads that give the word more than half of their attention:", carriers)
CARRIER_LAYER, CARRIER_KV = carriers[0][0], carriers[0][1] * KV_HEADS // HEADS
assert {(layer, head * KV_HEADS // HEADS) for layer, head in carriers} == {(CARRIER_LAYER, CARRIER_KV)}

fig, (left, right) = plt.subplots(1, 2, figsize=(9.2, 3.6))
plots.draw_heads(left, np.asarray(reads), "attention of the last token to “lantern”")
busiest = max(carriers, key=lambda at: reads[at])
blocks = inside.block_reads(values, busiest[0], P)[0, busiest[1]]
plots.draw_blocks(right, np.asarray(blocks), f"layer {busiest[0]}, head {busiest[1]}: who read which block")
plt.show()

# %% [markdown]
# Three heads of one KV group in the last layer look straight at the word (left); hardly any other head looks at it at
# all. On the right is the busiest of them, on average over the tokens of a block: the lower a row, the later the tokens
# that read. White below the diagonal is what was not selected, or not wanted.
#
# ## 2. Who writes the answer?
#
# Reading is not writing. What a head adds to the residual stream can be multiplied with the direction that tells
# *lantern* from *copper*, another record's value: that is its part of the difference between the two logits.

# %%
written = inside.head_logits(model, tokens, word("lantern"), word("copper"))[0]
difference = float(logits[word("lantern")] - logits[word("copper")])
share = sum(float(written[at]) for at in carriers) / float(written.sum())
print(
    f"logit difference {difference:.1f}; all heads write {float(written.sum()):.1f} of it, {share:.0%} by these three"
)
assert share > 0.8

fig, axes = plt.subplots(figsize=(5.6, 3.2))
plots.draw_heads(axes, np.asarray(written), "written towards “lantern”, against “copper”")
plt.show()

# %% [markdown]
# ## 3. Without the block
#
# Now the experiment that only sparse attention allows. Block 0 is taken out of what one KV head selects, in one layer;
# all else stays. One program serves for every choice of layer and head, since these are arrays.


# %%
@jax.jit
def without_block(model, tokens, is_lost):
    """Return the last logits where the KV heads of `is_lost` [L K] do without block 0."""
    edit = lambda blocks, seen: inside.WithoutBlock(jnp.int32(0), is_lost[seen["layer"]])(blocks)
    return model(tokens, edits={"layers.*.blocks": edit})[0, -1]


effects, answers = np.zeros((LAYERS - 1, KV_HEADS)), {}
for layer in range(1, LAYERS):  # layer 0 attends to every block
    for kv_head in range(KV_HEADS):
        is_lost = np.zeros((LAYERS, KV_HEADS), bool)
        is_lost[layer, kv_head] = True
        lost = without_block(model, tokens, is_lost)
        effects[layer - 1, kv_head] = float(lost[word("lantern")] - logits[word("lantern")])
        answers[layer, kv_head] = tokenizer.decode([int(lost.argmax())]).strip()
print({f"layer {layer}, KV head {head}": answer for (layer, head), answer in answers.items()})
assert [at for at, answer in answers.items() if answer != "lantern"] == [(CARRIER_LAYER, CARRIER_KV)]

fig, axes = plt.subplots(figsize=(5.2, 2.6))
axes.bar([f"{layer}.{head}" for layer, head in answers], effects.reshape(-1), color="tab:red")
axes.set(xlabel="layer.KV head that does without block 0", ylabel="change of the logit", title="“lantern” without")
axes.axhline(0, color="black", lw=0.8)
plt.show()

# %% [markdown]
# One KV head of eight matters. Without block 0 it has nothing to carry, and another word of the kind wins; the other
# seven may lose the block and nothing changes.
#
# ## 4. Where the word is, on its way
#
# *Patching* asks where a difference lives. In a second text the record says `harbor -> copper` from the beginning. We
# run that text and put the residual stream of the first one into it, at one layer and one token: where does the answer
# turn back to *lantern*? Layers and tokens are arrays again: one program, run for each pair.

# %%
other = question([("harbor", "copper"), ("castle", "lantern"), ("toad", "apple")])
assert other.shape == tokens.shape
metric = inside.logit_difference(word("lantern"), word("copper"))
shown = [place["lantern"] - 1, place["lantern"], LENGTH - 2, LENGTH - 1]
patched = inside.patch_effects(model, other, tokens, metric, positions=shown)
is_turned = np.asarray(patched) > 0
assert is_turned[:CARRIER_LAYER, 1].all() and not is_turned[CARRIER_LAYER, 1]  # the word's own token, then no more
assert is_turned[CARRIER_LAYER, -1] and not is_turned[:CARRIER_LAYER, -1].any()  # at the end, the last token alone

fig, axes = plt.subplots(figsize=(5.6, 3.4))
labels = [f"{position}: {tokenizer.decode([int(tokens[0, position])]).strip()}" for position in shown]
plots.draw_patches(axes, np.asarray(patched), labels, "logit of “lantern” less that of “copper”, by place of the patch")
plt.show()

# %% [markdown]
# Up to the layer before the last the difference lies in the word's own token; behind the last layer it is all in the
# last token. Nothing lies in between: the word is carried once, over the whole distance, by the heads that we found.
#
# ## 5. By hand
#
# If these heads carry the word, we can do their work. What they would have written is the word's *value* vector,
# through their part of the output projection. We take the block away, and add that vector to what attention writes.

# %%
o_proj = model.layer(CARRIER_LAYER).self_attn.o_proj[...][0]  # [N H D]
heads = [head for _, head in carriers]


def carried(text):
    """Return the vector that the carriers write where they read nothing but this record's value."""
    value = values[f"layers.{CARRIER_LAYER}.v"][0, place[text], CARRIER_KV]  # [H]
    return np.asarray(sum(jnp.einsum("h,hd->d", value, o_proj[head]) for head in heads))


name = f"layers.{CARRIER_LAYER}."
edits = {
    f"{name}blocks": inside.WithoutBlock(jnp.int32(0), jnp.arange(KV_HEADS) == CARRIER_KV),
    f"{name}attention_out": inside.Add(jnp.asarray(carried("lantern"))),
}
steered = model(tokens, edits=edits)[0, -1]
print("without the block:", answers[CARRIER_LAYER, CARRIER_KV])
print("with the vector:  ", tokenizer.decode([int(steered.argmax())]).strip())
assert int(steered.argmax()) == word("lantern")

# %% [markdown]
# The same in an engine, where each request brings its own vectors. The text now has no record of *harbor* at all: three
# requests ask for it in one batch, one as it is, one with the vector of *lantern* and one with that of *copper*. A
# vector is data, so no request compiles anything, and in the invariant mode no request changes another's bits.

# %%
engine = Engine(model, pages=96, max_batch=3, prefill_rows=3, prefill_chunk=128, edits=(f"{name}attention_out",),
                media_patches=(), max_top_logprobs=0)  # fmt: skip
unknown = question([("castle", "copper"), ("toad", "apple"), ("ox", "zoo")])[0].tolist()
one = Params(max_new_tokens=1, sampling=Sampling.greedy())
asked = {"nothing": None, "lantern": Steer(add=carried("lantern")), "copper": Steer(add=carried("copper"))}
handles = {
    text: engine.add(unknown, one, edits=None if steer is None else {f"{name}attention_out": steer})
    for text, steer in asked.items()
}
results = engine.run()
for text, handle in handles.items():
    print(f"steered by {text:8} -> {tokenizer.decode(results[handle].tokens)}")
assert [results[handles[text]].tokens for text in ("lantern", "copper")] == [[word("lantern")], [word("copper")]]
assert results[handles["nothing"]].tokens not in ([word("lantern")], [word("copper")])
