"""`python -m m3jax.generate`, the command line. Imported, it is the function of its name."""

import sys

if __name__ == "__main__":
    from m3jax.interrupts import end_at_interrupts

    end_at_interrupts()  # before the rest is imported
    from m3jax.cli import main
    from m3jax.console import run_program

    run_program(main)

from m3jax.completion import generate

# An import of this module becomes the attribute `generate` of the package: the function has to stay there.
sys.modules[__name__] = generate
