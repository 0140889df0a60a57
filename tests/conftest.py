"""What holds for every test: one thread, no network, a fixed random state, reproducible searches."""

from __future__ import annotations

import os

# Set before torch, transformers or matplotlib are imported, because each reads its variable only once;
# subprocesses of the tests inherit them.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["MPLBACKEND"] = "Agg"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

from collections.abc import Iterator

import hypothesis
import pytest
import torch

# The models of the tests are small: several threads would spend their time waiting for each other.
torch.set_num_threads(1)

# The default tries the same examples in every run, so that a failure is the change's fault and not the
# day's. No deadline: the first call of anything in torch is slow.
hypothesis.settings.register_profile(
    "fixed",
    derandomize=True,
    deadline=None,
    max_examples=50,
    database=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
# `make test-full` looks further, elsewhere each time; a failing example is printed as code to copy.
hypothesis.settings.register_profile(
    "search",
    deadline=None,
    max_examples=500,
    print_blob=True,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fixed"))


@pytest.fixture(autouse=True)
def _fixed_random_state() -> Iterator[None]:
    """Starts each test from one random state, and catches a test that leaves another default dtype."""
    torch.manual_seed(0)
    dtype = torch.get_default_dtype()
    yield
    left = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    assert left == dtype, f"the test left the default dtype at {left}"
