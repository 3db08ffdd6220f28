"""park bench methods: every method through the blocks of real transformers, here small ones on a CPU."""

import pytest
import torch

pytest.importorskip("diffusers")

from parkattn.methods import METHODS
from parklab.bench import methods
from parklab.bench.whole_models import SMALL


@pytest.mark.parametrize("label", methods.TWO_BLOCKS)
def test_each_method_has_sparse_calls_and_finite_outputs(label):
    found = {each["method"]: each for each in methods.through_model(SMALL[label], label, torch.device("cpu"))}
    assert list(found) == list(METHODS)
    assert all(each["ok"] for each in found.values()), {name: each for name, each in found.items() if not each["ok"]}
    layers = 2
    for name, each in found.items():
        assert sum(each["calls"].values()) == methods.STEPS * layers and len(each["seconds"]) == methods.STEPS
        dense = each["calls"]["dense"]
        assert dense == methods.STEPS * layers if name == "dense" else layers <= dense < methods.STEPS * layers


def test_a_method_that_fails_says_so_and_the_others_go_on(monkeypatch):
    def broken(name, rehearse):
        if name == "park":
            raise ValueError("broken: expected nothing.\nMore")
        return methods.make_method(name)

    monkeypatch.setattr(methods, "_method", broken)
    monkeypatch.setattr(methods, "METHODS", {name: METHODS[name] for name in ("park", "sta")})
    park, sta = methods.through_model(SMALL["wan2.1-14b"], "wan2.1-14b", torch.device("cpu"))
    assert park["failure"] == "ValueError: broken: expected nothing." and not park["ok"] and sta["ok"]
