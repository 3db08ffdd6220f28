"""What enable, disable and summary answer to wrong values, and what they advise."""

import pytest

pytest.importorskip("diffusers")

import tiny_pipelines as tiny
from parkattn.hosts.diffusers import disable, enable, summary
from test_errors import refused


@pytest.fixture(scope="module")
def wan():
    return tiny.wan_transformer()


@pytest.mark.parametrize(
    "steps,error", [(-1, ValueError), (0, ValueError), (2.5, TypeError), ("x", TypeError), (True, TypeError)]
)
def test_a_number_of_steps_that_is_none_is_refused(wan, steps, error):
    refused(enable, wan, total_steps=steps, named="total_steps", came=str(steps), error=error)


@pytest.mark.parametrize("config", [5, 0, [], object()])
def test_a_config_that_is_none_is_refused(wan, config):
    refused(enable, wan, config, total_steps=50, named="config", came="", error=TypeError)


def test_a_dense_layer_that_the_model_has_not_is_refused(wan):
    refused(enable, wan, total_steps=50, dense_layers=(0, 2), named="dense_layers", came="2")
    with enable(wan, total_steps=50, dense_layers=(0, 1)):
        pass


@pytest.mark.parametrize("target", [None, 5, "pipe", object()])
@pytest.mark.parametrize("verb", [enable, disable, summary])
def test_a_target_without_a_transformer_is_refused(verb, target):
    refused(verb, target, named="target", came=type(target).__name__, error=TypeError)


@pytest.mark.parametrize("name", ["ltx", "cogvideox", "mochi", "hunyuan 1.5", "wan", "hunyuan"])
def test_a_model_that_borrows_a_preset_says_so_unless_it_was_set(name):
    transformer, _, _ = tiny.transformers()[name]
    borrows = name not in ("wan", "hunyuan")
    with enable(transformer, total_steps=50) as session:
        assert ("borrows" in str(session.summary())) == borrows
        assert len(session.summary().to_dict()["advice"]) == borrows
    with enable(transformer, {"top_p": 0.8}, total_steps=50) as session:
        assert not session.summary().advice
    with enable(transformer, method="dense", total_steps=50) as session:
        assert not session.summary().advice
