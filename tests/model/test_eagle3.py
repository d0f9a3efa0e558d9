"""EAGLE3's draft: the layer as it is written down, over pages, unrolled in training, and the taps of the target."""

import re
from dataclasses import replace
from functools import cache, partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import comparisons, tiny
from support.drafts import CONFIG, config, draft, join, model

from m3jax.cache import Cache
from m3jax.cache.drafted import DraftedCache
from m3jax.decoding import Eagle3Drafter, Sampling, SamplingParams
from m3jax.decoding.speculation.drafter import PromptContext
from m3jax.model import eagle3
from m3jax.train.eagle3 import draft_losses

LENGTH, K = 21, 4
PARAMETERS = (
    "fc", "fc_norm", "hidden_norm", "input_layernorm", "post_attention_layernorm", "q_proj", "k_proj", "v_proj",
    "o_proj", "gate_proj", "up_proj", "down_proj", "norm", "embed_tokens", "lm_head",
)  # fmt: skip
TOKENS = tiny.tokens(CONFIG, 2, LENGTH + K, seed=5)


# The definition, in float64 and without any cache: model.md 5.4, step by step


def rms(x, w, eps=1e-6):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * w


def rotate(x, positions, theta):
    half = x.shape[-1] // 2
    angles = positions[:, None, None] / theta ** (np.arange(half) / half)
    a, b = x[..., :half], x[..., half:]
    return np.concatenate([a * np.cos(angles) - b * np.sin(angles), b * np.cos(angles) + a * np.sin(angles)], -1)


class Written:
    """A draft of one row that keeps what it has seen in a list."""

    def __init__(self, module, target):
        leaf = lambda x: None if x is None else np.asarray(x[...], np.float64)
        self.c = module.config
        self.w = {name: leaf(getattr(module, name)) for name in PARAMETERS}
        own = {"embed_tokens": target.embed_tokens, "lm_head": target.lm_head}
        self.w |= {name: leaf(x) for name, x in own.items() if self.w[name] is None}
        self.k, self.v = [], []

    def features(self, taps):
        """[T A D] -> [T D]: each tap normed by its own weight, low layer first, then fc."""
        w, c = self.w, self.c
        taps = [rms(taps[:, a], w["fc_norm"][a]) if c.fc_norm else taps[:, a] for a in range(len(c.taps))]
        return np.concatenate(taps, -1) @ w["fc"].reshape(-1, c.hidden_size)

    def step(self, feature, token, position):
        """One feature [D] and the token after it: (recurrent feature, logits)."""
        w, c = self.w, self.c
        normed = rms(feature, w["hidden_norm"])
        x = np.concatenate([rms(w["embed_tokens"][token], w["input_layernorm"]), normed])
        project = lambda name: np.einsum("w,wnh->nh", x, w[name])
        turn = lambda y: rotate(y[None], np.array([position]), c.rope_theta)[0]
        q = turn(project("q_proj"))
        self.k.append(turn(project("k_proj")))
        self.v.append(project("v_proj"))
        groups = c.num_attention_heads // c.num_key_value_heads
        k, v = (np.repeat(np.stack(y), groups, axis=1) for y in (self.k, self.v))
        scores = np.einsum("nh,snh->ns", q, k) * c.head_dim**-0.5
        p = np.exp(scores - scores.max(-1, keepdims=True))
        out = np.einsum("ns,snh,nhd->d", p / p.sum(-1, keepdims=True), v, w["o_proj"])
        r = (normed if c.norm_before_residual else feature) + out
        h = rms(r, w["post_attention_layernorm"])
        gate = h @ w["gate_proj"]
        r = r + (gate / (1 + np.exp(-gate)) * (h @ w["up_proj"])) @ w["down_proj"]
        z = rms(r, w["norm"])
        return (z if c.norm_output else r), w["lm_head"] @ z


@cache
def taps_of(layers):
    out = model().run(jnp.asarray(TOKENS), residual_layers=layers, logits=False)
    return out.hidden, out.residuals


VARIANTS = {
    "released": dict(fc_norm=True, norm_output=True, own_embedding=True, own_head=True),
    "shared": dict(fc_norm=True, norm_output=True),
    "classic": dict(num_key_value_heads=4),
    "norm before residual": dict(norm_before_residual=True, fc_norm=True),
    "reduced vocabulary": dict(draft_vocab_size=40, own_head=True, norm_output=True),
}


def test_the_paged_draft_is_the_written_one():
    """A prompt in two chunks that part within a page, then K steps; against one token at a time in float64.

    Of a draft with ids of its own, which its best tokens have to be looked up by.
    """
    module = draft(**VARIANTS["reduced vocabulary"])
    hidden, taps = taps_of(module.config.taps)
    first = np.asarray(jnp.argmax(model().unembed(hidden)[:, LENGTH - 1], -1), np.int32)
    proposal, _ = propose(module, taps, first)
    for row in range(2):
        written = Written(module, model())
        features = written.features(np.asarray(taps[row], np.float64))
        tokens = [*TOKENS[row, :LENGTH], first[row]]
        for t in range(LENGTH):
            feature, logits = written.step(features[t], tokens[t + 1], t)
        for step in range(K):
            ids = None if module.target_ids is None else np.asarray(module.target_ids[...])
            best = int(np.argmax(logits))
            token = best if ids is None else int(ids[best])
            assert proposal.tokens[row, step] == token
            feature, logits = written.step(feature, token, LENGTH + step)


def test_a_draft_without_a_distribution_proposes_nothing():
    module = draft(**VARIANTS["reduced vocabulary"])
    module.norm[...] = jnp.full_like(module.norm[...], jnp.nan)  # of the logits
    _, taps = taps_of(module.config.taps)
    assert (propose(module, taps, np.zeros(2, np.int32))[0].tokens == -1).all()


BY_DEFAULT = ("released", "reduced vocabulary")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in BY_DEFAULT else pytest.mark.further) for name in VARIANTS]
)
def test_the_paged_draft_draws_from_the_written_distribution(name):
    """Its numbers, not its best tokens alone: log q of every proposal that was drawn, of the token and all others."""
    module = draft(**VARIANTS[name])
    hidden, taps = taps_of(module.config.taps)
    first = np.asarray(jnp.argmax(model().unembed(hidden)[:, LENGTH - 1], -1), np.int32)
    proposal, _ = propose(module, taps, first, sampling=[Sampling(temperature=1.5, seed=row) for row in range(2)])
    ids = np.arange(module.config.vocab_size) if module.target_ids is None else np.asarray(module.target_ids[...])
    for row in range(2):
        written = Written(module, model())
        features = written.features(np.asarray(taps[row], np.float64))
        tokens = [*TOKENS[row, :LENGTH], first[row]]
        for t in range(LENGTH):
            feature, logits = written.step(features[t], tokens[t + 1], t)
        for step in range(K):
            expected = np.full(module.config.vocab_size, -np.inf)
            expected[ids] = logits / 1.5 - np.log(np.exp(logits / 1.5).sum())
            found = np.asarray(proposal.log_q[row, step])
            np.testing.assert_allclose(found, expected, rtol=0, atol=2e-4, err_msg=f"log q, row {row}, proposal {step}")
            feature, logits = written.step(feature, int(proposal.tokens[row, step]), LENGTH + step)


def test_proposals_of_a_round_are_drawn_apart():
    """The joint law of two of them: where every token is as likely, so is every pair, of one round and of two rows.

    One key for a round would draw one token four times, and each alone would still have its distribution.
    """
    module = draft(**VARIANTS["shared"])
    module.norm[...] = jnp.zeros_like(module.norm[...])  # of the logits: they are all 0
    hidden, taps = taps_of(module.config.taps)
    first = np.asarray(jnp.argmax(model().unembed(hidden)[:, LENGTH - 1], -1), np.int32)
    drawn = []
    for call in range(150):
        knobs = [Sampling(temperature=1.0, seed=2 * call + row) for row in range(2)]
        drawn.append(np.asarray(propose(module, taps, first, sampling=knobs)[0].tokens))
    drawn = np.stack(drawn)  # [150 rounds, 2 rows, K]
    assert np.ptp(np.bincount(drawn.reshape(-1), minlength=CONFIG.vocab_size)) < 40  # 19 of each token
    pairs = {f"proposals {i} and {j}": (drawn[..., i], drawn[..., j]) for i in range(K) for j in range(i)}
    pairs |= {f"rows 0 and 1, proposal {i}": (drawn[:, 0, i], drawn[:, 1, i]) for i in range(K)}
    for name, (one, other) in pairs.items():
        counts = np.bincount((4 * (one % 4) + other % 4).reshape(-1), minlength=16)  # as likely, in four classes each
        expected = one.size / 16
        chi_square = ((counts - expected) ** 2 / expected).sum()
        assert chi_square < 44.3, f"{name}: chi-square {chi_square:.0f}, of 15 degrees"  # once in 10,000
        assert (one == other).sum() < 0.08 * one.size, f"{name} are the same {(one == other).sum()} times"


def propose(module, taps, first, cut=13, sampling=None):
    """(K proposals after the prompts TOKENS[:, :LENGTH], cache), the prompt read in two chunks; drawn if so asked."""
    drafter = Eagle3Drafter(module, sample=sampling is not None)
    cache = join(drafter, batch=2, blocks=5)
    sampling = jax.tree.map(jnp.asarray, SamplingParams.stack(sampling or [Sampling.greedy()] * 2))
    return _propose(drafter, model(), cache, taps, TOKENS, first, sampling, cut)


@partial(jax.jit, static_argnames=("cut",))
def _propose(drafter, target, cache, taps, tokens, first, sampling, cut):
    rows = lambda x: jnp.full(2, x, jnp.int32)
    for start, end in ((0, cut), (cut, LENGTH)):
        piece, context = tokens[:, start:end], PromptContext(tokens[:, end])
        cache, memory = drafter.read_prompt(
            target, cache, piece, rows(start), rows(LENGTH), context, taps[:, start:end], first
        )
    return drafter.propose(target, cache, memory, sampling, first, rows(LENGTH), rows(1) > 0, K)


# What the drafter hands to the draft, whatever that makes of it


class Noted:
    """A draft that notes its calls; its output [D] is (the token, its slot, a number of the feature), and 0."""

    config, dtype, target_ids = SimpleNamespace(hidden_size=4, vocab_size=9), jnp.dtype("float32"), None

    def __init__(self):
        self.calls = []

    def features(self, taps):
        return taps[:, :, 0]

    def cached(self, features, tokens, slots, lengths, places, pages, embedding, compute):
        self.calls.append(dict(features=features, tokens=tokens, slots=slots, lengths=lengths, pages=places.page))
        zeros = jnp.zeros(tokens.shape)
        return jnp.stack([tokens + 0.0, slots + 0.0, features[..., 0], zeros], axis=-1), pages


NOTHING = SimpleNamespace(embed_tokens=np.zeros(1), lm_head=np.zeros(1), compute=None)
TEXTS = [[3, 1, 4, 1, 5, 2, 6, 5, 3, 5, 7], [2, 7, 1, 7, 2, 1]]  # of a page and a part, and of a part; pages of 8
FIRST = np.array([0, 6], np.int32)  # the token after each


def noted_cache():
    """A cache of two rows with three pages each, whose edges are of no text."""
    cache, layer = Cache.pool(tiny.config("d"), 6, 2, 3), tiny.config("d", hidden_size=4, num_hidden_layers=1)
    table = jnp.array([[4, 0, 2], [1, 3, 5]], jnp.int32)
    cache = DraftedCache.join(cache.replace(table=table), layer, "float32", None)
    return cache.replace(edges=cache.edges - 77)


def feature(row, position):
    return 1000 * (row + 1) + position + np.arange(4) / 8


def written(calls):
    """By row and slot, each (token, feature) that calls had the draft write there; the slot's page is its own."""
    found, table = {}, np.asarray(noted_cache().table)
    for call in calls:
        call = {name: np.asarray(value) for name, value in call.items()}
        assert (call["tokens"] >= 0).all()
        for row, column in zip(*np.nonzero(call["slots"] >= 0), strict=True):
            slot = int(call["slots"][row, column])
            assert slot < call["lengths"][row] and call["pages"][row, column] == table[row, slot // 8]
            found.setdefault((int(row), slot), []).append(
                (int(call["tokens"][row, column]), call["features"][row, column].tolist())
            )
    return found


@pytest.mark.parametrize("width", [4, 8, 9])
def test_every_slot_of_a_prompt_gets_its_token_and_the_feature_before_it(unchecked, width):
    """Slots 1 to the length, the first token after the prompt in the last, and no slot 0, however it is cut."""
    lengths, cache, calls = np.array([11, 6], np.int32), noted_cache(), []
    for start in range(0, 11, width):
        tokens = np.full((2, width), 8, np.int32)  # padding
        for row, text in enumerate(TEXTS):
            piece = text[start : start + width]
            tokens[row, : len(piece)] = piece
        following = np.array([(text + [0] * 20)[start + width] for text in TEXTS], np.int32)
        taps = np.array([[[feature(row, start + i)] for i in range(width)] for row in range(2)], np.float32)
        cache, memory, of_call = _read_noted(cache, tokens, np.full(2, start, np.int32), lengths, following, taps)
        calls += of_call
        # What reads on at a page's beginning may have the page before from another request.
        assert ((0, start) in written(of_call)) == (start > 0 and start % 8 == 0)
        assert of_call[0]["lengths"].tolist() == [min(n, start + width) + 1 for n in lengths]
        for row, text in enumerate(TEXTS):
            if start < len(text) <= start + width:  # it ends here: the output at the slot of its first new token
                assert memory[row].tolist() == [FIRST[row], len(text), feature(row, len(text) - 1)[0], 0]
    expected = {
        (row, slot): ([*text, FIRST[row]][slot], feature(row, slot - 1).tolist())
        for row, text in enumerate(TEXTS)
        for slot in range(1, len(text) + 1)
    }
    found = written(calls)
    assert found.keys() == expected.keys()
    for place, notes in found.items():
        assert all(note == expected[place] for note in notes), place
    edges = np.full((6, 4), -77.0)
    edges[4] = feature(0, 7)  # of the only page that is full
    np.testing.assert_array_equal(cache.edges, edges)


@jax.jit
def _read_noted(cache, tokens, start, lengths, following, taps):
    draft = Noted()
    given = tokens, start, lengths, PromptContext(following), taps, jnp.asarray(FIRST)
    cache, memory = Eagle3Drafter(draft).read_prompt(NOTHING, cache, *given)
    return cache, memory, draft.calls


def test_slots_of_new_tokens_are_filled_anew_with_the_target_s_features(unchecked):
    """As many as were kept; a row that kept none goes on from what it had, any other from its newest token."""
    tokens = np.array([[5, 6, 7], [1, 2, -1]], np.int32)
    taps = np.array([[[feature(row, 6 + i)] for i in range(3)] for row in range(2)], np.float32)
    for counts in ([3, 0], [1, 2]):
        cache, memory, calls = _learn_noted(taps, tokens, np.array(counts, np.int32))
        assert calls[0]["lengths"].tolist() == [6 + count + 1 for count in counts]
        assert written(calls) == {
            (row, 7 + i): [(tokens[row, i], feature(row, 6 + i).tolist())]
            for row in range(2)
            for i in range(counts[row])
        }
        for row, count in enumerate(counts):
            newest = [tokens[row, count - 1], 6 + count, feature(row, 5 + count)[0], 0]
            assert memory[row].tolist() == (newest if count else [55] * 4)
        edges = np.full((6, 4), -77.0)
        for row in np.flatnonzero(np.array(counts) >= 2):  # the token at position 7 is the last of its page
            edges[[4, 1][row]] = feature(row, 7)
        np.testing.assert_array_equal(cache.edges, edges)


@jax.jit
def _learn_noted(taps, tokens, counts):
    draft, memory = Noted(), jnp.full((2, 4), 55.0)
    given = noted_cache(), memory, taps, tokens, jnp.full(2, 6, jnp.int32), counts
    return *Eagle3Drafter(draft).learn(NOTHING, *given), draft.calls


def test_training_unrolls_what_decoding_does():
    """After any position the chain of training makes the features and logits that the paged draft makes there."""
    module = draft(**VARIANTS["shared"])
    hidden, taps = taps_of(module.config.taps)
    logits = model().unembed(hidden)
    found = jax.jit(draft_losses, static_argnames="steps")(module, taps, logits, TOKENS, model(), steps=3)
    written = [Written(module, model()) for _ in range(2)]
    expected = np.zeros((2, 3, LENGTH + K)), np.zeros((2, 3, LENGTH + K))
    target = np.asarray(logits, np.float64)
    for row in range(2):
        features = written[row].features(np.asarray(taps[row], np.float64))
        for t in range(LENGTH + K - 1):
            feature = features[t]
            for step in range(min(3, LENGTH + K - t - 1)):
                feature, out = written[row].step(feature, TOKENS[row, t + step + 1], t + step)
                p = target[row, t + step + 1]
                p = np.exp(p - p.max()) / np.exp(p - p.max()).sum()
                log_q = out - out.max() - np.log(np.exp(out - out.max()).sum())
                expected[0][row, step, t] = -(p * log_q).sum()
                expected[1][row, step, t] = np.argmax(p) == np.argmax(out)
            for kept in (written[row].k, written[row].v):
                del kept[t + 1 :]
    count = (LENGTH + K - 1 - np.arange(3)) * 2
    comparisons.assert_close(found[0], expected[0].sum((0, 2)) / count, "loss of each step", "step", rtol=1e-5)
    comparisons.assert_close(found[1], expected[1].sum((0, 2)) / count, "hits of each step", "step", rtol=1e-5)


def test_taps_are_the_residual_stream():
    """T55: The off-by-one trap: 0 is the embedding, n the output of the n-th layer counted from 1, before any norm."""
    values = jax.jit(lambda m, t: m.intermediates(t))(model(), TOKENS)
    every = [values["embedding"], *(layer["output"] for layer in values["layers"])]
    hidden, taps = taps_of((0, 1, 2))
    for n in range(3):
        comparisons.assert_close(taps[:, :, n], every[n], f"tap after layer {n}", "B T D", atol=1e-5)
    comparisons.assert_close(hidden, values["final_norm"], "final_norm", "B T D", atol=1e-5)
    comparisons.assert_equal(taps_of((2,))[1][:, :, 0], taps[:, :, 2], "the only tap, after layer 2", "B T D")
    with pytest.raises(ValueError, match=r"residual_layers = \(0, 3\): the model has 0 \(the embedding\) to 2"):
        model().run(jnp.asarray(TOKENS), residual_layers=(0, 3))


def test_what_a_draft_does_not_say_is_llama_s():
    sizes = dict.fromkeys(("hidden_size", "vocab_size", "draft_vocab_size", "head_dim", "intermediate_size"), 8)
    plain = eagle3.Eagle3Config(**sizes, num_attention_heads=2, num_key_value_heads=1, taps=(0, 1))
    assert (plain.rms_norm_eps, plain.rope_theta) == (1e-6, 1e4)
    assert not (plain.fc_norm or plain.norm_output or plain.norm_before_residual)
    assert plain.own_embedding and plain.own_head


def test_a_new_draft_s_matrices_keep_the_size_of_what_they_read():
    make = eagle3.MakeRandomDraft(np.random.default_rng(0), "float32")
    drawn = np.asarray(make.weight((64, 32), (None, None), fan_in=16)[...])
    assert abs(drawn.mean()) < 0.03 and abs(drawn.std() - 16**-0.5) < 0.02
    assert (make.norm((4,))[...] == 1).all() and make.token_ids(3)[...].tolist() == [0, 1, 2]


def test_init_is_usable():
    module = eagle3.init(config(draft_vocab_size=8, own_head=True))
    assert module.target_ids[...].tolist() == list(range(8))
    assert float(module.norm[...].min()) == 1


def test_a_draft_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="hidden_size is 48, the target's 40; its vocab_size is 64, the target's 60"):
        config().check_fits(tiny.config("dM", hidden_size=40, vocab_size=60))
    config(taps=(0, 2)).check_fits(CONFIG)  # reads the last layer's output
    with pytest.raises(ValueError, match=r"after layers \[0, 1, 3\], and the target has 2 layers"):
        config(taps=(0, 1, 3)).check_fits(CONFIG)
    with pytest.raises(ValueError, match="it proposes 65 tokens of a vocabulary of 64"):
        config(draft_vocab_size=65, own_head=True).check_fits(CONFIG)


def test_the_smallest_draft_and_what_is_smaller():
    counts = ("hidden_size", "vocab_size", "draft_vocab_size", "num_attention_heads", "num_key_value_heads",
              "intermediate_size")  # fmt: skip
    smallest = eagle3.Eagle3Config(**dict.fromkeys(counts, 1), head_dim=2, taps=(0,))
    smallest.check_fits(tiny.config("d", hidden_size=1, vocab_size=1))
    with pytest.raises(ValueError) as refused:  # all of them at once
        replace(smallest, **dict.fromkeys((*counts, "head_dim"), 0))
    assert {*re.findall(r"(\w+) = 0: must be at least 1", str(refused.value))} == {*counts, "head_dim"}
    for changes, message in (
        (dict(head_dim=3), "head_dim = 3: must be even"),
        (dict(taps=()), r"tapped layers \[\]"),
        (dict(taps=(-1, 0)), r"tapped layers \[-1, 0\]"),
        (dict(taps=(2, 1)), r"tapped layers \[2, 1\]"),
        (dict(taps=(1, 1)), r"tapped layers \[1, 1\]: .*different ones in ascending order"),
        (dict(vocab_size=2, own_head=False), "needs a head of the draft's own"),
        (dict(num_attention_heads=3, num_key_value_heads=2), "3 is no multiple of num_key_value_heads = 2"),
    ):
        with pytest.raises(ValueError, match=message):
            replace(smallest, **changes)
