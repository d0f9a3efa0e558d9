"""The backends of an op: when they are imported, what is refused, and that another folder is another backend."""

import runpy
import subprocess
import sys
import warnings
from pathlib import Path

import jax.numpy as jnp
import pytest
from jax.experimental.pallas import tpu as pltpu
from support.kernels_inputs import view
from support.msa_strategies import GROUPED, prefill

import pallas_kernels
import pallas_kernels.index_topk as op
from pallas_kernels import triton_common
from pallas_kernels.backends import backend_names
from pallas_kernels.dense_causal import dense_causal
from pallas_kernels.dense_decode import dense_decode
from pallas_kernels.index_topk.mosaic_tpu import Config as TpuConfig
from pallas_kernels.index_topk.triton import Config
from pallas_kernels.sparse_prefill import sparse_prefill
from pallas_kernels.sparse_prefill.triton import Config as PrefillConfig

FOLDERS = sorted(
    path.name for path in Path(pallas_kernels.__file__).parent.iterdir() if (path / "__init__.py").exists()
)


@pytest.mark.further
def test_importing_an_op_imports_no_backend():
    """A machine without the parts of a backend does not pay for it, nor fails."""
    code = (
        "import importlib, sys\n"
        f"for name in {FOLDERS}: importlib.import_module(f'pallas_kernels.{{name}}')\n"
        "loaded = [m for m in sys.modules if m.startswith(('pallas_kernels', 'jax.experimental.pallas'))]\n"
        "sys.exit(', '.join(m for m in loaded if m.count('.') > 1 or 'common' in m or 'experimental' in m) or None)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def operands():
    case = prefill(GROUPED, 0)
    q, k = (jnp.asarray(x) for x in case.index())
    return q, view(jnp.stack([k, k]), None, GROUPED.P), jnp.asarray(case.positions), jnp.asarray(case.lengths)


def test_unknown_backends_and_options_of_others_are_refused(unchecked):
    """An option that only another backend understands is refused, and not ignored."""
    with pytest.raises(ValueError, match="backend = 'cuda': index_topk has 'mosaic_tpu', 'triton'"):
        op.index_topk(*operands(), top_k=3, backend="cuda")
    with pytest.raises(ValueError, match=r"a .*mosaic_tpu.Config: backend = 'triton' takes a .*triton.Config"):
        op.index_topk(*operands(), top_k=3, backend="triton", config=TpuConfig())
    with pytest.raises(ValueError, match=r"backend = 'mosaic_tpu' takes a .*mosaic_tpu.Config"):
        op.index_topk(*operands(), top_k=3, backend="mosaic_tpu", config=Config())
    with pytest.raises(ValueError, match="backend = 'triton' takes bool"):
        op.index_topk(*operands(), top_k=3, backend="triton", interpret=pltpu.InterpretParams())
    case = prefill(GROUPED, 0)
    q, k, v = (jnp.asarray(x) for x in case.qkv())
    pages = [view(jnp.stack([x.swapaxes(1, 2)] * 2), None, GROUPED.P) for x in (k, v)]
    at = jnp.asarray(case.positions), jnp.asarray(case.lengths)
    with pytest.raises(ValueError, match="backend = 'mosaic_tpu': dense_decode has 'triton'"):
        dense_decode(q, *pages, *at, kv_heads=GROUPED.K, backend="mosaic_tpu")
    with pytest.raises(ValueError, match="kv_heads = 3: need a divisor"):
        dense_causal(q, *pages, *at, kv_heads=3, backend="triton")
    with pytest.raises(ValueError, match="name the schedule whose tiles these are"):
        blocks = jnp.asarray(case.any_blocks())
        sparse_prefill(q, *pages, blocks, *at, backend="triton", config=PrefillConfig(), interpret=True)


def test_another_folder_is_another_backend(tmp_path, monkeypatch, unchecked):
    """Nothing but the folder itself has to know of it; its limits decide what the op lets through."""
    folder = tmp_path / "third"
    folder.mkdir()
    (folder / "__init__.py").write_text(
        "from pallas_kernels.backends import Limits\n"
        "LIMITS = Limits(max_blocks=10)\n"
        "def run(call, config): return call, config\n"
    )
    monkeypatch.setattr(op, "__path__", [*op.__path__, str(tmp_path)])
    assert backend_names("pallas_kernels.index_topk") == ("mosaic_tpu", "third", "triton")
    q, k, *at = operands()
    call, config = op.index_topk(q, k, *at, top_k=3, backend="third")
    assert call.index_q is q and call.index_k is k and config is None and call.interpret is False
    assert call.counts == (3, 1, 0) and not call.return_keys  # a query's own block is kept, and no keys are returned
    with pytest.raises(ValueError, match="backend = 'third' takes no tile sizes"):
        op.index_topk(q, k, *at, top_k=3, backend="third", config=Config())
    with pytest.raises(ValueError, match="must be the same"):
        op.index_topk(q.astype(jnp.bfloat16), k, *at, top_k=3, backend="third")
    short = view(jnp.zeros((2, GROUPED.B, 11 * GROUPED.P, GROUPED.H)), None, GROUPED.P)
    with pytest.raises(ValueError, match="11 blocks a row: need at most 10"):
        op.index_topk(q, short, *at, top_k=3, backend="third")


def test_a_backend_that_jax_deprecates_says_nothing_at_each_lowering():
    """Others' deprecations are still said."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        runpy.run_path(triton_common.__file__)
        warnings.warn("The Pallas Triton backend is deprecated and will be removed", DeprecationWarning, stacklevel=1)
        with pytest.raises(DeprecationWarning, match="Another backend"):
            warnings.warn("Another backend is deprecated", DeprecationWarning, stacklevel=1)
