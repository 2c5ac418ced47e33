"""The dropouts against aten's: the same mask, the same generator state after, and what is kept."""

import pytest
import torch
from op_checks import DTYPES, assert_equal, calls, channels_last, live_bytes, run, saved

pytestmark = pytest.mark.usefixtures("ops")
NAMES = ("dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout")


def pair(name, p, train=True):
    return (lambda x: getattr(torch.ops.tsmem, name)(x, p, train)), (lambda x: getattr(torch.ops.aten, name)(x, p, train))


def with_state(f, x):
    """[output, gradient, the generator's state after forward]"""
    state = []

    def forward(z):
        y = f(z)
        state.append(torch.get_rng_state())
        return y * 1

    return run(forward, x) + state


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_equals_pytorch(name, dtype):
    for shape in ((4, 5), (2, 3, 5, 7), (2, 3, 4, 5, 6), (8, 16, 24, 33), (500, 130)):
        for layout in (lambda x: x, channels_last, lambda x: x.transpose(0, -1), lambda x: x[..., 1:]):
            x = layout(torch.randn(shape).to(dtype)).requires_grad_()
            for p in (0.0, 0.3, 0.9, 1.0):
                ours, pytorch = pair(name, p)
                assert_equal(with_state(ours, x), with_state(pytorch, x))
    for train, shape in ((False, (4, 5)), (True, (0, 5))):
        x = torch.randn(shape).to(dtype).requires_grad_()
        ours, pytorch = pair(name, 0.3, train)
        assert_equal(with_state(ours, x), with_state(pytorch, x))


@pytest.mark.parametrize("name", NAMES)
def test_keeps_bits(name):
    ours, _ = pair(name, 0.5)
    x = torch.randn(64, 3000, requires_grad=True)
    for shape, features in (((64, 3000), 64 * 3000), ((3, 7), 21), ((6, 50, 2, 2), 6 * 50)):
        given = torch.randn(shape, requires_grad=True)
        (kept,), _ = saved(lambda: ours(given))  # noqa: B023
        assert kept.numel() == ((features if "feature" in name else given.numel()) + 7) // 8
    assert live_bytes(lambda: ours(x)) <= x.numel() // 8 + 4096
    assert saved(lambda: ours(x.detach()))[0] == []
    assert saved(lambda: pair(name, 0.5, False)[0](x))[0] == []


def test_noise_becomes_the_result():
    """Forward holds the noise, which becomes the output, and its draws as booleans; backward the gradient and the noise, which becomes the next one."""
    from allocator import most_held

    x = torch.randn(1 << 20, requires_grad=True)
    g = torch.randn_like(x)
    y = torch.ops.tsmem.dropout(x, 0.5, True)
    assert most_held(lambda: torch.ops.tsmem.dropout(x, 0.5, True)) <= 1.3 * x.nbytes
    assert most_held(lambda: y.backward(g, retain_graph=True)) <= 2.1 * x.nbytes


@pytest.mark.parametrize("name", NAMES)
def test_backward_leaves_the_generator_alone(name):
    for shape in ((6, 50), (64, 3000)):
        x = torch.randn(shape, requires_grad=True)
        y = pair(name, 0.5)[0](x)
        before = torch.get_rng_state()
        torch.rand(7)
        y.sum().backward(retain_graph=True)
        first = x.grad.clone()
        x.grad = None
        torch.set_rng_state(before)
        y.sum().backward()
        assert torch.equal(torch.get_rng_state(), before) and torch.equal(x.grad, first)


@pytest.mark.parametrize("name", NAMES)
def test_gradcheck(name):
    def seeded(x):
        torch.manual_seed(0)
        return pair(name, 0.4)[0](x)

    for shape in ((3, 4, 2), (2, 3, 7000)):
        x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
        fast = x.numel() > 100
        assert torch.autograd.gradcheck(seeded, x, fast_mode=fast)
        assert torch.autograd.gradgradcheck(seeded, x, fast_mode=fast)


@pytest.mark.parametrize("name", NAMES)
def test_meta_fake_autocast(name):
    from torch._subclasses.fake_tensor import FakeTensorMode
    ours, pytorch = pair(name, 0.4)
    x = torch.randn(2, 3, 5, 7)
    given = x.to("meta").requires_grad_()
    (kept,), y = saved(lambda: ours(given))
    y.sum().backward()
    assert y.is_meta and y.shape == x.shape and kept.numel() == ((6 if "feature" in name else x.numel()) + 7) // 8
    with FakeTensorMode() as mode:
        assert ours(mode.from_tensor(x).requires_grad_()).shape == x.shape
    with torch.autocast("cpu", torch.bfloat16):
        for dtype in DTYPES:
            z = x.to(dtype).requires_grad_()
            assert_equal(with_state(ours, z), with_state(pytorch, z))


@pytest.mark.parametrize("name", NAMES)
def test_errors_are_pytorchs(name):
    x = torch.randn(3, 4, requires_grad=True)
    with pytest.raises(RuntimeError, match="dropout probability has to be between 0 and 1, but got 1.5"):
        pair(name, 1.5)[0](x)
    if "feature" in name:
        with pytest.raises(RuntimeError, match="Feature dropout requires at least 2 dimensions"):
            pair(name, 0.5)[0](x[0])


def test_torchscript_does_not_merge_two_draws():
    @torch.jit.script
    def twice(x):
        return torch.ops.tsmem.dropout(x, 0.5, True) - torch.ops.tsmem.dropout(x, 0.5, True)

    x = torch.randn(100, 100, requires_grad=True)
    for y, _ in calls(twice, x):
        assert y.abs().sum() > 0


def test_scripted_draws_what_scripted_pytorch_draws():
    """Between differentiable neighbours too, where TorchScript's autodiff replaces aten::dropout by aten::native_dropout."""

    def ours(x):
        return torch.tanh(torch.ops.tsmem.dropout(torch.relu(x * 2.0), 0.3, True)) * x

    def pytorch(x):
        return torch.tanh(torch.ops.aten.dropout(torch.relu(x * 2.0), 0.3, True)) * x

    x = torch.randn(64, 33, requires_grad=True)
    for actual, expected in zip(calls(torch.jit.script(ours), x), calls(torch.jit.script(pytorch), x)):
        torch.testing.assert_close(actual, expected)


def test_other_generators_and_threads():
    """The noise follows the default generator, whatever state it was put in."""
    x = torch.randn(64, 3000, requires_grad=True)
    ours, pytorch = pair("dropout", 0.5)
    state = torch.Generator().manual_seed(123).get_state()
    torch.set_rng_state(state)
    y = ours(x)
    torch.set_rng_state(state)
    assert torch.equal(y, pytorch(x))
