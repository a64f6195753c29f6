"""Generation by Triton kernels: results and states against Eq. 2 over all tokens, and the memory that they access.

Without a GPU the kernels are interpreted, so the problems are small.
"""

from functools import partial
from unittest.mock import Mock

import pytest
import test_backend_contract_aft as contract
import torch
from test_backend_contract_aft import structures
from tiny_models import language_model
from transformers import CompileConfig

from aft_hf import AFTAlibi, AFTConv, AFTLocal, AFTSimple
from aft_hf.caching_aft import SUMS_AND_WINDOW, AFTLayerState
from aft_hf.kernels.operators import portable_state


pytest.importorskip("triton")

from test_triton import BF16, DEVICE, FP32, TRITON, registered, slow  # noqa: F401

from aft_hf.kernels.triton import causal_launch as launches
from aft_hf.kernels.triton import operators


WIDE = {
    "a window of 40 and 2 heads of 35 features": partial(AFTLocal, 70, 200, 40, num_heads=2, position_bias_dim=4),
    "a key for each of 2 heads of 35 features": partial(AFTConv, 70, 2, 5, spatial_dims=1),
    "a kernel of one position": partial(AFTConv, 6, 2, 1, spatial_dims=1, position_bias_reparameterized=False),
    "one position alone": partial(AFTConv, 6, 2, 1, spatial_dims=1, global_connectivity=False),
    "37 features": partial(AFTSimple, 37),
    "8 heads": partial(AFTAlibi, 40, 8),
}
STRUCTURES = ["alibi causal", "local causal", "conv causal"]
LONG = ["simple causal", "local causal, wide", "local causal, window alone", *WIDE]


@pytest.fixture
def computed(monkeypatch):
    """Assert that the kernels processed prompt and tokens, so that the portable form fails the test."""
    for name in ("decode", "prefill"):
        monkeypatch.setattr(launches, name, Mock(wraps=getattr(launches, name)))
    yield
    assert launches.decode.called and launches.prefill.called


def build(structure: str, dtype: torch.dtype = FP32):
    if structure not in WIDE:
        return contract.build(structure, TRITON, dtype)
    torch.manual_seed(0)
    mixer = WIDE[structure](causal=True, mixing_implementation="auto")
    for parameter in contract.learned(mixer).values():
        torch.nn.init.normal_(parameter)
    return mixer.to(DEVICE, dtype)


def state_of(mixer, static: bool) -> AFTLayerState:
    return AFTLayerState(mixer.state_window, 500) if static else AFTLayerState(mixer.state_window)


def assert_decodes(mixer, x, pieces, static=False, mask=None, dtype=FP32):
    """Assert that x in pieces of these lengths gives Eq. 2 over all of x, and the state that other backends give."""
    actual, state, start = [], state_of(mixer, static), 0
    others, other = [], state_of(mixer, static)
    with torch.no_grad():
        for piece in pieces:
            part = slice(start, start + piece)
            # Decoding steps have no padding
            options = {} if mask is None or mask[:, part].all() else {"attention_mask": mask[:, part]}
            mixer.mixing_implementation = "auto"
            actual.append(mixer(x[:, part], state=state, **options))
            mixer.mixing_implementation = "portable"
            others.append(mixer(x[:, part], state=other, **options))
            start += piece
        mixer.mixing_implementation = "reference"
        options = {} if mask is None else {"attention_mask": mask[:, :start]}
        exact = mixer.double()(x[:, :start].double(), **options).cpu()
    real = 1.0 if mask is None else mask[:, :start, None].cpu()
    size = exact.abs().max().item()
    # The terms of the average, and d products for each projection before and after it
    allowed = contract.tolerance(FP32, start + 4 * x.shape[-1], x.abs().max().item() + 8.0)
    allowed += 8 * contract.storage_error(dtype)
    contract.assert_within(torch.cat(actual, 1).cpu() * real, exact * real, size * allowed, "outputs")
    assert int(state.get_seq_length()) == start
    if mixer.global_connectivity:  # otherwise the sums are not used
        averages = [x.numerator / x.denominator.clamp_min(1e-30) for x in (state, other)]
        torch.testing.assert_close(*averages, rtol=1e-4, atol=1e-4)
    for name in ("keys", "values", "seen"):
        torch.testing.assert_close(getattr(state, name), getattr(other, name), rtol=1e-4, atol=1e-4)


@structures([*STRUCTURES, *map(slow, LONG)])
def test_a_prompt_and_tokens_after_it_are_eq_2(structure, computed):
    mixer = build(structure)
    x = torch.randn(2, 50, mixer.hidden_size, device=DEVICE)
    assert_decodes(mixer, x, (37, 1, 1), static=structure in WIDE)


@structures(["local causal", *map(slow, ("alibi causal", "local causal, wide", "conv causal"))])
def test_a_prompt_in_pieces_with_padding_is_eq_2(structure, computed, monkeypatch):
    monkeypatch.setattr(launches, "PROGRAMS", 1000)  # several segments
    mixer = build(structure)
    x, mask = torch.randn(3, 50, mixer.hidden_size, device=DEVICE), torch.ones(3, 50, dtype=torch.bool, device=DEVICE)
    mask[0, :2] = mask[1, :43] = False  # the second row begins in the fourth piece
    mask[2, 36] = False
    assert_decodes(mixer, x, (3, 33, 1, 9, 1, 1), static=structure == "local causal", mask=mask)


@pytest.mark.parametrize("window", (0, 2))
def test_tokens_that_are_hidden_by_a_key_of_minus_infinity_change_nothing(window):
    bias, empty = (torch.zeros(1, 1, 1, window + 1, device=DEVICE) if window else None), AFTLayerState(window)
    empty.lazy_initialization(*torch.zeros(2, 1, 1, 0, 2, device=DEVICE))
    keys, values = torch.randn(2, 1, 9, 2, device=DEVICE)
    hidden = torch.tensor([0, 3, 4, 7])
    keys[:, hidden], values[:, hidden] = -torch.inf, torch.nan
    actual = []
    for step in (launches.causal_state, portable_state):
        state = [getattr(empty, name).clone() for name in SUMS_AND_WINDOW]
        parts = [(x, y) for x, y in zip(keys.split([5, 1, 1, 1, 1], 1), values.split([5, 1, 1, 1, 1], 1))]
        outputs = [step(None, key, value, bias, None, None, True, *state) for key, value in parts]
        actual.append([torch.cat(outputs, 1), *state[:2], state[2] / state[3]])
    torch.testing.assert_close(*actual)


def test_a_state_that_is_not_contiguous_is_updated():
    bias, empty, actual = torch.zeros(1, 1, 1, 3, device=DEVICE), AFTLayerState(2), []
    empty.lazy_initialization(*torch.zeros(2, 1, 1, 0, 2, device=DEVICE))
    keys, values = torch.randn(2, 1, 9, 2, device=DEVICE)
    for change in (lambda x: x.clone(), lambda x: x.mT.contiguous().mT):
        state = [change(getattr(empty, name)) for name in SUMS_AND_WINDOW]
        parts = zip(keys.split([7, 1, 1], 1), values.split([7, 1, 1], 1))
        outputs = [operators._causal_state(None, key, value, bias, None, None, True, *state) for key, value in parts]
        actual.append([*outputs, *state[:2], state[2] / state[3]])
    torch.testing.assert_close(*actual)


@pytest.mark.parametrize("dtype", (BF16, torch.float16), ids=str)
def test_half_precision(dtype, computed):
    x = torch.randn(1, 36, 8, device=DEVICE).to(dtype)
    assert_decodes(build("local causal", dtype), x, (33, 1, 1), dtype=dtype)


@pytest.mark.parametrize(("structure", "keys"), (slow("local causal", "x 90"), slow("alibi causal", "a rising ramp")))
def test_large_keys_are_finite_and_right(structure, keys, computed):
    mixer, inputs = contract.keys_are_inputs(build(structure)), contract.KEYS[keys](2, 40, contract.WIDTH)
    assert_decodes(mixer, inputs.to(DEVICE), (36, 1, 1, 1))


SMALL = {"hidden_size": 16, "num_heads": 2, "vocab_size": 40, "window_size": 5, "kernel_size": 4}


@pytest.mark.parametrize(("aft_type", "cache"), (("local", "static"), slow("conv", None)))
def test_generate_with_padding_gives_the_tokens_of_another_backend(aft_type, cache, computed):
    ids = torch.randint(0, 40, (2, 9), device=DEVICE)
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    actual = []
    for implementation in ("auto", "portable"):
        model = language_model(aft_type, mixing_implementation=implementation, **SMALL).to(DEVICE)
        options = {"max_new_tokens": 3, "do_sample": False, "cache_implementation": cache}
        actual.append(model.generate(ids, attention_mask=mask, **options))
    assert torch.equal(*actual)


@pytest.mark.slow
def test_a_compiled_step_with_a_static_cache_is_one_graph(computed):
    torch._dynamo.reset()
    model = language_model("local", **SMALL | {"num_hidden_layers": 1}).to(DEVICE)
    ids = torch.randint(0, 40, (2, 7), device=DEVICE)
    compiled, logits = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=False), []
    with torch.no_grad():
        for run in (model, compiled):
            cache = model.aft.new_cache(20)
            model(ids, cache=cache)
            places = [x.data_ptr() for layer in cache.layers for x in layer._tensors().values()]
            logits.append(torch.cat([run(ids[:, i : i + 1], cache=cache).logits for i in range(3)]))
            assert places == [x.data_ptr() for layer in cache.layers for x in layer._tensors().values()]
            assert int(cache.get_seq_length()) == 10
    torch.testing.assert_close(*logits)


@pytest.mark.slow
@pytest.mark.parametrize("aft_type", ("local", "alibi", "conv"))
def test_generate_compiles_the_steps_of_a_static_cache_as_one_graph(aft_type, computed):
    """Whole steps can then be CUDA graphs, as `generate` makes them on a GPU."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()  # which a reset does not
    model = language_model(aft_type, **SMALL | {"num_hidden_layers": 1}).to(DEVICE)
    config = CompileConfig(backend="aot_eager", mode=None, fullgraph=True, dynamic=False)
    config._compile_all_devices = True
    prompt, actual = {"input_ids": torch.randint(0, 40, (2, 5), device=DEVICE)}, []
    prompt["attention_mask"] = torch.ones_like(prompt["input_ids"])
    prompt["attention_mask"][1, :2] = 0
    for options in ({}, {"cache_implementation": "static", "compile_config": config}):
        actual.append(model.generate(**prompt, max_new_tokens=4, do_sample=False, **options))
    assert torch.equal(*actual) and torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_where_gradients_are_asked_for_another_backend_decodes():
    mixer, x = build("local causal"), torch.randn(1, 8, contract.WIDTH, device=DEVICE)
    state = AFTLayerState(mixer.state_window)
    mixer(x, state=state)
    mixer(x[:, :1], state=state).sum().backward()
    assert mixer.k_proj.weight.grad.abs().sum() > 0
