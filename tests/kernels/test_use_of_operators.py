"""How the core uses the operators: where they must not be used, and what must not depend on the process."""

import copy
import pickle
import subprocess
import sys

import pytest
import torch
from torch.utils.data import DataLoader

from aft_hf import AFTAlibi, AFTConv, AFTFull, AFTLocal
from aft_hf.caching_aft import AFTLayerState
from aft_hf.kernels import operators
from aft_hf.mixing_aft import Mixing, mix
from aft_hf.position_biases_aft import Dense, GridKernel, LagKernel


MIXERS = {
    "full": lambda: AFTFull(16, 40, position_bias_dim=None, num_heads=2),
    "local": lambda: AFTLocal(16, 40, 5, causal=True, position_bias_dim=4),
    "alibi": lambda: AFTAlibi(16, 2),
    "conv": lambda: AFTConv(16, 2, 5, spatial_dims=1, causal=True),
    "grid": lambda: AFTConv(16, 16, 3),
}


@pytest.fixture(params=MIXERS)
def mixer(request):
    torch.manual_seed(0)
    return MIXERS[request.param]()


def gradients(mixer, x):
    return torch.autograd.grad(mixer(x).square().sum(), tuple(mixer.parameters()))


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float64))
def test_the_default_dtype_of_torch_does_not_matter(mixer, dtype):
    x = torch.randn(2, 36, 16)
    expected = gradients(mixer, x)
    try:
        torch.set_default_dtype(dtype)
        actual = gradients(mixer, x)
    finally:
        torch.set_default_dtype(torch.float32)
    for a, b in zip(actual, expected):
        torch.testing.assert_close(a, b)


@pytest.mark.skipif(operators.KERNELS is None, reason="needs the CPU kernels")
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
def test_what_the_kernels_take_is_not_computed_by_pytorch(mixer, dtype, monkeypatch):
    for name in ("portable", "portable_state"):
        monkeypatch.setattr(operators, name, None)
    mixer, x = mixer.to(dtype), torch.randn(2, 36, 16, dtype=dtype)
    mixer(x).sum().backward()
    if mixer.causal:
        state = AFTLayerState(mixer.state_window)
        with torch.no_grad():
            for piece in x.split([20, 15, 1], 1):
                mixer(piece, state=state)


@torch.no_grad()
def test_a_pickled_mixer_computes_the_same_in_a_forked_worker_of_a_data_loader(mixer):
    x = torch.randn(2, 36, 16)
    expected, again = mixer(x), pickle.loads(pickle.dumps(mixer))
    loader = DataLoader([0], num_workers=1, multiprocessing_context="fork", collate_fn=lambda _: again(x))
    (actual,) = loader
    torch.testing.assert_close(actual, expected)


def test_transformations_of_functions_are_right_in_a_compiled_program(mixer):
    x, tangent = torch.randn(2, 36, 16), torch.randn(2, 36, 16)
    _, expected = torch.func.jvp(mixer, (x,), (tangent,))
    compiled = torch.compile(lambda x: torch.func.jvp(mixer, (x,), (tangent,))[1], backend="eager")
    torch.testing.assert_close(compiled(x), expected)


@pytest.mark.parametrize("name", ("local", "alibi", "conv"))
def test_a_copy_of_a_state_is_not_changed_by_later_steps_and_an_empty_piece_changes_nothing(name):
    torch.manual_seed(0)
    mixer, x = MIXERS[name](), torch.randn(2, 12, 16)
    with torch.no_grad():
        expected, state = mixer(x), AFTLayerState(mixer.state_window)
        assert mixer(x[:, :0], state=state).shape == (2, 0, 16)
        mixer(x[:, :7], state=state)
        kept = copy.copy(state)
        mixer(x[:, 1:5], state=state)
        actual = torch.cat([mixer(x[:, i : i + 1], state=kept) for i in range(7, 12)], 1)
    torch.testing.assert_close(actual, expected[:, 7:], rtol=1e-4, atol=1e-5)


def test_the_package_may_be_imported_twice_in_one_process():
    code = (
        "import sys, torch, aft_hf; names = [name for name in sys.modules if name.startswith('aft_hf')];"
        "old = {name: sys.modules.pop(name) for name in names};"
        "import aft_hf; assert aft_hf is not old['aft_hf'];"
        "aft_hf.AFTSimple(8, causal=True)(torch.randn(1, 9, 8)).sum().backward()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("size", (3, 4))
@pytest.mark.parametrize("global_connectivity", (False, True))
def test_a_kernel_of_causal_lags_in_a_bidirectional_problem_is_not_a_grid(size, global_connectivity):
    biases = LagKernel(torch.randn(2, size), causal=True, global_connectivity=global_connectivity)
    problem = Mixing(torch.randn(1, 9, 2), torch.randn(1, 9, 4), 2, biases)
    torch.testing.assert_close(mix(problem), mix(problem, "reference"))


@pytest.mark.parametrize("implementation", ("auto", "portable"))
@pytest.mark.parametrize("global_connectivity", (False, True))
@pytest.mark.parametrize("grid_size", (None, (3, 3), (9, 1)), ids=str)
def test_a_kernel_on_both_sides_in_a_causal_problem_hides_later_tokens(grid_size, global_connectivity, implementation):
    biases = LagKernel(torch.randn(2, 5), causal=False, global_connectivity=global_connectivity)
    if grid_size is not None:
        biases = GridKernel(torch.randn(2, 3, 3), grid_size, global_connectivity)
    problem = Mixing(torch.randn(2, 9, 2), torch.randn(2, 9, 4), 2, biases, causal=True)
    torch.testing.assert_close(mix(problem, implementation), mix(problem, "reference"))


@pytest.mark.parametrize("biases", (Dense(torch.randn(2, 9, 3), torch.randn(2, 9, 3)), Dense(torch.randn(2, 9, 9))))
def test_autocast_around_the_operation_itself_is_allowed(biases):
    problem = Mixing(torch.randn(2, 9, 4), torch.randn(2, 9, 4), 2, biases)
    with torch.autocast("cpu", torch.bfloat16):
        actual = mix(problem)
    torch.testing.assert_close(actual, mix(problem), rtol=0.1, atol=0.1)
