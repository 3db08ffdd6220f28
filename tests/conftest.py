import gc
import os

import pytest
import torch

from interpreted import hasten_the_interpreter

# half a minute and more each, so they start first: then the workers end together
LONG = ("test_kernels_gluon", "test_setup", "test_backend", "test_kernels_retrieval", "test_golden", "test_experiments")

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
