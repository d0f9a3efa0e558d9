"""Imports transformers without what no test uses of it."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from unittest import mock


def same(function: Callable | None = None, **_options) -> Callable:
    """A decorator that changes nothing, with options or without."""
    return function or same


@contextmanager
def without_what_is_unused() -> Iterator[None]:
    """Keep three things from transformers while its modules are imported: the model's take 1 CPU s in place of 9.

    They are torch's compiler of Python, and sympy with it; torch's tensors over processes; and scipy, for the loss of
    an object detector. Who asks for `torch._dynamo` later gets torch's own.
    """
    compiler, of_vmap = ModuleType("torch._dynamo"), ModuleType("torch._dynamo._trace_wrapped_higher_order_op")
    compiler.allow_in_graph = compiler.assume_constant_result = same  # decorators of kernels that a CPU does not run
    of_vmap.TransformGetItemToIndex = None  # for masks that are made under vmap; here none is
    stand_ins = {} if "torch._dynamo" in sys.modules else {module.__name__: module for module in (compiler, of_vmap)}
    sys.modules.update(stand_ins)
    with (
        mock.patch("torch.compiler.disable", same),
        mock.patch("torch.distributed.is_available", return_value=False),
        mock.patch("transformers.utils.is_scipy_available", return_value=False),
    ):
        yield
    for name in stand_ins:
        del sys.modules[name]
