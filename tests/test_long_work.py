"""runtime/long_work.py: a log says what took long to compile."""

import re

import jax
import jax.numpy as jnp
import pytest

from runtime import long_work


def test_a_compilation_that_took_long_gets_a_line_with_the_name_of_its_program(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    long_work.compilations()

    @jax.jit
    def short_program(x: jax.Array) -> jax.Array:
        return x + 1

    @jax.jit
    def long_program(x: jax.Array) -> jax.Array:
        return x + 2

    short_program(jnp.ones(3))
    monkeypatch.setattr(long_work, "LONG_S", 0.0)
    long_program(jnp.ones(3))
    assert re.findall(r"compiling (\w+) took \d s", capsys.readouterr().out) == ["long_program"]
