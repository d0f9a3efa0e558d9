"""Measure how far a trainer's log-probabilities are from the engine's, with each replay and correction.

    bench.py mismatch                        # random weights, 128 experts of which 4, 8 of 36 blocks
    bench.py mismatch --model DIR            # a checkpoint, such as m3jax/assets/tiny

An engine draws answers in bfloat16, once from all tokens and once within top-p, and records experts, blocks and the
support of each draw. A trainer reads the same tokens with the same weights: without anything, with each replay, with
all, and both in the invariant mode. Figures are those of `m3jax.train.policy.mismatch`; a row for truncated importance
sampling says what its weights are. A choice is of one layer, or of one key head of a layer. The costs are times in one
run, the best of some turns: of drawing with each record beside drawing without, and of reading with each replay beside
reading without.
"""

import time
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

import m3jax
from benchmarks.harness import Option
from m3jax.compile_cache import compile_cache
from m3jax.config import FULL, SPARSE, M3Config
from m3jax.decoding import Engine, Params, Sampling
from m3jax.model import M3, init
from m3jax.train.policy import Correction, mismatch
from m3jax.train.programs import jit_for_training
from m3jax.train.rollouts import Episode, as_batch, read_logprobs, roll_out

REPEATS = 3
COLUMNS = ("rollout_probs_diff_max", "rollout_probs_diff_mean", "kl", "k3_kl", "chi2_token", "ess",
           "token_mult_prob_error")  # fmt: skip
CHOICES, SUPPORT = ("expert_ids", "blocks"), "support"
ALL = (*CHOICES, SUPPORT)
WAYS = {
    "nothing": (), "experts": ("expert_ids",), "blocks": ("blocks",), "experts and blocks": CHOICES,
    "support": (SUPPORT,), "all three": ALL,
}  # fmt: skip
OPTIONS = dict(
    model=Option(None, "Folder of a checkpoint in the hub's layout, in place of random weights", type=str),
    prompts=Option(4, "Number of prompts", smoke=1),
    answers=Option(4, "Answers to each prompt", smoke=2),
    prompt_tokens=Option(448, "Tokens of a prompt", smoke=48),
    new_tokens=Option(128, "Tokens of an answer", smoke=16),
    top_p=Option(0.9, "Share of the probability that the second draw is within"),
    no_costs=Option(False, "Time nothing", smoke=True),
)


def random_model() -> M3:
    """As sparse as M3: 4 of 128 experts, and 8 of up to 36 blocks; the logits are made as peaked as a trained model's.

    The router's weights are spread so that its scores are as near to one another as a trained one's, not all alike.
    """
    layers = 8
    config = M3Config(
        vocab_size=1024, hidden_size=128, num_hidden_layers=layers, num_attention_heads=8, num_key_value_heads=4,
        head_dim=16, intermediate_size=64, dense_intermediate_size=256, shared_intermediate_size=64,
        num_local_experts=128, num_experts_per_tok=4, rotary_dim=8,
        layer_types=(FULL,) + (SPARSE,) * (layers - 1), mlp_layer_types=("dense",) + ("sparse",) * (layers - 1),
        index_n_heads=4, index_head_dim=16, index_block_size=16, index_topk_blocks=8, max_position_embeddings=1024,
    )  # fmt: skip
    wider = {"lm_head": 6.0, "gate": 6.0, "embed_tokens": 40.0}

    def scaled(path, leaf):
        name = jax.tree_util.keystr(path)
        factor = next((factor for part, factor in wider.items() if part in name), 3.0 if "proj" in name else 1.0)
        return (leaf * factor).astype(leaf.dtype)

    return jax.jit(partial(jax.tree_util.tree_map_with_path, scaled))(init(config, 0, "bfloat16"))


def measure(args):
    """Yield the figures of all ways, the choices, the bytes and the costs."""
    with compile_cache():
        model = random_model() if args.model is None else m3jax.load(args.model, dtype="bfloat16", vision=False)
        yield from figures(model, args)


def figures(model: M3, args):
    """Yield the rows of a model that is both the engine's and the trainer's."""
    rng, config = np.random.default_rng(0), model.config
    prompts = [rng.integers(8, config.vocab_size, args.prompt_tokens).tolist() for _ in range(args.prompts)]
    size, rows = config.index_block_size, args.prompts * args.answers
    length = -(-(args.prompt_tokens + args.new_tokens) // size) * size
    serve = lambda **more: Engine(
        model, pages=(rows + 2) * (length // size), max_batch=rows, max_length=length, prefill_chunk=256,
        steps_per_call=16, kv_dtype="float32", index_dtype="float32", **more,
    )  # fmt: skip
    engine, invariant_engine = serve(), serve(invariant=True)

    def draw(engine: Engine, record: tuple[str, ...], **knobs) -> list[Episode]:
        asked = Params(max_new_tokens=args.new_tokens, sampling=Sampling(**knobs), record=record)
        return [one for group in roll_out(engine, prompts, asked, args.answers) for one in group]

    recorded = (*ALL, "drawn_logprobs")
    within = dict(top_p=args.top_p)
    for draws, knobs in (("all tokens", {}), (f"top-p {args.top_p:g}", within)):
        episodes = draw(engine, recorded, **knobs)
        batch = as_batch(episodes, length, ALL)
        for name, replay in WAYS.items():
            own = read_batch(model, batch, replay)
            found = mismatch(batch["sampler"], own, batch["mask"])
            yield way(f"{draws}: {name}", found)
            if name == "nothing":
                yield way(f"{draws}: TIS", found, *truncation(batch, own))
        exact = as_batch(draw(invariant_engine, recorded, **knobs), length, ALL)
        own = read_batch(model.with_invariance(), exact, (SUPPORT,) if knobs else ())
        yield way(f"{draws}: invariant", mismatch(exact["sampler"], own, exact["mask"]))
        if not knobs:
            changed = swapped(model, episodes, length)
    for name, share in changed.items():
        yield {"the trainer's choice is another": name, "share": share}
    for name, count in bytes_of(episodes).items():
        yield {"record": name, "bytes a token": count}
    yield f"{int(batch['mask'].sum())} tokens; mean -log p {float(-batch['sampler'][batch['mask']].mean()):.2f}"
    if not args.no_costs:
        yield from costs(engine, invariant_engine, model, batch, partial(draw, **within), recorded[2:], args.repeats)


def way(name: str, found: dict[str, float], weight_mean: float | None = None, weight_cut: float | None = None) -> dict:
    """Return the row of one way to read."""
    columns = {column: float(found[column]) for column in COLUMNS}
    return {"drawn from: trainer": name, **columns, "mean weight": weight_mean, "weights cut": weight_cut}


def read_batch(model: M3, batch: dict, replay: tuple[str, ...]) -> np.ndarray:
    """Return the trainer's log-probabilities, with some of the records replayed."""
    names = tuple(name for name in replay if name in CHOICES)
    choices = replace(batch["choices"], **{name: None for name in CHOICES if name not in names}) if names else None
    support = jnp.asarray(batch[SUPPORT]) if SUPPORT in replay else None
    tokens = jnp.asarray(batch["tokens"])
    return np.asarray(read_logprobs(model, tokens, choices, "bfloat16", support=support, temperature=1.0))


def truncation(batch: dict, own: np.ndarray) -> tuple[float, float]:
    """Return the mean weight of truncated importance sampling of tokens, and the share that it cuts."""
    correction = Correction(weigh="token")
    weights = np.asarray(correction.weights(*map(jnp.asarray, (own, batch["sampler"], batch["mask"]))))[batch["mask"]]
    return float(weights.mean()), float((weights >= correction.limit).mean())


def swapped(model: M3, episodes: list[Episode], length: int) -> dict[str, float]:
    """Return the share of choices in which the trainer's own experts, or blocks, are others, and of tokens with one."""
    batch = as_batch(episodes, length, CHOICES)
    lengths = np.array([len(episode.tokens) for episode in episodes], np.int32)
    read = jit_for_training(
        lambda model, tokens, lengths: model.run(tokens, names=CHOICES, lengths=lengths, logits=False)
    )
    own = read(model, jnp.asarray(batch["tokens"]), jnp.asarray(lengths)).values
    shares = {}
    for name in CHOICES:
        given, mine = np.asarray(getattr(batch["choices"], name))[:, :-1], np.asarray(own[name])[:, :-1]
        differs = (np.sort(given, -1) != np.sort(mine, -1)).any(-1)[batch["mask"]].reshape(batch["mask"].sum(), -1)
        shares[name], shares[f"tokens, {name}"] = float(differs.mean()), float(differs.any(-1).mean())
    return shares


def bytes_of(episodes: list[Episode]) -> dict[str, float]:
    """Return the bytes of each record of a token: ids in int16, as the engine gives them; the support in bits."""
    support = np.concatenate([episode.support[episode.is_drawn] for episode in episodes])
    count = float(np.unpackbits(support.view(np.uint8), axis=1).sum(1).mean())
    first = episodes[0].choices
    return {
        "experts": 2.0 * first.expert_ids[0, 0].size,
        "blocks": 2.0 * first.blocks[0, 0].size,
        "support": 4.0 * support.shape[1],
        f"support as ids, {count:.1f} tokens": 2.0 * count,
    }


def costs(engine, invariant_engine, model, batch, draw, of_support, repeats: int):
    """Yield the times of drawing and reading, each the best of some turns, and as multiples of those of nothing."""
    records = {"nothing": (), "experts": ("expert_ids",), "blocks": ("blocks",), "support": of_support,
               "all three": (*CHOICES, *of_support)}  # fmt: skip
    drawing = {name: partial(draw, engine, record) for name, record in records.items()}
    reading = {name: partial(read_batch, model, batch, WAYS[name]) for name in records}
    drawing["invariant"] = partial(draw, invariant_engine, ())
    reading["invariant"] = lambda: read_batch(model.with_invariance(), batch, ())
    for kind, calls in (("drawing", drawing), ("reading", reading)):
        # By turns, the first of which compiles.
        turns = [[seconds(call) for call in calls.values()] for _ in range(repeats + 1)][1:]
        best = dict(zip(calls, np.min(turns, axis=0).tolist(), strict=True))
        for name, taken in best.items():
            yield {"cost": f"{kind}, {name}", "s": taken, "times nothing": taken / best["nothing"]}


def seconds(call) -> float:
    """Return the seconds of a call."""
    began = time.perf_counter()
    call()
    return time.perf_counter() - began
