"""Shared fixtures: the real default model, loaded once, and small random models of every family."""

from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from holdfast.engine.slab import SlabShape
from holdfast.engine.torch import TorchEngine, load_engine
from holdfast.models import GGUFSource, open_model
from tests.effort import THOROUGH, examples

_quiet = [HealthCheck.too_slow, HealthCheck.data_too_large]
settings.register_profile(
    "holdfast", max_examples=examples(25), deadline=None, suppress_health_check=_quiet, derandomize=not THOROUGH
)
settings.load_profile("holdfast")


@pytest.fixture(scope="session")
def default_source() -> GGUFSource:
    source = open_model()
    assert isinstance(source, GGUFSource)
    return source


@pytest.fixture(scope="session")
def default_engine(default_source: GGUFSource) -> TorchEngine:
    """The default model in fp32 with a small window, so that tests see it slide."""
    return load_engine(default_source, num_slabs=4, shape=SMALL, device="cpu")


@pytest.fixture
def postgres() -> Iterator[str]:
    """The URL of an empty database on a real PostgreSQL."""
    from tests.postgres import fresh_database  # not every machine that runs tests has a client for it

    with fresh_database() as url:
        yield url


SMALL = SlabShape(recent=60, max_pin=16, prefill_chunk=48, draft_length=4, rewind_tokens=32)
