"""The training step, its optimiser and routing balance, a run that is interrupted, and scripts/train_tiny.py."""

import importlib.util
import json
import re
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import SingleDeviceSharding
from support import tiny
from tiny.arguments import mismatch
from tiny.losses import TinyLoss

import m3jax
from m3jax.decoding.device.compiler_options import OPTIONS
from m3jax.model import M3
from m3jax.parallel import make_mesh
from m3jax.train import lora, programs, run
from m3jax.train import step as training
from m3jax.train.losses import MSALoss
from m3jax.train.rollouts import RolloutLoss
from m3jax.train.sft import SFTLoss
from m3jax.train.step import TrainState, balance, cast_weights, init_state, make_optimizer

QUICK = {"xla_backend_optimization_level": 0}
CONFIG = tiny.config("M")  # a layer that selects, with experts: a step of two kinds of layers compiles twice as long
LOSS = TinyLoss(kl_stride=4, recall_weight=1.0, remat=False)
BALANCE_RATE = 1e-2
OPTIMIZER = make_optimizer(lambda step: 3e-3)
STEPS = 8


def by_name(tree) -> dict[str, np.ndarray]:
    leaves, _ = jax.tree_util.tree_flatten_with_path(jax.device_get(tree))
    return {jax.tree_util.keystr(path, simple=True, separator="."): x for path, x in leaves}


@cache
def quick_step():
    return jax.jit(
        training.train_step.__wrapped__,
        static_argnames=("optimizer", "loss_fn", "balance_rate"),
        donate_argnames="state",
        compiler_options=QUICK,
    )


def batch(config=CONFIG) -> dict[str, jax.Array]:
    recall = np.random.default_rng(3).random((2, 64)) < 0.2
    arrays = {"tokens": tiny.tokens(config, 2, 65), "weights": np.ones((2, 64), np.float32), "recall": recall}
    return jax.tree.map(jnp.asarray, arrays)


def start(optimizer=OPTIMIZER, schedule: str = "mask") -> TrainState:
    """From weights that are committed to a device, as `m3jax.model.init` and `m3jax.load` leave them."""
    model = jax.device_put(tiny.model(CONFIG), SingleDeviceSharding(jax.devices()[0]))
    return init_state(tiny.under(model, schedule), optimizer)


def steps(state: TrainState, count: int, optimizer=OPTIMIZER, loss_fn=LOSS) -> tuple[TrainState, list[dict]]:
    seen = []
    for _ in range(count):
        state, metrics = quick_step()(state, batch(), optimizer, loss_fn, BALANCE_RATE)
        seen.append(jax.device_get(metrics))
    return state, seen


@cache
def trained() -> tuple[TrainState, list[dict]]:
    return steps(start(), STEPS)


# The step


def test_loss_falls_on_a_repeated_batch():
    state, seen = trained()
    assert int(state.step) == STEPS
    assert seen[-1]["lm"] < 0.9 * seen[0]["lm"] and seen[-1]["recall"] < seen[0]["recall"]
    for metrics in seen:
        assert all(np.isfinite(x) for x in metrics.values())
        assert metrics["kl"] > 0 and 1 <= metrics["imbalance"] <= CONFIG.num_local_experts


def test_two_runs_are_the_same_to_the_bit():
    """Two runs from one state give the same weights and metrics, bit for bit (T34)."""
    again, seen = steps(start(), STEPS)
    assert seen == trained()[1]
    expected = by_name(trained()[0])
    for name, x in by_name(again).items():
        np.testing.assert_array_equal(x, expected[name], err_msg=name)


def test_steps_of_one_shape_compile_once():
    """A state is made as a step returns it: committed to its device, with the same types."""
    trained()
    assert quick_step()._cache_size() == 1


def test_a_state_leaves_the_given_model_alone():
    """Steps donate the state."""
    model = tiny.model(CONFIG)
    state = init_state(model, OPTIMIZER)
    given = {x.unsafe_buffer_pointer() for x in jax.tree.leaves(model)}
    owned = [x.unsafe_buffer_pointer() for x in jax.tree.leaves(state)]
    assert not given & set(owned) and len(set(owned)) == len(owned)
    assert all(x.committed and not x.weak_type for x in jax.tree.leaves(state))


def test_master_weights_are_float32():
    state = init_state(tiny.model(CONFIG, dtype="bfloat16"), OPTIMIZER)
    assert {x.dtype for x in jax.tree.leaves(state) if x.ndim} == {jnp.dtype("float32")}


@pytest.mark.parametrize(
    "use",
    [
        lambda model: SFTLoss()(model, {}),
        lambda model: RolloutLoss()(model, {}),
        lambda model: init_state(model, OPTIMIZER),
        lambda model: lora.merge_folder(model, "nowhere"),
    ],
    ids=["sft", "rollouts", "state", "merge"],
)
def test_weights_in_mxfp8_are_refused_before_anything_is_read(use, unchecked):
    with pytest.raises(ValueError, match="linear layers are in MXFP8, which is frozen: train "):
        use(SimpleNamespace(is_mxfp8=True))


def test_a_state_on_a_mesh_keeps_the_parameters_places():
    mesh = make_mesh(tensor=2)
    state = init_state(tiny.model(CONFIG, mesh=mesh), OPTIMIZER)
    places = {name: x.sharding for name, x in by_name_on_device(state.model).items()}
    for moments in jax.tree.leaves(state.opt_state, is_leaf=lambda x: isinstance(x, M3)):
        if isinstance(moments, M3):
            for name, x in by_name_on_device(moments).items():
                assert x.sharding == places[name], name
    assert all(x.sharding.device_set == set(mesh.devices.flat) for x in jax.tree.leaves(state))


def by_name_on_device(tree) -> dict[str, jax.Array]:
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): x for path, x in leaves}


def test_a_model_without_experts_has_no_imbalance():
    config = tiny.config("D")
    step = partial(training.train_step, optimizer=OPTIMIZER, loss_fn=LOSS)
    _, metrics = jax.eval_shape(step, init_state(tiny.model(config), OPTIMIZER), batch(config))
    assert metrics.keys() == {"lm", "kl", "recall", "grad_norm"}


def test_any_loss_can_be_trained():
    """A step knows none: a function of a model and a batch, with metrics of its own, which may measure no loads."""

    def loss_fn(model, batch):
        size = jnp.mean(jnp.square(model.embed_tokens[...]))
        return size * batch["scale"], {"size": size, "step": batch["step"]}

    state, bias = start(), with_bias(tiny.model(CONFIG))
    for number in range(3):
        state, metrics = training.train_step(state, {"scale": jnp.float32(2.0)}, OPTIMIZER, loss_fn)
        assert metrics.keys() == {"size", "step", "grad_norm"} and int(metrics["step"]) == number
    assert metrics["size"] < jnp.mean(jnp.square(tiny.model(CONFIG).embed_tokens[...]))
    np.testing.assert_array_equal(with_bias(state.model), bias)


def test_the_standard_loss_is_the_next_token_and_the_index_branch():
    """`MSALoss` is `TinyLoss` on a batch without recalled values, and reads no more of it than tokens and weights."""
    model, arrays = start().model, batch()
    standard, own = (kind(kl_stride=4, kl_weight=0.5, compute_dtype="float32") for kind in (MSALoss, TinyLoss))
    few = {"tokens": arrays["tokens"], "weights": jnp.asarray(np.random.default_rng(0).random((2, 64), np.float32))}
    arrays |= few
    inputs, targets = few["tokens"][:, :-1], few["tokens"][:, 1:]
    both = jax.jit(lambda model: (standard(model, few), own(model, arrays), model(inputs)), compiler_options=QUICK)
    (loss, parts), (own_loss, own_parts), logits = both(model)
    losses = optax.losses.softmax_cross_entropy_with_integer_labels(logits, targets)
    np.testing.assert_allclose(parts["lm"], np.average(losses, weights=few["weights"]), rtol=1e-5)
    np.testing.assert_allclose(parts["loads"][-1].sum(axis=-1), 1.0, rtol=1e-6)
    assert parts.keys() == {"lm", "kl", "loads"} and own_parts.keys() == {*parts, "recall"}
    np.testing.assert_allclose(loss, own_loss, rtol=1e-6)
    np.testing.assert_allclose(loss, parts["lm"] + 0.5 * parts["kl"], rtol=1e-6)


# The optimiser


@cache
def optimizer_and_update(**options):
    """An optimizer, and its update compiled once for all gradients."""
    optimizer = make_optimizer(lambda step: 1e-2, **options)
    return optimizer, jax.jit(optimizer.update)


def moved(names_with_gradient=(), **options) -> set[str]:
    """Names of parameters that three updates move."""
    model, (optimizer, update) = tiny.model(CONFIG), optimizer_and_update(**options)
    grads = {name: np.full_like(x, any(n in name for n in names_with_gradient)) for name, x in by_name(model).items()}
    grads = jax.tree.unflatten(jax.tree.structure(model), list(grads.values()))
    state, params = optimizer.init(model), model
    for _ in range(3):
        updates, state = update(grads, state, params)
        params = optax.apply_updates(params, updates)
    before, after = by_name(model), by_name(params)
    return {name for name in before if np.any(before[name] != after[name])}


def names(*parts: str) -> set[str]:
    return {name for name in by_name(tiny.model(CONFIG)) if any(part in name for part in parts)}


def test_a_frozen_index_branch_does_not_drift():
    """T32: a gradient of zero is not enough."""
    index = names("index_q_proj", "index_k_proj")
    assert len(index) == 2 and index <= moved()
    assert not names("index_") & moved(frozen_index=True)
    assert not names("index_") & moved(names_with_gradient=("",), frozen_index=True)


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


# Routing balance


def with_bias(model: M3) -> np.ndarray:
    return np.asarray(model.stacks[-1].mlp.e_score_correction_bias[...])


def test_biases_are_centred_a_layer():
    """Each layer has a mean of its own to take out: that of all layers together would leave them apart."""
    model = tiny.model(tiny.config("dMM"))
    bias = model.stacks[-1].mlp.e_score_correction_bias
    bias[...] = bias[...] + jnp.array([[3.0], [-1.0]])
    before = with_bias(model)
    load = jnp.array([[0.5, 0.3, 0.125, 0.075, 0.0, 0.0, 0.0, 0.0], [0.0] * 7 + [1.0]])
    after = with_bias(balance(model, [None, load], rate=0.1))
    np.testing.assert_allclose(after.mean(axis=-1), [0.0, 0.0], atol=1e-6)
    moved = 0.1 * np.array([[-1, -1, 0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1, -1]])
    np.testing.assert_allclose(np.diff(after - before), np.diff(moved), atol=1e-6)


# Runs


class RowsOfTokens:
    """A loss that takes no time to compile, of the embedding's rows alone. `trained`: what the models were under."""

    def __init__(self) -> None:
        self.trained: list[str] = []

    def __call__(self, model, batch):
        self.trained.append("dense" if model.dense else model.compute.schedule)
        rows = model.embed_tokens[batch["tokens"][:, :-1]] - batch["weights"][..., None]
        return jnp.mean(jnp.square(rows)), {}


class Numbered:
    """Batches of tokens that differ from step to step."""

    def __getitem__(self, step: int) -> dict[str, np.ndarray]:
        draw = np.random.default_rng(step)
        return {"tokens": tiny.tokens(CONFIG, 2, 9, seed=step), "weights": draw.random((2, 8), np.float32)}


def test_an_interrupted_run_goes_on_where_it_stopped(monkeypatch, tmp_path, capsys):
    """In the middle of a stage: the weights are those of a run in one go, to the bit."""
    stages = run.Stage("warm-up", 3, 8, 2, False), run.Stage("sparse", 3, 8, 2, True)
    loss, done, looked, step = RowsOfTokens(), [], [], run.train_step
    monkeypatch.setattr(run, "KEEP_SECONDS", 0.0)

    def train(folder: str, stop_before: int = 6) -> M3:
        def noted(state, *args, **settings):
            if int(state.step) == stop_before:
                raise KeyboardInterrupt
            done.append(int(state.step))
            return step(state, *args, **settings)

        monkeypatch.setattr(run, "train_step", noted)
        return run.run_stages(
            tmp_path / folder, stages, start(), OPTIMIZER, loss, batches=lambda stage: Numbered(), schedule="mask",
            check=lambda state: looked.append(int(state.step)), check_every=2,
        ).model  # fmt: skip

    whole = train("whole")
    assert loss.trained == ["dense", "mask"] and done == [0, 1, 2, 3, 4, 5] and looked == [2, 4, 6]
    said = [re.sub(r"[\d.]+ steps/s \{.*\}", "N steps/s", line) for line in capsys.readouterr().out.splitlines()]
    assert said == ["       warm-up      3/3   N steps/s", "        sparse      6/6   N steps/s"]
    done.clear()
    with pytest.raises(KeyboardInterrupt):
        train("parts", stop_before=4)
    for _ in range(2):
        for name, x in by_name(train("parts")).items():
            np.testing.assert_array_equal(x, by_name(whole)[name], err_msg=name)
        assert done == [0, 1, 2, 3, 4, 5], "a finished run trains no further"


# The script


@pytest.fixture
def script(monkeypatch, tmp_path):
    """scripts/train_tiny.py with a smaller model and a shorter run, and a folder of sources."""
    path = Path(__file__).parents[2] / "scripts" / "train_tiny.py"
    spec = importlib.util.spec_from_file_location("train_tiny", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    changes = dict(vocab_size=2048, index_block_size=16, index_topk_blocks=4)
    monkeypatch.setattr(module, "CONFIG", tiny.config("M", **changes))
    monkeypatch.setattr(module, "SHORT", (module.Stage("sparse", 2, 64, 2, True),))
    (tmp_path / "sources").mkdir()
    for i in range(40):
        text = "\n".join(f"def f{i}_{j}(x):\n    return x + {j}" for j in range(60))
        (tmp_path / "sources" / f"part{i}.py").write_text(text)
    return module


def arguments(tmp_path: Path, out: str, *more: str) -> list[str]:
    return ["--out", str(tmp_path / out), "--sources", str(tmp_path / "sources"), "--short", *more]


@pytest.mark.further  # a script; its steps, stages and figures: the tests above, tests/evaluate
def test_the_script_trains_and_measures(script, monkeypatch, tmp_path):
    quick = partial(script.TinyLoss, compute_dtype="float32", remat=False)  # else the compiler takes twice as long
    monkeypatch.setattr(script, "TinyLoss", quick)
    script.main(arguments(tmp_path, "run"))
    refuse = lambda name: pytest.fail(f"{name} in a report")
    report = json.loads((tmp_path / "run" / "report.json").read_text(), parse_constant=refuse)
    assert report.keys() == {
        "parameters", "validation_loss", "validation_loss_with_dense_attention", "recall", "caught",
        "caught_by_random_blocks",
    }  # fmt: skip
    model = m3jax.load(tmp_path / "run" / "model", progress=False)
    assert report["parameters"] == sum(x.size for x in jax.tree.leaves(model))
    assert 0 < report["validation_loss"] < 10
    for shares in (list(report["recall"].values()), *report["caught"], *report["caught_by_random_blocks"]):
        assert shares and all(0 <= x <= 1 for x in shares)


@pytest.mark.further  # a script; a frozen index branch: above, test_convert.py
def test_a_dense_run_keeps_its_index_branch(script, monkeypatch, tmp_path):
    """T32 in the baseline, which trains no index branch, and whose weights decay; nothing about selection is said."""
    loss, asked = RowsOfTokens(), {}
    monkeypatch.setattr(script, "TinyLoss", lambda **settings: asked.update(settings) or loss)
    script.main(arguments(tmp_path, "dense", "--dense"))
    assert loss.trained == ["dense"] and asked["kl_weight"] == 0
    assert "caught" not in json.loads((tmp_path / "dense" / "report.json").read_text())
    begin = by_name(cast_weights(script.init(script.CONFIG, 0), "bfloat16"))
    end = by_name(m3jax.load(tmp_path / "dense" / "model", dtype="bfloat16", progress=False))
    for name in ("stacks.0.self_attn.index_q_proj.value", "stacks.0.self_attn.index_k_proj.value"):
        np.testing.assert_array_equal(end[name], begin[name], err_msg=name)
    for name in ("embed_tokens.value", "stacks.0.self_attn.q_proj.value"):
        assert np.any(end[name] != begin[name]), name


def test_a_folder_belongs_to_one_kind_of_run(script, tmp_path, capsys):
    (tmp_path / "run").mkdir()
    assert mismatch(tmp_path / "run", dict(dense=False, short=True, seed=0)) is None  # and remembers these settings
    with pytest.raises(SystemExit, match="2"):
        script.main(arguments(tmp_path, "run", "--dense", "--seed", "1"))
    assert "dense = False, not True; seed = 0, not 1" in capsys.readouterr().err


def test_a_gpu_compiles_training_as_it_compiles_the_engine(monkeypatch):
    """Else XLA times kernels for each product, for minutes; an invariant trainer has the invariant engine's bits.

    Without cuBLAS's products into slices: those that the backward pass needs would be computed twice.
    """
    asked = []

    def jit(fn, compiler_options=None):
        return lambda *args: asked.append(compiler_options)

    monkeypatch.setattr(programs.jax, "jit", jit)
    run = programs.jit_for_training(lambda state, batch: None)
    state = TrainState(0, tiny.model(CONFIG), ())
    exact = state._replace(model=state.model.with_invariance())
    run(state, {})
    for where in ("gpu", "tpu"):
        monkeypatch.setattr(programs, "platform", lambda where=where: where)
        for arguments in ((state, {}), (exact, {}), (0, {"base": exact.model})):
            run(*arguments)
    of = lambda name, mode: OPTIONS.get((name, "gpu", mode))
    prefill, invariant = of("prefill", "wide"), of("prefill", "invariant")
    assert prefill and invariant and prefill != invariant
    computed_once = dict(prefill) | {"xla_gpu_enable_dynamic_slice_fusion": False}
    assert asked == [None, computed_once, invariant, invariant, None, None, None]
