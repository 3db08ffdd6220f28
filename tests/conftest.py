import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    """Two cores shared by many small problems: threads cost more than they give."""
    torch.set_num_threads(1)
