import gc

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    """Two cores shared by many small problems: threads cost more than they give."""
    torch.set_num_threads(1)


def pytest_collection_finish():
    """What was imported stays: the collector need not look at a million objects again and again."""
    gc.freeze()
