"""`python -m m3jax.generate`, the command line. Imported, this module can be called as the function of its name."""

import sys
from types import ModuleType

if __name__ == "__main__":
    from m3jax.cli import program

    program()

from m3jax.decoding import generate


class _Callable(ModuleType):
    # An import of this module makes it the attribute `generate` of the package, in place of the function.
    __call__ = staticmethod(generate)


sys.modules[__name__].__class__ = _Callable
