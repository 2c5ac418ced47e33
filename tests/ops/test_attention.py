"""Attention, matrix products, softmax, and copies: against PyTorch, what is kept, and recomputed."""
import gc
import itertools
import weakref

import allocator
import pytest
import torch
import tsmem  # noqa: F401  loads the operators
from op_checks import DTYPES, assert_equal, live_bytes, run

ops = torch.ops.tsmem
sdpa = torch.nn.functional.scaled_dot_product_attention

pytestmark = pytest.mark.usefixtures("one_thread")


def heads(batch=2, number=3, length=17, width=8, dtype=torch.float64, seed=0, other=None):
    """query, key, value as views of one product, as attention layers have them; key and value of another length: apart."""
    g = torch.Generator().manual_seed(seed)
    q, k, v = torch.randn(batch, length, 3, number, width, generator=g, dtype=torch.float64).to(dtype).permute(2, 0, 3, 1, 4)
    if other:
        k, v = torch.randn(2, batch, number, other, width, generator=g, dtype=torch.float64).to(dtype)
    return q, k, v


def needing(tensors, needs):
    return [t.detach().clone(memory_format=torch.preserve_format).requires_grad_(n) for t, n in zip(tensors, needs)]


@pytest.mark.parametrize("again", [-1, 0, 1, 3])
@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_equals_pytorch(dtype, again):
    """Bit for bit: the same kernels run."""
    for shape, causal, scale, masked in itertools.product([(2, 3, 17, 8), (1, 1, 1, 1), (3, 2, 33, 5)], (False, True), (None, 0.3), (False, True)):
        q, k, v = heads(*shape, dtype=dtype)
        mask = torch.randn(shape[2], shape[2], generator=torch.Generator().manual_seed(1)).to(dtype) if masked and not causal else None
        for _ in range(2):
            got = run(lambda q, k, v: ops.scaled_dot_product_attention(q, k, v, mask, 0.0, causal, scale, False, again), *needing((q, k, v), [True] * 3))
            want = run(lambda q, k, v: sdpa(q, k, v, mask, 0.0, causal, scale=scale), *needing((q, k, v), [True] * 3))
            assert_equal(got, want)


@pytest.mark.parametrize("needs", itertools.product((False, True), repeat=3))
def test_attention_every_combination_of_gradients(needs):
    for again, other in itertools.product((0, 1, 3), (None, 8)):
        inputs = needing(heads(other=other), needs)
        assert_equal(run(lambda q, k, v: ops.scaled_dot_product_attention(q, k, v, recompute=again), *inputs), run(sdpa, *inputs))


def test_attention_that_is_pytorchs():
    """All dropped, a boolean mask, no element: the same result as PyTorch's, whatever it is."""
    q, k, v = needing(heads(number=4), [True] * 3)
    for args, options in (
        ((q, k, v), {"dropout_p": 1.0}),
        ((q, k, v), {"attn_mask": torch.rand(17, 17) > 0.3}),
        ((q[0], k[0], v[0]), {}),
        ((q[:0], k[:0], v[:0]), {}),
    ):
        torch.manual_seed(3)
        want = sdpa(*args, **options)
        torch.manual_seed(3)
        got = ops.scaled_dot_product_attention(*args, **options)
        assert torch.equal(got, want)
        wanted = [q, k, v]
        assert_equal(torch.autograd.grad(got.square().sum(), wanted), torch.autograd.grad(want.square().sum(), wanted))
    with pytest.raises(RuntimeError):
        ops.scaled_dot_product_attention(q, k[..., :3], v)


@pytest.mark.parametrize("again", [-1, 0, 1, 3])
@pytest.mark.parametrize("dtype", DTYPES)
def test_heads_that_share_keys(dtype, again):
    """Bit for bit, by the same kernel; where it takes them not (another number of values), PyTorch's own."""
    g = torch.Generator().manual_seed(0)
    new = lambda *sizes: torch.randn(*sizes, generator=g, dtype=torch.float64).to(dtype)
    for number, of_values in ((2, 2), (1, 1), (6, 2)):
        inputs = needing((new(2, 17, 6, 8).transpose(1, 2), new(2, number, 11, 8), new(2, of_values, 11, 8)), [True] * 3)
        for mask, causal in ((None, False), (None, True), (new(17, 11), False), (torch.rand(2, 6, 17, 11, generator=g) > 0.3, False)):
            got = run(lambda q, k, v: ops.scaled_dot_product_attention(q, k, v, mask, 0.0, causal, None, True, again), *inputs)
            assert_equal(got, run(lambda q, k, v: sdpa(q, k, v, mask, 0.0, causal, enable_gqa=True), *inputs))
    y = ops.scaled_dot_product_attention(*needing((new(2, 6, 17, 8), new(2, 2, 11, 8), new(2, 2, 11, 8)), [True] * 3), enable_gqa=True)
    assert "Attention" in y.grad_fn.name() and "Scaled" not in y.grad_fn.name()


def dimensions(dtype=torch.float64):
    """Operands that PyTorch computes by products of whole matrices: (query, key, value), enable_gqa, masks."""
    g = torch.Generator().manual_seed(0)
    new = lambda *sizes: torch.randn(*sizes, generator=g, dtype=torch.float64).to(dtype)
    allowed = lambda *sizes: torch.rand(*sizes, generator=g) > 0.3
    # [B, H, T, N, C] out of [B, T, N, 3, H, C], and with the heads in front of the batches.
    windows = new(2, 3, 17, 3, 4, 8).permute(3, 0, 4, 1, 2, 5)
    some = allowed(17, 17)
    some[3] = False  # a row that sees nothing
    return {
        "two": ((new(9, 8), new(11, 8), new(11, 8)), False, (allowed(9, 11), new(9, 11), new(1, 11))),
        "five": (tuple(windows), False, (some, new(2, 4, 3, 17, 17), allowed(2, 4, 3, 17, 17))),
        "five, as they lie": (tuple(new(3, 2, 3, 4, 17, 8)), False, (new(17, 17),)),
        "five, heads in front": (tuple(windows.transpose(1, 2)), False, ()),
        "six, copied": (tuple(new(3, 2, 2, 17, 2, 3, 8).permute(0, 5, 1, 4, 2, 3, 6)), False, (some,)),
        "columns that lie apart": (tuple(new(3, 2, 3, 4, 8, 17).transpose(-1, -2)), False, ()),
        "shared heads in five": ((new(2, 3, 4, 17, 8), new(2, 3, 2, 17, 8), new(2, 3, 2, 17, 8)), True, (some,)),
    }


DIMENSIONS = tuple(dimensions())


@pytest.mark.parametrize("again", [-1, 0, 1, 3])
@pytest.mark.parametrize("name", DIMENSIONS)
def test_attention_over_other_dimensions(name, again):
    """The fused kernel's numbers, which PyTorch's are to rounding; the output as dense as its."""
    operands, shares, masks = dimensions()[name]
    for mask, causal, scale in [(None, False, None), (None, True, 0.3), *((m, False, None) for m in masks)]:
        for needs in ((True, True, True), (True, False, False), (False, False, True)):
            inputs = needing(operands, needs)
            for _ in range(2):
                got = run(lambda q, k, v: ops.scaled_dot_product_attention(q, k, v, mask, 0.0, causal, scale, shares, again), *inputs)
                want = run(lambda q, k, v: sdpa(q, k, v, mask, 0.0, causal, scale=scale, enable_gqa=shares), *inputs)
                for a, b in zip(got, want, strict=True):
                    assert (a is None) == (b is None)
                    if a is not None:
                        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
            y = ops.scaled_dot_product_attention(*inputs, mask, 0.0, causal, scale, shares, again)
            assert type(y.grad_fn).__name__ != "ViewBackward0" and "Attention" in y.grad_fn.name()
            assert y.stride() == sdpa(*inputs, mask, 0.0, causal, scale=scale, enable_gqa=shares).stride()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", DIMENSIONS)
def test_attention_over_other_dimensions_is_as_exact(name, dtype):
    """No further from float64 than three times what PyTorch's is, and rounding."""
    operands, shares, masks = dimensions(dtype)[name]
    for mask in (None, *masks[:1]):
        exact = None if mask is None or mask.dtype == torch.bool else mask.double()
        wide = run(lambda q, k, v: sdpa(q, k, v, mask if exact is None else exact, enable_gqa=shares), *needing([t.double() for t in operands], [True] * 3))
        got = run(lambda q, k, v: ops.scaled_dot_product_attention(q, k, v, mask, enable_gqa=shares), *needing(operands, [True] * 3))
        want = run(lambda q, k, v: sdpa(q, k, v, mask, enable_gqa=shares), *needing(operands, [True] * 3))
        for a, b, e in zip(got, want, wide, strict=True):
            off, own = ((t.double() - e).norm() for t in (a, b))
            assert off <= 3 * own + torch.finfo(dtype).eps * e.norm(), (name, off, own)


def test_attention_over_other_dimensions_keeps_no_probabilities():
    for name in DIMENSIONS:
        operands, shares, _ = dimensions()[name]
        length = max(t.size(-2) for t in operands)
        kept = []
        y = None
        with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.shape) or t, lambda t: t):
            y = ops.scaled_dot_product_attention(*needing(operands, [True] * 3), enable_gqa=shares)
        assert y.requires_grad and not any(shape[-1:] == (length,) and shape[-2:-1] == (operands[0].size(-2),) for shape in kept if len(shape) > 1), (name, kept)


def test_attention_over_other_dimensions_whose_strides_change():
    """save_on_cpu(pin_memory=True) gives back dense tensors: what becomes one dimension is forward's choice."""
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: t.contiguous().clone(memory_format=torch.contiguous_format), lambda t: t)
    for name in DIMENSIONS:
        operands, shares, _ = dimensions()[name]
        results = []
        for f in (ops.scaled_dot_product_attention, sdpa):
            inputs = needing(operands, [True] * 3)
            with hooks:
                y = f(*inputs, enable_gqa=shares)
            results.append(torch.autograd.grad(y.square().sum(), inputs))
        for a, b in zip(*results, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_attention_over_other_dimensions_derivatives():
    for name in ("two", "five", "shared heads in five"):
        operands, shares, _ = dimensions()[name]
        few = [t[..., :3, :2].detach() for t in operands]
        f = lambda q, k, v: ops.scaled_dot_product_attention(q, k, v, enable_gqa=shares)
        inputs = needing([t[:1] if name == "five" else t for t in few], [True] * 3)
        torch.autograd.gradcheck(f, inputs)
        torch.autograd.gradgradcheck(f, inputs)


def test_attention_over_other_dimensions_by_what_the_caller_chose():
    """sdpa_kernel(MATH): PyTorch's own."""
    inputs = needing(dimensions()["five"][0], [True] * 3)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        got, want = (run(f, *inputs) for f in (ops.scaled_dot_product_attention, sdpa))
    assert_equal(got, want)


def blocks(q, k, v, mask=None, p=0.0, causal=False, scale=None, again=1):
    return torch.ops.tsmem.scaled_dot_product_attention(q, k, v, mask, p, causal, scale, False, again)


def test_a_mask_and_causal():
    """PyTorch takes one or the other, and some versions both."""
    def outcome(f, mask, p):
        torch.manual_seed(0)
        try:
            return f(q, q, q, mask, p, True)
        except RuntimeError as error:
            return str(error).splitlines()[0]

    q = torch.randn(2, 3, 17, 8, requires_grad=True)
    for mask in (torch.rand(17, 17) > 0.3, torch.randn(17, 17), torch.randn(17, 17, requires_grad=True)):
        for p in (0.0, 0.1):
            got, want = (outcome(f, mask, p) for f in (blocks, sdpa))
            assert type(got) is type(want) and (got == want if isinstance(want, str) else torch.equal(got, want))


def masks(q, k):
    """Of each kind that the math path takes, with and without a gradient of its own."""
    g = torch.Generator().manual_seed(5)
    n, h, length, other = *q.shape[:3], k.shape[2]
    yield None
    for sizes in ((length, other), (n, 1, 1, other), (h, length, other), (n, h, length, other)):
        yield torch.rand(sizes, generator=g) > 0.3
        yield torch.randn(sizes, generator=g, dtype=torch.float64).to(q.dtype)
        yield torch.randn(sizes, generator=g, dtype=torch.float64).to(q.dtype).requires_grad_()


@pytest.mark.parametrize("again", [-1, 0, 1])
@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_with_dropout_or_a_trained_mask_equals_pytorch(dtype, again):
    """The same draws, and the generator where PyTorch's is; blocks of several batches, of one, and of some heads."""
    eps = 16 * torch.finfo(dtype).eps
    for shape, other, p in (((2, 3, 17, 8), None, 0.25), ((2, 3, 5, 8), 9, 0.5), ((2, 3, 17, 8), None, 0.0), ((3, 2, 420, 4), 430, 0.1), ((2, 2, 730, 4), None, 0.1)):
        q, k, v = needing(heads(*shape, dtype=dtype, other=other), [True] * 3)
        small = shape[2] < 100
        for mask in masks(q, k) if small else (None,):
            for causal, scale in itertools.product((False, True) if mask is None and small else (False,), (None, 0.3)):
                if p == 0 and not (mask is not None and mask.requires_grad):
                    continue
                wanted = [q, k, v] + ([mask] if mask is not None and mask.requires_grad else [])
                results = []
                for f in (blocks, sdpa):
                    torch.manual_seed(3)
                    y = f(q, k, v, mask, p, causal, scale=scale)
                    results.append([y, torch.get_rng_state().double(), *torch.autograd.grad(y, wanted, torch.ones_like(y))])
                for a, b in zip(*results, strict=True):
                    assert a.shape == b.shape and a.dtype == b.dtype
                    torch.testing.assert_close(a, b, rtol=eps, atol=eps * float(b.abs().max()), equal_nan=True)
                assert results[0][0].stride() == results[1][0].stride()


@pytest.mark.parametrize("needs", itertools.product((False, True), repeat=4))
def test_attention_with_dropout_every_combination_of_gradients(needs):
    if not any(needs):
        return
    q, k, v = heads()
    mask = torch.randn(17, 17, dtype=torch.float64)
    inputs = needing((q, k, v, mask), needs)
    got, want = (run(lambda *t: f(*t, 0.3), *inputs) for f in (blocks, sdpa))
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_attention_with_dropout_keeps_no_probabilities():
    q, k, v = needing(heads(2, 4, 256, 16, torch.float32), [True] * 3)
    kept = [live_bytes(lambda: f(q, k, v, None, 0.1)) for f in (sdpa, blocks)]
    probabilities = 2 * 4 * 256 * 256
    assert kept[1] < probabilities // 8 + 20_000 < probabilities * 4 * 2 < kept[0], kept


def test_gradient_of_a_mask_in_16_bits_is_summed_in_float32():
    """Over more blocks than one: as close to float32's as PyTorch's."""
    torch.manual_seed(0)
    n, heads, length = 48, 12, 65
    q, k, v, cotangent = (torch.randn(n, heads, length, 16).bfloat16() for _ in range(4))
    mask = torch.randn(1, heads, length, length).bfloat16()

    def gradient(f, dtype):
        given = mask.to(dtype).requires_grad_()
        y = f(*(t.to(dtype) for t in (q, k, v)), given)
        return torch.autograd.grad(y, given, (cotangent + 0.5).to(dtype))[0].float()

    exact = gradient(sdpa, torch.float32)
    error = lambda f: float((gradient(f, torch.bfloat16) - exact).norm() / exact.norm())
    assert error(blocks) <= 1.5 * error(sdpa)


def test_attention_with_dropout_all_of_a_row_masked():
    q, k, v = needing(heads(), [True] * 3)
    mask = torch.ones(17, 17, dtype=torch.bool)
    mask[3] = False
    got, want = (run(lambda *t: f(*t, mask, 0.3), q, k, v) for f in (blocks, sdpa))
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_attention_with_dropout_derivatives():
    inputs = [*needing(heads(1, 2, 5, 3), [True] * 3), torch.randn(5, 5, dtype=torch.float64, requires_grad=True)]

    def f(*t):
        torch.manual_seed(1)
        return blocks(*t, 0.4)

    assert torch.autograd.gradcheck(f, inputs)
    assert torch.autograd.gradgradcheck(f, inputs)


def test_attention_with_dropout_scripted_and_under_autocast():
    def f(q, k, v):
        return torch.ops.tsmem.scaled_dot_product_attention(q * 1, k, v, None, 0.2, recompute=1) * 2

    def g(q, k, v):
        return sdpa(q * 1, k, v, None, 0.2) * 2

    own, theirs = torch.jit.script(f), torch.jit.script(g)
    inputs = needing(heads(dtype=torch.float32), [True] * 3)
    for _ in range(4):
        for a, b in zip(run(own, *inputs), run(theirs, *inputs), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            for a, b in zip(run(own, *inputs), run(theirs, *inputs), strict=True):
                assert a.dtype == b.dtype
                torch.testing.assert_close(a, b, rtol=3e-2, atol=3e-2)


def test_attention_gradcheck():
    inputs = needing(heads(1, 2, 5, 3), [True] * 3)
    for again in (0, 1):
        assert torch.autograd.gradcheck(lambda q, k, v: ops.scaled_dot_product_attention(q, k, v, recompute=again), inputs)
        assert torch.autograd.gradgradcheck(lambda q, k, v: ops.scaled_dot_product_attention(q, k, v, recompute=again), inputs)


SHAPES = [((4, 5), (5, 6)), ((2, 4, 5), (5, 6)), ((2, 3, 4, 5), (2, 3, 5, 6)), ((2, 1, 4, 5), (3, 5, 6)), ((1, 4, 5), (7, 5, 1)), ((3, 1, 1), (3, 1, 1))]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("a,b", SHAPES)
def test_matmul_equals_pytorch(a, b, dtype):
    x, y = torch.randn(a, dtype=torch.float64).to(dtype), torch.randn(b[:-2] + (b[-1], b[-2]), dtype=torch.float64).to(dtype).mT
    for needs, again in itertools.product(itertools.product((False, True), repeat=2), (-1, 0, 1)):
        inputs = needing((x, y), needs)
        got, want = run(lambda a, b: ops.matmul(a, b, again), *inputs), run(torch.matmul, *inputs)
        assert got[0].is_contiguous() == want[0].is_contiguous()
        for g, w in zip(got, want):
            torch.testing.assert_close(g, w, rtol=8 * torch.finfo(dtype).eps, atol=8 * torch.finfo(dtype).eps * float(w.abs().max()))


def test_matmul_derivatives_and_what_is_pytorchs():
    a, b = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True), torch.randn(2, 4, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(ops.matmul, (a, b))
    for x, y in ((a, b[0, :, 0]), (a[0, 0], b), (a[0], b), (a[0, 0], b[0, :, 0]), (a[:0], b[:0])):
        got, want = ops.matmul(x, y), torch.matmul(x, y)
        assert_equal([got, *torch.autograd.grad(got.sum(), (a, b))], [want, *torch.autograd.grad(want.sum(), (a, b))])
    with pytest.raises(RuntimeError):
        ops.matmul(a, b[:, :3])
    with pytest.raises(RuntimeError):
        ops.matmul(a, b.float())


def test_matmul_keeps_what_pytorch_keeps():
    """Factors whose heads can't be put together without a copy: the copy, and so they may change before backward, as with PyTorch."""
    w = torch.randn(8, 8, requires_grad=True)
    q, k, _ = heads(4, 4, 64, 16, torch.float32)
    for a, b in ((q, k.mT), (q.contiguous(), k.contiguous().mT), (q.transpose(1, 2), w[:, :5].repeat(2, 1)), (torch.randn(6, 8, 5).mT, w[:, :3])):
        a, b = (t.clone(memory_format=torch.preserve_format).requires_grad_() if t.is_leaf else t for t in (a, b))
        kept = [live_bytes(lambda: f(a, b)) for f in (torch.matmul, ops.matmul)]
        assert kept[1] <= kept[0], kept
        grads = []
        for f in (torch.matmul, ops.matmul):
            h = torch.empty_strided(a.shape, a.stride()).copy_(a.detach()).requires_grad_() * 1
            y = f(h, b)
            with torch.no_grad():
                h.add_(1)
            try:
                grads.append(torch.autograd.grad(y.square().sum(), [t for t in (b, w) if t.requires_grad][:1])[0])
            except RuntimeError as error:
                assert "inplace" in str(error)
                grads.append(None)
        assert grads[0] is None or torch.allclose(*grads, rtol=1e-4, atol=1e-4)


def test_token_mixing_with_a_sum_in_place():
    def mix(x, w, f):
        for _ in range(2):
            x += f(x.transpose(1, 2), w).transpose(1, 2)
        return x

    x, w = torch.randn(4, 16, 8, dtype=torch.float64, requires_grad=True), torch.randn(16, 16, dtype=torch.float64, requires_grad=True)
    assert_equal(*(run(lambda x, w: mix(x * 1, w, f), x, w) for f in (lambda a, b: ops.matmul(a, b, 1), torch.matmul)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("again", [-1, 0, 1])
def test_softmax_equals_pytorch(dtype, again):
    for shape, dim in (((3, 4, 33), -1), ((5, 7), 0), ((1,), 0), ((2, 3, 4, 5), 1)):
        x = torch.randn(shape, dtype=torch.float64).to(dtype).requires_grad_()
        assert_equal(run(lambda x: ops.softmax(x, dim, None, again), x), run(lambda x: torch.softmax(x, dim), x))
        assert_equal(run(lambda x: ops.softmax(x, dim, torch.float64, again), x), run(lambda x: torch.softmax(x, dim, dtype=torch.float64), x))
    x = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: ops.softmax(x, -1, None, again), x)
    assert torch.autograd.gradgradcheck(lambda x: ops.softmax(x, -1, None, 0), x)
    with pytest.raises(IndexError):
        ops.softmax(x, 2)


@pytest.mark.parametrize("dtype", DTYPES)
def test_softmax_in_the_memory_of_its_gradient_and_scores(dtype):
    """Bit for bit what PyTorch computes beside them."""
    for shape, dim in (((7, 13), -1), ((3, 5, 129), 2), ((2, 3, 64, 65), -1), ((4, 1000), 1), ((5,), 0), ((6, 9), 0), ((3, 4, 17), 1), ((3, 1), -1)):
        x = torch.randn(shape, generator=torch.Generator().manual_seed(3)).to(dtype)
        c = torch.randn(shape, generator=torch.Generator().manual_seed(4)).to(dtype)
        for layout in (lambda t: t, lambda t: t.mT.contiguous().mT if t.dim() > 1 else t):
            found = []
            for softmax, times in ((torch.softmax, torch.mul), *((lambda t, d, r=r: ops.softmax(t, d, None, r), lambda a, b, r=r: ops.mul(a, b, r)) for r in (0, 1, 2))):
                leaf = layout(x.clone()).requires_grad_()
                # The gradient comes from the product behind, the scores from the one before.
                out = times(softmax(times(leaf, c), dim), c)
                found.append([out.detach(), *torch.autograd.grad(out.float().square().sum(), leaf)])
            for own in found[1:]:
                assert_equal(own, found[0])


def test_softmax_needs_no_second_gradient():
    from allocator import most_held

    x = torch.randn(64, 128, 128, requires_grad=True)
    y = ops.softmax(x, -1, None, 0) * 2
    assert most_held(lambda: y.backward(torch.ones_like(y))) <= 2.1 * x.nbytes  # ones among them


IF_CHEAP = 3


def by_hand(x, w, again):
    """Attention spelled out, with a projection before and after; `again`: its recompute arguments."""
    b, n, c = x.shape
    q, k, v = ops.linear(x, w[0], None, again).reshape(b, n, 3, 2, c // 2).permute(2, 0, 3, 1, 4).unbind(0)
    p = ops.softmax(ops.matmul(q, k.transpose(-2, -1), again), -1, None, again)
    y = ops.reshape(ops.matmul(p, v, again).transpose(1, 2), [b, n, c], again)
    return ops.linear(ops.roll(ops.contiguous(y.transpose(0, 1), recompute=again), [2], [0], again), w[1], None, again)


def fused(x, w, again):
    b, n, c = x.shape
    q, k, v = ops.linear(x, w[0], None, again).reshape(b, n, 3, 2, c // 2).permute(2, 0, 3, 1, 4).unbind(0)
    y = ops.scaled_dot_product_attention(q, k, v, recompute=again)
    return ops.linear(ops.reshape(y.transpose(1, 2), [b, n, c], again), w[1], None, again)


def layer(f, again, x, w, blocks=3):
    for _ in range(blocks):
        x = x + f(x, w, again).reshape(x.shape)
    return x


@pytest.mark.parametrize("f", [by_hand, fused])
@pytest.mark.parametrize("dtype", DTYPES)
def test_recomputed_bit_for_bit(f, dtype):
    x = torch.randn(4, 64, 32).to(dtype).requires_grad_()
    w = [(torch.randn(96, 32) / 8).to(dtype).requires_grad_(), (torch.randn(32, 32) / 8).to(dtype).requires_grad_()]
    want = run(lambda x, *w: layer(f, 0, x, w), x, *w)
    for again in (1, IF_CHEAP, 1, IF_CHEAP):
        assert_equal(run(lambda x, *w: layer(f, again, x, w), x, *w), want)


@pytest.mark.parametrize("f", [by_hand, fused])
def test_recomputed_keeps_nothing_inside(f):
    x = torch.randn(4, 64, 32, requires_grad=True)
    w = [(torch.randn(96, 32) / 8).requires_grad_(), (torch.randn(32, 32) / 8).requires_grad_()]
    kept = {again: live_bytes(lambda: layer(f, again, x, w)) for again in (0, 1)}
    assert kept[1] < kept[0] / 4, kept


def scores_by_matmul(q, k, v, again):
    return ops.matmul(ops.softmax(ops.matmul(q, k.transpose(-2, -1), again), -1, None, 1), v)


def scores_by_bmm(q, k, v, again):
    return ops.bmm(ops.softmax(ops.bmm(q.flatten(0, 1), k.flatten(0, 1).mT, again), -1, None, 1), v.flatten(0, 1))


def scores_by_baddbmm(q, k, v, again):
    zero = torch.zeros(1, dtype=q.dtype)
    return ops.bmm(ops.softmax(ops.baddbmm(zero, q.flatten(0, 1), k.flatten(0, 1).mT, 1, 0.5, again), -1, None, 1), v.flatten(0, 1))


@pytest.mark.parametrize("features,needs,cheap", ((96, "qkv", True), (97, "qkv", False), (96, "qv", False), (96, "kv", False)))
@pytest.mark.parametrize("f", [scores_by_matmul, scores_by_bmm, scores_by_baddbmm])
def test_scores_are_made_again_where_that_is_cheap(f, features, needs, cheap):
    """A product of batches of up to 96 features, whose factors are kept anyway: softmax then keeps no probabilities."""
    q, k, v = (torch.randn(2, 3, 40, features).requires_grad_(name in needs) for name in "qkv")
    want = run(lambda *t: f(*t, 0), q, k, v)
    for _ in range(4):
        assert_equal(run(lambda *t: f(*t, IF_CHEAP), q, k, v), want)
    probabilities = 4 * 2 * 3 * 40 * 40
    dropped = live_bytes(lambda: f(q, k, v, 0)) - live_bytes(lambda: f(q, k, v, IF_CHEAP))
    assert abs(dropped - (probabilities if cheap else 0)) < probabilities / 4


def test_probabilities_are_made_once():
    """When the product with the values needs them, and held for softmax's backward: without the scores, so no more than PyTorch's is there."""
    q, k, v = (torch.randn(1, 1, 300, 32, requires_grad=True) for _ in range(3))
    probabilities = 4 * 300 * 300

    def step(again):
        scores_with_bias(q, k, v, again).sum().backward()

    def scores_with_bias(q, k, v, again):
        scores = ops.add(ops.mul(ops.matmul(q, k.transpose(-2, -1), again), torch.full((300, 300), 0.5), again and 1), torch.ones(300), 1, again and 1)
        return ops.matmul(ops.softmax(scores, -1, None, again and 1), v)

    for again in (0, IF_CHEAP, 0, IF_CHEAP):
        step(again)
    peaks = {again: allocator.most_held(lambda: step(again)) for again in (0, IF_CHEAP)}
    assert peaks[IF_CHEAP] < peaks[0] + probabilities / 2
    assert peaks[IF_CHEAP] < 4.2 * probabilities


def test_what_probabilities_are_made_from_is_not_held_beside_them():
    """Two products read parts of them: what is held for the second is the probabilities, and not the scores too."""
    q, v = torch.randn(4, 256, 16, requires_grad=True), torch.randn(4, 256, 16, requires_grad=True)
    keys = [torch.randn(4, n, 16, requires_grad=True) for n in (32, 224)]

    def run(again):
        scores = ops.cat([ops.matmul(q, k.transpose(-2, -1), again) for k in keys], -1, again and 1)
        shares = ops.softmax(scores, -1, None, again and 1)
        return (ops.matmul(shares[..., :32], v[:, :32], again) + ops.matmul(shares[..., 32:], v[:, 32:], again)).square().sum()

    def step(again):
        run(again).backward()

    for again in (0, IF_CHEAP, 0, IF_CHEAP):
        step(again)
    peaks = {again: allocator.most_held(lambda: step(again)) for again in (0, IF_CHEAP)}
    assert peaks[IF_CHEAP] < peaks[0] + 4 * 256 * 256, peaks


@pytest.mark.parametrize("keys, again", [(24, False), (40, True)])
def test_scores_whose_factor_a_cheap_layer_makes(keys, again):
    """They are made again where the layer takes at most half of their time; else the layer alone."""
    x, k, v = (torch.randn(2, 3, rows, 16).requires_grad_() for rows in (40, keys, keys))
    w = torch.randn(16, 16).requires_grad_()

    def f(layer, product):
        return scores_by_matmul(ops.linear(x, w, None, layer), k, v, product)

    kept = {how: live_bytes(lambda: f(*how)) for how in itertools.product((0, IF_CHEAP), repeat=2)}
    assert kept[IF_CHEAP, 0] < kept[0, 0] > kept[0, IF_CHEAP]
    assert kept[IF_CHEAP, IF_CHEAP] < kept[IF_CHEAP, 0] if again else kept[IF_CHEAP, IF_CHEAP] == kept[IF_CHEAP, 0]
    want = run(lambda x, w, k, v: scores_by_matmul(ops.linear(x, w, None, 0), k, v, 0), x, w, k, v)
    for _ in range(3):
        assert_equal(run(lambda x, w, k, v: scores_by_matmul(ops.linear(x, w, None, IF_CHEAP), k, v, IF_CHEAP), x, w, k, v), want)


@pytest.mark.parametrize("keys,causal,cheap", ((10, False, True), (11, False, False), (20, True, True), (22, True, False)))
@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_runs_again_where_that_is_cheap(dtype, keys, causal, cheap):
    """Up to a third of a key a feature (32 here), or two thirds with a causal mask, its output is not kept; bits are as without."""
    x = torch.randn(4, keys, 32).to(dtype).requires_grad_()
    w = [(torch.randn(96, 32) / 8).to(dtype).requires_grad_(), (torch.randn(32, 32) / 8).to(dtype).requires_grad_()]

    def f(x, a, b, again):
        q, k, v = ops.linear(x, a, None).reshape(4, keys, 3, 2, 16).permute(2, 0, 3, 1, 4).unbind(0)
        y = ops.scaled_dot_product_attention(q, k, v, None, 0.0, causal, None, False, again)
        return ops.linear(ops.reshape(y.transpose(1, 2), [4, keys, 32], 1), b)

    want = run(lambda *t: f(*t, 0), x, *w)
    for _ in range(4):
        assert_equal(run(lambda *t: f(*t, IF_CHEAP), x, *w), want)
    kept = {again: live_bytes(lambda: f(x, *w, again)) for again in (0, 1, IF_CHEAP)}
    assert kept[1] < kept[0]
    assert kept[IF_CHEAP] == kept[1 if cheap else 0]


def test_attention_of_what_a_layer_makes_again_is_kept():
    """No two that run again in a row: its inputs are made by linear layers that do."""
    x, w = torch.randn(4, 64, 16, requires_grad=True), [torch.randn(64, 16, requires_grad=True) for _ in range(3)]

    def f(attention_again):
        q, k, v = (ops.linear(x, each, None, IF_CHEAP).reshape(4, 64, 4, 16).transpose(1, 2) for each in w)
        return ops.scaled_dot_product_attention(q, k, v, None, 0.0, True, None, False, attention_again)

    kept = {again: live_bytes(lambda: f(again)) for again in (0, 1, IF_CHEAP)}
    assert kept[1] < kept[0]
    assert kept[IF_CHEAP] == kept[0]


@pytest.mark.parametrize("again", [-1, 0, 1, 3])
def test_nothing_outlives_the_graph(again):
    q, k, v = needing(heads(2, 4, 64, 16, torch.float32), [True] * 3)
    mask, x = torch.zeros(64, 64), torch.randn(4, 64, 32, requires_grad=True)
    gone = [weakref.ref(mask)]
    y = ops.scaled_dot_product_attention(q, k, v, mask, 0.0, False, None, False, again)
    y.sum().backward()
    h = x * 1
    out = ops.contiguous(h.transpose(1, 2), recompute=again)
    gone.append(weakref.ref(h))
    out.sum().backward()
    del y, mask, h
    gc.collect()
    assert [r() for r in gone] == [None, None]
    assert out.shape == (4, 32, 64)


def test_attention_runs_once_under_hooks():
    q, k, v = needing(heads(2, 4, 64, 16, torch.float32), [True] * 3)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as p, torch.autograd.graph.save_on_cpu():
        ops.scaled_dot_product_attention(q, k, v, recompute=1).sum().backward()
    assert sum(e.count for e in p.key_averages() if e.key == "aten::_scaled_dot_product_flash_attention_for_cpu") == 1


def test_vmap():
    x, w = torch.randn(5, 3, 4, 6, dtype=torch.float64), torch.randn(6, 6, dtype=torch.float64, requires_grad=True)

    def f(x, matmul, softmax, reshape, contiguous, attention):
        y = softmax(matmul(x, w), -1)
        return reshape(contiguous(attention(y[None], y[None], y[None]).transpose(1, 2)), [-1])

    ours = (ops.matmul, ops.softmax, ops.reshape, ops.contiguous, ops.scaled_dot_product_attention)
    pytorch = (torch.matmul, torch.softmax, torch.reshape, torch.Tensor.contiguous, sdpa)
    torch.testing.assert_close(torch.vmap(lambda x: f(x, *ours))(x), torch.vmap(lambda x: f(x, *pytorch))(x))


@pytest.mark.parametrize("f", [by_hand, fused])
def test_recomputed_parts_and_retain_graph(f):
    x = torch.randn(4, 64, 32, dtype=torch.float64, requires_grad=True)
    w = [(torch.randn(n, 32, dtype=torch.float64) / 8).requires_grad_() for n in (96, 32)]
    outs = [layer(f, again, x, w) for again in (0, 1)]
    for wanted in ([x], [w[1]], [w[0]], [x, *w], [w[1], x]):
        assert_equal(*(torch.autograd.grad(y.square().sum(), wanted, retain_graph=True) for y in outs))
    graphs = [o.grad_fn for o in outs]
    del outs, graphs
    gc.collect()
    assert_equal(*(run(lambda x, *w: layer(f, again, x, w), x, *w) for again in (0, 1)))


@pytest.mark.parametrize("f", [by_hand, fused])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_under_autocast(f, dtype):
    def pytorch(x, w):
        b, n, c = x.shape
        q, k, v = torch.nn.functional.linear(x, w[0]).reshape(b, n, 3, 2, c // 2).permute(2, 0, 3, 1, 4).unbind(0)
        if f is fused:
            return torch.nn.functional.linear(sdpa(q, k, v).transpose(1, 2).reshape(b, n, c), w[1])
        y = (torch.softmax(q @ k.transpose(-2, -1), -1) @ v).transpose(1, 2).reshape(b, n, c)
        return torch.nn.functional.linear(y.transpose(0, 1).contiguous().roll([2], [0]), w[1])

    x = torch.randn(4, 64, 32, requires_grad=True)
    w = [(torch.randn(96, 32) / 8).requires_grad_(), (torch.randn(32, 32) / 8).requires_grad_()]
    for again in (0, 1):
        with torch.autocast("cpu", dtype):
            got, want = f(x, w, again), pytorch(x, w)
        assert got.dtype == want.dtype == dtype and torch.equal(got, want)
        for g, e in zip(*(torch.autograd.grad(y.float().square().sum(), (x, *w)) for y in (got, want))):
            torch.testing.assert_close(g, e, rtol=2e-2, atol=2e-2 * float(e.abs().max()))


@pytest.mark.parametrize("f", [by_hand, fused])
def test_scripted_four_calls(f):
    if f is fused:
        def g(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor):
            y = torch.ops.tsmem.linear(x, a, None, 1)
            q, k, v = y.reshape(4, 64, 3, 2, 16).permute(2, 0, 3, 1, 4).unbind(0)
            y = torch.ops.tsmem.scaled_dot_product_attention(q, k, v, None, 0.0, False, None, False, 1)
            return torch.ops.tsmem.linear(torch.ops.tsmem.reshape(y.transpose(1, 2), [4, 64, 32], 1), b, None, 1)
    else:
        def g(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor):
            q, k, v = torch.ops.tsmem.linear(x, a, None, 1).reshape(4, 64, 3, 2, 16).permute(2, 0, 3, 1, 4).unbind(0)
            p = torch.ops.tsmem.softmax(torch.ops.tsmem.matmul(q, k.transpose(-2, -1), 1), -1, None, 1)
            y = torch.ops.tsmem.reshape(torch.ops.tsmem.matmul(p, v, 1).transpose(1, 2), [4, 64, 32], 1)
            return torch.ops.tsmem.linear(torch.ops.tsmem.roll(torch.ops.tsmem.contiguous(y.transpose(0, 1), recompute=1), [2], [0], 1), b, None, 1)

    scripted = torch.jit.script(g)
    x = torch.randn(4, 64, 32, dtype=torch.float64, requires_grad=True)
    w = [(torch.randn(n, 32, dtype=torch.float64) / 8).requires_grad_() for n in (96, 32)]
    want = run(lambda x, *w: f(x, w, 0), x, *w)
    for _ in range(4):
        assert_equal(run(scripted, x, *w), want)


def test_copies_are_pytorchs():
    x = torch.randn(3, 4, 5, 6, requires_grad=True)
    t = x.transpose(1, 2)
    for ours, pytorch in (
        (ops.contiguous(t), t.contiguous()),
        (ops.contiguous(x), x.contiguous()),
        (ops.contiguous(x, torch.channels_last), x.contiguous(memory_format=torch.channels_last)),
        (ops.reshape(t, [3, -1]), t.reshape(3, -1)),
        (ops.reshape(x, [12, 30]), x.reshape(12, 30)),
        (ops.roll(x, [2], []), x.roll(2)),
        (ops.roll(t, [1, -1], [0, 3]), t.roll((1, -1), (0, 3))),
    ):
        assert_equal([ours, *torch.autograd.grad(ours.square().sum(), x)], [pytorch, *torch.autograd.grad(pytorch.square().sum(), x)])
        assert (ours.data_ptr() == x.data_ptr()) == (pytorch.data_ptr() == x.data_ptr())  # a view where PyTorch's is
    assert torch.autograd.gradgradcheck(lambda x: ops.reshape(ops.roll(x, [1], [0]).transpose(0, 1), [-1]).square(), torch.randn(3, 4, dtype=torch.float64, requires_grad=True))
    with pytest.raises(RuntimeError):
        ops.reshape(t, [7, -1])
