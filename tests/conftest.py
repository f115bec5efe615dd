"""What every test file may ask for."""

import os
from collections.abc import Iterator

# Before torch is imported: several test processes share the cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import jaxtyping
import pytest
import torch

from ncl_multi.log import show_messages


def pytest_configure() -> None:
    torch.set_num_threads(1)
    show_messages()


@pytest.fixture
def unchecked() -> Iterator[None]:
    """Let shapes that the signatures forbid through to the code under test."""
    before = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", before)
