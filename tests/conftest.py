import gc
import os
import shutil
import sys

import pytest
import torch

from interpreted import hasten_the_interpreter

# those of ten seconds and more, and the one that waits for the network, start first: then the workers end together
LONG = (
    "test_setup", "test_hosts_diffusers_fused", "test_solids_model", "test_golden", "test_kernels_gluon_kinds",
    "test_hosts_diffusers_compile", "test_experiments", "test_campaign", "test_kernels_attend_builds", "test_kernels_gluon",
    "test_hosts_diffusers_balance", "test_experiments_captures", "test_kernels_retrieval", "test_hosts_diffusers_lora",
    "test_hosts_diffusers_parallel", "test_solids_packing", "test_baselines_pipelines", "test_baselines_routed",
    "test_bench_e2e", "test_hosts_diffusers_pipelines", "test_kernels_lists_and_residual", "test_docs", "test_properties_attention",
    "test_experiments_costs", "test_bench_e2e_profile", "test_sprites", "test_devices", "test_methods", "test_backend",
    "test_hosts_diffusers_session", "test_studio_prompts", "test_hosts_diffusers_forecast", "test_profiles_around", "test_cli",
)  # fmt: skip

# Debian's chromium, or PARK_CHROMIUM=/path
BROWSER = os.environ.get("PARK_CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
QUIET = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"]
QUIET += ["--disable-background-networking", "--disable-component-update"]

os.environ.setdefault("OMP_NUM_THREADS", "1")  # of the processes that tests start, beside `one_thread`

if os.environ.get("TRITON_INTERPRET") == "1":
    hasten_the_interpreter()


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    """Two cores shared by many small problems: threads cost more than they give."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="module")
def graphs_of_one_module():
    """torch.compile allows a stock block eight graphs per process: those of other modules must not use them up."""
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip(
        "playwright.sync_api", reason="playwright is not installed: pip install playwright"
    )
    if BROWSER is None:
        pytest.skip("no Chromium on this machine: apt-get install chromium, or set PARK_CHROMIUM")
    with playwright.sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=BROWSER, args=QUIET)
        yield chromium
        chromium.close()


@pytest.fixture(autouse=True)
def closed_afterwards(request):
    """Videos of an earlier test must not go on playing."""
    yield
    if "browser" in request.fixturenames:
        for context in request.getfixturevalue("browser").contexts:
            context.close()


def pytest_collection_modifyitems(items):
    rank = {name: place for place, name in enumerate(LONG)}
    items.sort(key=lambda item: rank.get(item.path.stem, len(LONG)))


def pytest_collection_finish():
    """What was imported stays: the collector need not look at a million objects again and again."""
    gc.freeze()
