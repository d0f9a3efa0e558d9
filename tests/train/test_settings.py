"""What a run of training is set to: defaults and limits, learning rates, the optimiser, adapters' first numbers."""

import itertools
import json
from argparse import Namespace
from dataclasses import asdict
from inspect import signature
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest
from support import tiny
from support.options import wrong_defaults

from m3jax.decoding import Sampling
from m3jax.model.build import abstract
from m3jax.train import convert, dense, eagle3, lora, losses, packing, policy, programs, rewards, rollouts, run, sft
from m3jax.train import step as steps
from m3jax.train.__main__ import parser
from m3jax.train.convert_command import convert_parser, run_convert
from m3jax.train.grpo import RunSettings
from m3jax.train.lora import LoraSettings, init_adapters
from m3jax.train.metric_lines import MetricLines
from m3jax.train.rollouts import RolloutLoss
from m3jax.train.run import _made_ahead
from m3jax.train.sft import SFTLoss, SFTSettings
from m3jax.train.sft_command import merge_parser, sft_parser
from m3jax.train.step import make_optimizer
from m3jax.train.units import stream_unit

REQUIRED = {
    "m3jax.train": ["task", "out", "steps"], "sft": ["out", "steps", "data"],
    "convert": ["model", "out", "steps", "data"],
    "merge": ["adapter", "out"],
}  # fmt: skip


def test_options_have_the_defaults_that_help_says():
    """What there is no default for has to be given; a command says in a sentence what it does."""
    parsers = (parser(), sft_parser("sft"), convert_parser("convert"), merge_parser("merge"))
    for (name, required), each in zip(REQUIRED.items(), parsers, strict=True):
        assert wrong_defaults(each) == [], each.prog
        assert each.prog.split()[-1] == name and each.description.endswith(".") and " " in each.description
        found = [action.dest for action in each._actions if action.required and action.option_strings]
        assert sorted(found) == sorted(required), name


def test_options_that_share_choices_name_them_in_one_order():
    """`--help` lists what can be chosen: tokens before sequences, whatever the option."""
    parsers = (parser(), sft_parser("sft"), convert_parser("convert"), merge_parser("merge"))
    choices = [tuple(action.choices) for each in parsers for action in each._actions if action.choices]
    assert {("token", "sequence"), ("token", "sequence", "constant"), ("trainer", "engine")} <= {*choices}
    for one, other in itertools.combinations(choices, 2):
        shared = {*one} & {*other}
        assert [x for x in one if x in shared] == [x for x in other if x in shared]


@pytest.mark.parametrize(
    "use",
    [
        lambda model: SFTLoss()(model, {}),
        lambda model: RolloutLoss()(model, {}),
        lambda model: steps.init_state(model, make_optimizer(1e-3)),
        lambda model: lora.merge_folder(model, "nowhere"),
    ],
    ids=["sft", "rollouts", "state", "merge"],
)
def test_weights_in_mxfp8_are_refused_before_anything_is_read(use, unchecked):
    with pytest.raises(ValueError, match="linear layers are in MXFP8, which is frozen: train "):
        use(SimpleNamespace(is_mxfp8=True))


@pytest.mark.parametrize(("batch", "budget"), [(1, 1 << 30), (1, 1 << 11), (3, 12345), (3, 1)])
def test_as_many_queries_are_looked_at_together_as_the_budget_has_room_for(batch, budget, monkeypatch, unchecked):
    """A score of each head and key, twice; the number is a power of two, and all queries at most."""
    queries, heads, keys, chunks = 16, 4, 32, []
    monkeypatch.setattr(convert, "_SCORE_BUDGET", budget)
    note = lambda fn, chunk, axis, *arrays: chunks.append((chunk, axis)) or jnp.zeros((*arrays[0].shape[:2], 2))
    monkeypatch.setattr(convert, "map_chunks", note)
    positions = jnp.broadcast_to(jnp.arange(queries, dtype=jnp.int32), (batch, queries))
    values = dict(
        q=jnp.zeros((batch, queries, heads, 8)), k=jnp.zeros((batch, keys, 2, 8)),
        blocks=jnp.zeros((batch, 2, queries, 3), jnp.int32),
    )  # fmt: skip
    convert._caught(values, SimpleNamespace(positions=positions), block_size=4, num_kept=3)
    fitting = [size for size in (1, 2, 4, 8, 16) if size * batch * heads * keys * 2 <= budget]
    assert chunks == [(max(fitting, default=1), 1)]


# What docs and docstrings say of functions whose settings are not a class.
DEFAULTS = {
    convert.WarmUpLoss: dict(index_stride=8, compute_dtype="bfloat16"),
    convert.ConvertSettings: dict(index_stride=8),
    convert.convert: dict(save_every=100, say=print),
    convert.measure: dict(compute_dtype="float32"),
    dense.dense_config: dict(block_size=128, topk_blocks=16, dense_layers=0),
    dense.read_dense: dict(seed=0, mesh=None),
    eagle3.continuations: dict(progress=True),
    eagle3.refresh_draft: dict(steps=100, batch=16, unroll=3, learning_rate=1e-3, seed=0, progress=True),
    losses.MSALoss: dict(kl_weight=1.0, kl_stride=8, compute_dtype="bfloat16", remat=True, fused=False),
    losses.token_logprobs: dict(remat=False),
    policy.group_advantages: dict(baseline="grpo", epsilon=1e-6),
    rewards.TaskFile: dict(seconds=60.0),
    rollouts.Episode: dict(version=0),
    rollouts.roll_out: dict(seed=0, turns=1),
    rollouts.read_logprobs: dict(compute_dtype="float32"),
    run.run_stages: dict(keys=("tokens", "weights"), balance_rate=1e-3, workers=0, check_every=200),
    sft.fine_tune: dict(save_every=100, steps_before=0, say=print),
    steps.make_optimizer: dict(
        weight_decay=0.1, frozen_index=False, frozen_text=False, frozen_vision=False, clip_norm=1.0
    ),
    steps.train_step: dict(balance_rate=1e-3),
}  # fmt: skip


def test_so_much_is_held_and_waited_for():
    """Numbers that are held at once, whatever the sizes; seconds; and limits that docs/training.md names."""
    assert (losses._SCORE_BUDGET, convert._SCORE_BUDGET, packing._SCORE_BUDGET) == (2**26, 2**26, 2**24)
    assert (packing._SCORES_AT_ONCE, sft._LOGITS_BUDGET) == (2**20, 2**24)
    assert (packing._PARTS, packing._LEAST_PART, packing._OPEN_ROWS) == (4, 256, 64)
    assert (run.KEEP_SECONDS, rewards._FIRST_SECONDS) == (60.0, 60.0)
    assert (policy.LOG_RATIO_LIMIT, policy.PROB_ERROR_ALARM) == (20.0, 1.05)
    assert (eagle3.STEP_WEIGHT, dense._LEAST_EPS) == (0.8, 1e-7)


@pytest.mark.parametrize("of", DEFAULTS, ids=lambda of: of.__name__)
def test_functions_have_these_defaults(of):
    parameters = signature(of).parameters
    assert {name: parameters[name].default for name in DEFAULTS[of]} == DEFAULTS[of]


def test_settings_have_the_defaults_of_their_commands():
    """Fields and options of one name; of those without an option, what docs/training.md says."""
    of_sft = asdict(SFTSettings(steps=9, length=8))
    assert of_sft == dict(
        steps=9, length=8, rows=1, accumulate=1, learning_rate=1e-5, schedule="cosine", warmup_steps=0, end_rate=0.0,
        weight_decay=0.0, clip_norm=1.0, index_loss=0.0, compute_dtype="bfloat16", remat=True, seed=0,
    )  # fmt: skip
    of_grpo = asdict(RunSettings(steps=9))
    assert {name: of_grpo[name] for name in of_grpo if name not in ("loss", "sampling")} == dict(
        steps=9, prompts=8, answers=8, max_new_tokens=128, epochs=1, learning_rate=1e-5, warmup_steps=0,
        weight_decay=0.0, baseline="grpo", replay=(), old="trainer", turns=4, tool_tokens=64, invariant=False,
        compute_dtype="float32", frozen_index=True, remat=False, rows=None, save_every=10, seed=0,
    )  # fmt: skip
    assert asdict(SFTLoss()) == dict(index_loss=0.0, index_stride=8, compute_dtype="bfloat16", remat=True)
    of_policy = asdict(RolloutLoss())
    assert of_policy.pop("policy") == dict(
        clip_low=0.2, clip_high=0.28, dual_clip=10.0, level="token", mean="token", tokens=0, kl_weight=0.0,
        correction=dict(weigh=None, limit=2.0, reject=None, divergence="k3", reject_above=1.0),
    )  # fmt: skip
    assert of_policy == dict(compute_dtype="float32", remat=False, temperature=None)
    assert asdict(LoraSettings()) == dict(rank=16, alpha=32.0, targets=lora.TARGETS)
    assert (LoraSettings().scale, LoraSettings(rank=8, alpha=4.0).scale) == (2.0, 0.5)


def test_a_run_reads_the_distribution_that_it_draws_from():
    """The model's own where no knob changes it; else after the knobs, by a record of the drawn log-probabilities."""
    settings = lambda replay=(), **knobs: RunSettings(steps=9, sampling=Sampling(**knobs), replay=replay)
    for plain in (settings(), settings(seed=7), settings(("blocks",))):
        assert (plain.temperature, plain.record) == (None, plain.replay)
    for changed, temperature in (
        (settings(temperature=0.5), 0.5), (settings(top_k=3), 1.0), (settings(top_p=0.5), 1.0),
        (settings(min_p=0.25), 1.0), (settings(("support", "blocks")), 1.0),
    ):  # fmt: skip
        assert changed.temperature == temperature and changed.record == (*changed.replay, "drawn_logprobs")
    decisive = settings(temperature=0.5).decisive
    assert decisive["sampling.temperature"] == 0.5 and decisive["loss.correction.limit"] == 2.0
    assert not {"steps", "save_every", "sampling", "loss"} & decisive.keys() and decisive["replay"] == []
    for warmup, rates in ((0, [1e-5, 1e-5]), (4, [0.0, 2.5e-6])):
        rate = RunSettings(steps=9, warmup_steps=warmup).schedule
        np.testing.assert_allclose([rate(0), rate(1)], rates, rtol=1e-6)
        np.testing.assert_allclose([rate(4), rate(9)], [1e-5, 1e-5], rtol=1e-6)


LEAST = {
    SFTSettings: (
        dict(steps=9, length=8),
        dict(steps=1, length=1, rows=1, accumulate=1, warmup_steps=0, end_rate=0.0, weight_decay=0.0,
             index_loss=0.0),
    ),
    RunSettings: (
        dict(steps=9),
        dict(steps=1, prompts=1, answers=2, max_new_tokens=1, epochs=1, save_every=1, warmup_steps=0, turns=1,
             tool_tokens=1),
    ),
    LoraSettings: ({}, dict(rank=1)),
}  # fmt: skip


@pytest.mark.parametrize("kind", LEAST)
def test_the_least_of_each_setting_is_taken_and_nothing_below(kind):
    given, least = LEAST[kind]
    for name, smallest in least.items():
        assert getattr(kind(**given | {name: smallest}), name) == smallest
        with pytest.raises(ValueError, match=rf"{name} = {smallest - 1}: must be at least {smallest:g}"):
            kind(**given | {name: smallest - 1})


def test_settings_that_no_run_has(unchecked):
    for make, reason in (
        (lambda: SFTSettings(steps=9, length=8, clip_norm=0.0), "clip_norm = 0.0: must be above 0"),
        (lambda: SFTSettings(steps=9, length=8, warmup_steps=9), "warmup_steps = 9: must be fewer than the run's 9"),
        (lambda: SFTSettings(steps=9, length=8, schedule="none"), "schedule = 'none': choose of cosine, linear"),
        (lambda: LoraSettings(alpha=0.0), "alpha = 0.0: must be above 0"),
        (lambda: LoraSettings(targets=()), "targets = none: choose of attention, experts"),
        (lambda: LoraSettings(targets=("attention", "head")), "targets = attention, head: choose of"),
        (lambda: RunSettings(steps=1, old="nobody"), "old = 'nobody': choose of trainer, engine"),
    ):
        with pytest.raises(ValueError, match=reason):
            make()
    assert SFTSettings(steps=9, length=8, warmup_steps=8, clip_norm=1e-9).warmup_steps == 8


@pytest.mark.parametrize("warmup", [0, 4])
def test_the_learning_rate_by_step(warmup):
    """From 0 to its peak in a line, then by its schedule to the end rate, which the step behind the last would have."""
    peak, end, steps = 0.8, 0.2, 12
    after = steps - warmup
    done = [max(0.0, (step - warmup) / after) for step in range(steps + 1)]
    behind = dict(
        cosine=[end + (peak - end) * (1 + np.cos(np.pi * x)) / 2 for x in done],
        linear=[peak + (end - peak) * x for x in done],
        constant=[peak] * (steps + 1),
    )
    for schedule, expected in behind.items():
        settings = SFTSettings(
            steps=steps, length=8, learning_rate=peak, end_rate=end, warmup_steps=warmup, schedule=schedule
        )
        expected = [peak * step / warmup if step < warmup else expected[step] for step in range(steps + 1)]
        np.testing.assert_allclose([settings.rate(step) for step in range(steps + 1)], expected, rtol=1e-5)
    assert SFTSettings(steps=3, length=8, learning_rate=0.0).rate(1) == 0.0


def adamw(params, grads_of_step, rates, weight_decay, clip):
    """AdamW by its definition, in float64: 0.9, 0.95, 1e-10; gradients of one call are clipped together."""
    params = {name: np.float64(x) for name, x in params.items()}
    moments = {name: [0.0, 0.0] for name in params}
    for step, grads in enumerate(grads_of_step, 1):
        norm = np.sqrt(sum((np.float64(g) ** 2).sum() for g in grads.values()))
        for name, grad in grads.items():
            grad = np.float64(grad) * min(1.0, clip / norm)
            first, second = moments[name]
            moments[name] = first, second = 0.9 * first + 0.1 * grad, 0.95 * second + 0.05 * grad**2
            update = first / (1 - 0.9**step) / (np.sqrt(second / (1 - 0.95**step)) + 1e-10)
            decay = 0 if "norm" in name or name.endswith("bias") else weight_decay
            params[name] = params[name] - rates[step - 1] * (update + decay * params[name])
    return params


@pytest.mark.parametrize("frozen", ["nothing", "index", "text", "vision"])
def test_the_optimiser_is_adamw_by_its_definition(frozen):
    """The tower has its rate and its norm of gradients; routing biases, and what is frozen, keep every bit."""
    draw = np.random.default_rng(0)
    names = ("w", "norm", "q_bias", "mlp.index_q", "mlp.e_score_correction_bias", "vision.w", "vision.norm")
    nested = lambda flat: {name: jnp.asarray(x) for name, x in flat.items()}
    params = {name: draw.normal(size=3).astype(np.float32) for name in names}
    # The first is not clipped, the others are: AdamW does not see a factor that all gradients have.
    sizes = (0.05, 1.0, 3.0)
    grads = [{name: (size * draw.normal(size=3)).astype(np.float32) for name in names} for size in sizes]
    text_rates, vision_rates = [0.1, 0.2, 0.3], [0.3, 0.2, 0.1]
    by_step = lambda rates: lambda count: jnp.asarray(rates)[count]
    optimizer = make_optimizer(
        by_step(text_rates), frozen_index=frozen == "index", frozen_text=frozen == "text",
        frozen_vision=frozen == "vision", vision_rate=by_step(vision_rates),
    )  # fmt: skip
    found, state = nested(params), optimizer.init(nested(params))
    for grad in grads:
        updates, state = optimizer.update(nested(grad), state, found)
        found = {name: found[name] + updates[name] for name in names}
    still = {
        "nothing": [], "index": ["mlp.index_q"], "text": [name for name in names if "vision" not in name],
        "vision": ["vision.w", "vision.norm"],
    }[frozen]  # fmt: skip
    still = {*still, "mlp.e_score_correction_bias"}
    for name in still:
        np.testing.assert_array_equal(found[name], params[name], err_msg=name)
    for is_vision, rates in ((False, text_rates), (True, vision_rates)):
        moved = [name for name in names if name not in still and name.startswith("vision.") == is_vision]
        if moved:
            of_moved = [{name: flat[name] for name in moved} for flat in (params, *grads)]
            expected = adamw(of_moved[0], of_moved[1:], rates, 0.1, 1.0)
            for name in moved:
                np.testing.assert_allclose(found[name], expected[name], rtol=2e-5, atol=1e-6, err_msg=name)


def test_an_optimiser_of_one_rate_takes_it_for_the_tower_too():
    params = {"w": jnp.ones(2), "vision.w": jnp.ones(2)}
    optimizer = make_optimizer(lambda count: 0.5, weight_decay=0.0, clip_norm=1e9)
    updates, _ = optimizer.update(params, optimizer.init(params), params)
    np.testing.assert_allclose(updates["w"], [-0.5, -0.5], rtol=1e-6)
    np.testing.assert_array_equal(updates["w"], updates["vision.w"])
    least = {name: jnp.full(2, 1e-10) for name in params}  # as large as what Adam adds to the root
    updates, _ = optimizer.update(least, optimizer.init(params), params)
    np.testing.assert_allclose(updates["w"], [-0.25, -0.25], rtol=1e-4)


def test_adapters_begin_uniform_within_the_root_of_their_inputs(unchecked, monkeypatch):
    """A fills (-In**-0.5, In**-0.5), B is 0; another seed draws other numbers; shapes are [lead In r], [lead r Out]."""
    monkeypatch.setattr(lora, "_shapes", lambda model, targets: {"x": ((2,), 64, 3), "y": ((), 16, 5)})
    model, settings = Namespace(mesh=None, config=Namespace(rms_norm_eps=1e-6)), LoraSettings(rank=50)
    found = init_adapters(model, settings, seed=1)
    for name, inputs, shapes in (("x", 64, ((2, 64, 50), (2, 50, 3))), ("y", 16, ((16, 50), (50, 5)))):
        a, b = (np.asarray(found[name][part]) for part in "ab")
        assert ((a.shape, b.shape), a.dtype, b.dtype) == (shapes, np.float32, np.float32) and not b.any()
        bound = inputs**-0.5
        assert -bound <= a.min() < -0.95 * bound and 0.95 * bound < a.max() <= bound and abs(a.mean()) < 0.1 * bound
    assert not np.array_equal(found["x"]["a"], init_adapters(model, settings, seed=2)["x"]["a"])
    assert np.array_equal(found["x"]["a"], init_adapters(model, settings, seed=1)["x"]["a"])
    draw = np.random.default_rng(1)  # in the order of the matrices, so that a seed's run can be made again
    for name, shape in (("x", (2, 64, 50)), ("y", (16, 50))):
        bound = shape[-2] ** -0.5
        np.testing.assert_array_equal(found[name]["a"], draw.uniform(-bound, bound, shape).astype(np.float32))
    monkeypatch.setattr(lora, "_shapes", lambda model, targets: {})
    with pytest.raises(ValueError, match="the model has none of attention, experts"):
        init_adapters(model, settings)


def test_matrices_get_adapters_in_this_order(unchecked):
    """By stack: q, k, v and o, with all heads in one axis, then the experts', where gate and up are one matrix."""
    config = tiny.config("dM")
    model = abstract(config)
    attention = lambda i: {
        f"stacks.{i}.self_attn.q_proj": ((1,), 48, 128), f"stacks.{i}.self_attn.k_proj": ((1,), 48, 64),
        f"stacks.{i}.self_attn.v_proj": ((1,), 48, 64), f"stacks.{i}.self_attn.o_proj": ((1,), 128, 48),
    }  # fmt: skip
    experts = {
        "stacks.1.mlp.experts.gate_up_proj": ((1, 8), 48, 80), "stacks.1.mlp.experts.down_proj": ((1, 8), 40, 48)
    }  # fmt: skip
    expected = attention(0) | attention(1) | experts
    for targets in (("attention", "experts"), ("experts", "attention")):
        assert [*lora._shapes(model, targets).items()] == [*expected.items()]
    assert lora._shapes(model, ("experts",)) == experts


@pytest.mark.parametrize(("kind", "chosen"), [("cpu", 0), ("tpu", 0), ("gpu", 1), ("gpu, invariant", 2)])
def test_a_program_is_compiled_as_its_platform_and_mode_want_it(kind, chosen, monkeypatch):
    """XLA's defaults elsewhere; on a GPU nothing is tuned, or, of an invariant model in any argument, as the engine."""
    made = []

    def jit(fn, compiler_options, **arguments):
        number = len(made)
        made.append((fn, arguments, compiler_options))
        return lambda *given, **named: (number, given, named)

    class Model:
        compute = Namespace(invariant=kind == "gpu, invariant")

    monkeypatch.setattr(programs.jax, "jit", jit)
    monkeypatch.setattr(programs, "M3", Model)
    monkeypatch.setattr(programs, "platform", lambda: kind[:3])

    def fn(model, x):
        """A program."""

    compiled = programs.jit_for_training(fn, static_argnames="x")
    untuned = programs.UNTUNED | {"xla_gpu_enable_dynamic_slice_fusion": False}
    assert made == [(fn, dict(static_argnames="x"), options) for options in (None, untuned, programs.GPU_OPTIONS)]
    assert compiled.__wrapped__ is fn and compiled.__doc__ == "A program."
    for given, named in (((Model(), 3), {}), (({"state": [1, Model()]},), dict(x=3)), ((), dict(x=3, model=Model()))):
        assert compiled(*given, **named) == (chosen, given, named)
    assert compiled(1, x=2) == (min(chosen, 1), (1,), dict(x=2))  # no model


def test_a_folder_has_the_settings_of_its_run(tmp_path):
    """As JSON that a reader can read; another run is refused with what differs."""
    folder, settings = tmp_path / "runs" / "a", {"steps": 9, "name": "x", "rates": [0.5]}
    for _ in range(2):
        sft.check_same_run(folder, settings)
        assert (folder / "settings.json").read_text() == json.dumps(settings, indent=2) + "\n"
    for changes, said in (({"steps": 8}, "steps = 9"), ({"name": "y", "new": 1}, "name = 'x', new = None")):
        with pytest.raises(ValueError, match=f"a has a run with {said}: give the same, or another --out"):
            sft.check_same_run(folder, settings | changes)


def test_a_wider_index_branch_begins_at_random(monkeypatch, unchecked):
    """Normal numbers of the width's root, layer by layer, queries before keys; a dense stack has none."""
    monkeypatch.setattr(dense, "put", lambda x, where: (x, where))
    stacks = [Namespace(is_sparse=False), Namespace(is_sparse=True), Namespace(is_sparse=True)]
    config = Namespace(stacks=stacks, index_head_dim=20, head_dim=16, hidden_size=9)
    names = [f"stacks.{i}.self_attn.index_{x}_proj" for i in (1, 2) for x in "qk"]
    weights = {name: np.zeros((2, 9, 20 + i)) for i, name in enumerate(names)}
    found = dict(weights)
    dense._begin_index(found, config, {name: f"place of {name}" for name in names}, seed=7)
    draw = np.random.default_rng(7)
    for name in names:
        numbers, where = found[name]
        np.testing.assert_array_equal(numbers, draw.normal(0, 1 / 3, weights[name].shape).astype(np.float32))
        assert where == f"place of {name}" and numbers.dtype == np.float32


def test_an_index_branch_of_the_heads_width_begins_as_their_means(monkeypatch, unchecked):
    """Of the queries of each group, and of all keys; the norms are copies, each placed where it has to lie."""
    placed = []
    monkeypatch.setattr(dense.jax, "jit", lambda fn, out_shardings: placed.append(out_shardings) or fn)
    config = Namespace(stacks=[Namespace(is_sparse=True)], index_head_dim=4, head_dim=4, num_key_value_heads=2)
    part, draw = lambda name: f"stacks.0.self_attn.{name}", np.random.default_rng(0)
    sizes = dict(q_proj=(3, 5, 6, 4), k_proj=(3, 5, 2, 4), q_norm=(3, 4), k_norm=(3, 4))
    weights = {part(name): draw.normal(size=size).astype(np.float32) for name, size in sizes.items()}
    found = dict(weights)
    dense._begin_index(found, config, {part(f"index_{x}_proj"): x for x in "qk"}, seed=7)
    q, k = weights[part("q_proj")], weights[part("k_proj")]
    expected = dict(
        index_q_proj=np.stack([q[:, :, :3].mean(2), q[:, :, 3:].mean(2)], axis=2), index_k_proj=k.mean(2),
        index_q_norm=weights[part("q_norm")], index_k_norm=weights[part("k_norm")],
    )  # fmt: skip
    assert placed == [("q", "k")] and found.keys() == weights.keys() | {part(name) for name in expected}
    for name, x in expected.items():
        np.testing.assert_allclose(found[part(name)], x, rtol=1e-6, err_msg=name)


def test_a_llama_may_leave_out_the_sizes_of_its_heads():
    base = dict(num_attention_heads=4, hidden_size=48)
    assert dense._with_defaults_of_llama(base) == base | dict(head_dim=12, num_key_value_heads=4)
    own = base | dict(head_dim=16, num_key_value_heads=2)
    assert dense._with_defaults_of_llama(own) == own
    for wrong in ({}, {"hidden_size": 48}, {"hidden_size": 0}):  # what lacks is named elsewhere
        assert dense._with_defaults_of_llama(wrong) == wrong


def test_an_eps_above_1_says_that_a_stream_is_in_other_units(unchecked):
    units = [stream_unit(Namespace(rms_norm_eps=eps)) for eps in (1e-6, 1.0, 1.0001, 2.0, 1e7)]
    assert units == [1.0, 1.0, 2**20, 2**20, 2**20]


def test_batches_are_made_in_order_and_one_ahead(monkeypatch):
    made = []

    class Numbers:
        def __getitem__(self, step):
            made.append(step)
            return {"step": step}

    submitted = []

    class Pool(run.ThreadPoolExecutor):
        def submit(self, fn, step):
            submitted.append(step)
            return super().submit(fn, step)

        def shutdown(self, **how):
            submitted.append(how)
            super().shutdown(**how)

    monkeypatch.setattr(run, "ThreadPoolExecutor", Pool)
    batches = _made_ahead(Numbers(), range(3, 7), workers=0)
    assert next(batches) == {"step": 3}
    assert submitted == [3, 4]
    assert [batch["step"] for batch in batches] == [4, 5, 6] and sorted(made) == [3, 4, 5, 6]
    assert submitted == [3, 4, 5, 6, dict(cancel_futures=True)]
    assert list(_made_ahead(Numbers(), range(5, 5), workers=0)) == []


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ([], dict(length=8 * 3 * 16, warm_up=2, sparse=8, index_loss=1.0, seeds=(0, 1))),
        (["--length", "64", "--warm-up-steps", "9"],
         dict(length=64, warm_up=9, sparse=1, index_loss=1.0, seeds=(0, 1))),
        (["--steps", "2"], dict(length=8 * 3 * 16, warm_up=1, sparse=1, index_loss=1.0, seeds=(0, 1))),
        (["--topk-blocks", "99", "--seed", "5", "--freeze-index"],
         dict(length=992, warm_up=2, sparse=8, index_loss=0.0, seeds=(5, 6))),
    ],
)  # fmt: skip
def test_phases_of_a_conversion(tmp_path, monkeypatch, given, expected):
    """A quarter of the steps warms up; a row is eight selections long, in whole blocks of the context."""

    class Read(Exception):
        pass

    def stop(*, warm_up, sparse):
        found = dict(length=warm_up.length, warm_up=warm_up.steps, sparse=sparse.steps)
        found |= dict(index_loss=sparse.index_loss, seeds=(warm_up.seed, sparse.seed))
        assert (warm_up.length, warm_up.learning_rate, sparse.learning_rate) == (sparse.length, 1e-3, 1e-5)
        raise Read(found)

    config = Namespace(max_position_embeddings=1000)
    monkeypatch.setattr("m3jax.train.dense.read_dense", lambda *_, **__: Namespace(config=config))
    monkeypatch.setattr("m3jax.train.convert.ConvertSettings", stop)
    (tmp_path / "data").write_text("")
    words = ["--model", "m", "--data", str(tmp_path / "data"), "--out", str(tmp_path), "--steps", "10"]
    words += ["--block-size", "16", "--topk-blocks", "3", *given]
    with pytest.raises(Read) as caught:
        run_convert(convert_parser("convert").parse_args(words))
    assert caught.value.args == (expected,)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--steps", "1"], "--steps 1: must be at least 2"),
        (["--steps", "4", "--warm-up-steps", "4"], "--warm-up-steps 4: must be from 1 to 3"),
        (["--steps", "4", "--warm-up-steps", "0"], "--warm-up-steps 0: must be from 1 to 3"),
        (["--steps", "4", "--save-every", "0"], "--save-every 0: must be at least 1"),
        (["--steps", "4", "--no-remat", "--keep-products"], "--no-remat keeps all activations"),
        (["--steps", "4", "--length", "1001"], "--length 1001: the model's context is 1000 tokens"),
    ],
)
def test_conversions_that_are_refused(tmp_path, monkeypatch, words, reason):
    config = Namespace(max_position_embeddings=1000)
    monkeypatch.setattr("m3jax.train.dense.read_dense", lambda *_, **__: Namespace(config=config))
    (tmp_path / "data").write_text("")
    shared = ["--model", "m", "--data", str(tmp_path / "data"), "--out", str(tmp_path)]
    with pytest.raises(ValueError, match=reason):
        run_convert(convert_parser("convert").parse_args([*shared, *words]))


def test_lines_of_metrics_of_a_run_that_goes_on(tmp_path):
    """In a folder that is made; lines behind the step that is gone on from, and half a line, are written anew."""
    path = tmp_path / "a" / "b" / "metrics.jsonl"
    lines = MetricLines(path, keep=0)
    for step in (1, 2, 3):
        lines.write({"step": step, "loss": 0.5 * step})
    with path.open("a") as file:
        file.write('{"step": 1, "lo')
    MetricLines(path, keep=2).write({"step": 3, "loss": 9.0})
    assert path.read_text() == '{"step": 1, "loss": 0.5}\n{"step": 2, "loss": 1.0}\n{"step": 3, "loss": 9.0}\n'
    MetricLines(None, keep=0).write({"step": 1})  # nothing
