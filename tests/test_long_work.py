"""infra/log.py: each program that jax compiles is counted with its seconds."""

import jax
import jax.numpy as jnp

from infra.log import compile_seconds


def test_a_program_counts_when_it_is_compiled_and_not_when_it_runs_again() -> None:
    x = jnp.ones(3)
    before = len(compile_seconds())
    program = jax.jit(lambda x: x * 3 + 1)
    program(x), program(x)
    compiled = compile_seconds()[before:]
    assert len(compiled) == 1 and compiled[0] > 0
