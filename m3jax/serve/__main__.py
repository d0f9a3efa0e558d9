"""`python -m m3jax.serve`: a server with OpenAI's and Anthropic's endpoints (docs/serving.md)."""

if __name__ == "__main__":
    from m3jax.interrupts import end_at_interrupts

    end_at_interrupts()  # before the rest is imported

from m3jax.console import run_program
from m3jax.serve.command import main

if __name__ == "__main__":
    run_program(main)
