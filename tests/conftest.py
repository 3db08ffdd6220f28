import gc
import os

import pytest
import torch

from interpreted import hasten_the_interpreter

# those of half a minute, and the one that waits for the network, start first: then the workers end together
LONG = (
    "test_setup", "test_hosts_diffusers_fused", "test_golden", "test_experiments", "test_kernels_gluon", "test_hosts_diffusers_compile",
    "test_bench_e2e", "test_baselines_pipelines", "test_properties_attention", "test_kernels_retrieval", "test_baselines_routed",
    "test_hosts_diffusers_parallel", "test_cli", "test_backend", "test_profiles_around", "test_hosts_diffusers_lora",
)  # fmt: skip

if os.environ.get("TRITON_INTERPRET") == "1":
    hasten_the_interpreter()


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    """Two cores shared by many small problems: threads cost more than they give."""
    torch.set_num_threads(1)


def pytest_collection_modifyitems(items):
    rank = {name: place for place, name in enumerate(LONG)}
    items.sort(key=lambda item: rank.get(item.path.stem, len(LONG)))


def pytest_collection_finish():
    """What was imported stays: the collector need not look at a million objects again and again."""
    gc.freeze()
