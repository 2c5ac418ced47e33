"""--amp: autocast written into the model, against torch.autocast around the original."""
import copy
import json

import pytest
import torch
from torch import nn

import allocator
import conftest
from command_line import fails, run
from op_checks import live_bytes

conftest.load()


class Net(nn.Module):
    """Convolutions, norms, a residual, a linear layer, and a result of several kinds."""

    def __init__(self, width=16):
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, width, 3, padding=1)
        self.fc = nn.Linear(width, 5)

    def forward(self, x, scale: float = 1.0):
        x = torch.relu(self.bn1(self.conv1(x)))
        x = torch.relu(self.bn2(self.conv2(x)) + x)
        x = self.conv3(x)
        y = self.fc(torch.relu(x).mean((2, 3))) * scale
        return {"logits": y, "classes": y.argmax(1)}, [x]


def flat(out):
    named, listed = out
    return [named["logits"], named["classes"], *listed]


def step(model, x, autocast=None):
    model.zero_grad()
    x = x.clone().requires_grad_()
    with torch.autocast("cpu", dtype=autocast or torch.bfloat16, enabled=autocast is not None):
        out = model(x)
    outputs = flat(out)
    (outputs[0].float().square().sum() + outputs[2].float().square().mean()).backward()
    return outputs, [x.grad] + [p.grad for p in model.parameters()], [b.clone() for b in model.buffers()]


@pytest.fixture(scope="module", params=["script", "trace"])
def original(request, tmp_path_factory):
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("amp") / "net.pt"
    net = Net()
    scripted = torch.jit.script(net) if request.param == "script" else torch.jit.trace(net, torch.randn(2, 3, 9, 9), strict=False)
    scripted.save(str(path))
    return path


@pytest.mark.parametrize("level", ["ops", "regions"])
@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_as_torch_autocast_around_the_original(original, tmp_path, dtype, level):
    new = tmp_path / "new.pt"
    done = run("rewrite", original, "-o", new, "--amp", dtype, "--level", level, "--input", "4x3x20x20")
    assert done.returncode == 0, done.stderr
    assert "autocast" in done.stdout
    a, b, exact = (torch.jit.load(str(p)).train() for p in (original, new, original))
    exact.double()
    torch.manual_seed(1)
    for _ in range(4):
        x = torch.randn(8, 3, 20, 20)
        pytorch, ours, reference = step(a, x, torch.bfloat16 if dtype == "bf16" else torch.float16), step(b, x), step(exact, x.double())
        assert [t.dtype for t in ours[0]] == [t.dtype for t in step(torch.jit.load(str(original)), x)[0]]
        assert all(g.dtype == torch.float32 for g in ours[1])
        for mine, theirs, true in zip(*(x[1] + [b for b in x[2] if b.is_floating_point()] + x[0][:1] for x in (ours, pytorch, reference))):
            error, allowed = (mine.double() - true).norm(), (theirs.double() - true).norm()
            assert error <= 3 * allowed + 1e-2 * true.norm() + 1e-6
        assert not torch.is_autocast_enabled("cpu")


def test_convolutions_run_and_are_kept_in_half(original, tmp_path):
    new = tmp_path / "new.pt"
    done = run("rewrite", original, "-o", new, "--amp", "bf16")
    assert done.returncode == 0, done.stderr
    model, saved = torch.jit.load(str(new)).train(), []
    x = torch.randn(8, 3, 32, 32)
    for _ in range(3):
        saved.clear()
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
            out = model(x)
    del out
    big = [t for t in saved if t.numel() >= 8 * 16 * 32 * 32]
    assert len(big) >= 2 and all(t.dtype == torch.bfloat16 for t in big)


def test_weights_are_not_kept_twice(tmp_path):
    """PyTorch keeps the cast of every weight until backward."""
    torch.manual_seed(0)
    path, new = tmp_path / "wide.pt", tmp_path / "new.pt"
    net = nn.Sequential(nn.Conv2d(64, 512, 3), nn.ReLU(), nn.Conv2d(512, 64, 3), nn.Flatten(), nn.Linear(64, 4096), nn.ReLU(), nn.Linear(4096, 8))
    torch.jit.script(net).save(str(path))
    assert run("rewrite", path, "-o", new, "--amp", "bf16").returncode == 0
    a, b, x = torch.jit.load(str(path)), torch.jit.load(str(new)), torch.randn(1, 3, 5, 5).repeat(1, 22, 1, 1)[:, :64].contiguous()
    for _ in range(3):
        b(x)

    def pytorch():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return a(x)

    weights = 2 * sum(p.numel() for p in net.parameters() if p.dim() > 1)
    assert live_bytes(pytorch) > 0.95 * weights
    assert live_bytes(lambda: b(x)) < 0.1 * weights
    grads = []
    for f, m in ((pytorch, a), (lambda: b(x), b)):
        m.zero_grad()
        f().float().sum().backward()
        grads.append([p.grad.clone() for p in m.parameters()])
    for g, h in zip(*grads):
        torch.testing.assert_close(h, g, rtol=2e-2, atol=2e-2 * float(g.abs().max()))


def test_casts_of_weights_are_not_held_until_forward_ends(tmp_path):
    """Autocast's cache would hold all of them, also those that backward makes again."""
    _, model = rewritten(tmp_path, nn.Sequential(*(m for _ in range(16) for m in (nn.Linear(256, 256), nn.ReLU()))))
    x = torch.randn(2, 256)
    allocator.prepare(model)
    for _ in range(3):
        model(x).sum().backward()
    casts = 2 * sum(p.numel() for p in model.parameters() if p.dim() > 1)
    assert allocator.most_held(lambda: model(x).sum().backward()) < 0.4 * casts


def test_a_weight_that_is_used_again_is_cast_twice_at_most(tmp_path):
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(64, 64, bias=False)

        def forward(self, x):
            for _ in range(10):
                x = torch.relu(self.fc(x))
            return x

    pytorch, model = rewritten(tmp_path, Recurrent())
    x = torch.randn(3, 64)
    for _ in range(3):
        model(x).sum().backward()
    model.zero_grad()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        y = model(x)
    assert sum(e.name == "aten::_to_copy" for e in profile.events()) <= 4  # the input, the output, the weight
    y.sum().backward()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        z = pytorch(x)
    z.float().sum().backward()
    torch.testing.assert_close(model.fc.weight.grad, pytorch.fc.weight.grad, rtol=3e-2, atol=3e-2 * float(pytorch.fc.weight.grad.abs().max()))


def test_a_cast_from_a_part_without_gradients_is_not_taken(tmp_path):
    """Under one autocast: what validation left in its cache has no graph."""
    path, new = tmp_path / "net.pt", tmp_path / "new.pt"
    torch.jit.script(nn.Sequential(nn.Conv2d(4, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 5))).save(str(path))
    assert run("rewrite", path, "-o", new).returncode == 0
    x = torch.randn(3, 2, 4, 8, 8)
    grads = []
    for p in (path, new):
        model = torch.jit.load(str(p)).train()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            first = model(x[0])
            with torch.no_grad():
                model(x[1])
            last = model(x[2])
        (first.float().sum() + 3 * last.float().sum()).backward()
        grads.append([q.grad.clone() for q in model.parameters()])
    for g, h in zip(*grads):
        torch.testing.assert_close(h, g, rtol=2e-2, atol=2e-2 * float(g.abs().max()))


def test_an_exception_leaves_no_autocast_behind(original, tmp_path):
    new = tmp_path / "new.pt"
    assert run("rewrite", original, "-o", new, "--amp", "bf16").returncode == 0
    model = torch.jit.load(str(new))
    with pytest.raises(RuntimeError):
        model(torch.randn(2, 4, 9, 9))
    assert not torch.is_autocast_enabled("cpu")
    with torch.autocast("cpu", dtype=torch.float16):
        model(torch.randn(2, 3, 9, 9))
        assert torch.get_autocast_dtype("cpu") == torch.float16


def test_float64_is_left_alone(original, tmp_path):
    new = tmp_path / "new.pt"
    assert run("rewrite", original, "-o", new, "--amp", "bf16").returncode == 0
    a, b = (torch.jit.load(str(p)).double() for p in (original, new))
    x = torch.randn(4, 3, 12, 12, dtype=torch.float64)
    for _ in range(3):
        (ya, *_), (yb, *_) = step(a, x), step(b, x)
        assert yb[0].dtype == ya[0].dtype
        torch.testing.assert_close(yb[0], ya[0], rtol=1e-9, atol=1e-9)


def test_validation_deepcopy_and_restore(original, tmp_path):
    new, back = tmp_path / "new.pt", tmp_path / "back.pt"
    assert run("rewrite", original, "-o", new, "--amp", "bf16").returncode == 0
    model = torch.jit.load(str(new)).eval()
    pytorch = torch.jit.load(str(original)).eval()
    x = torch.randn(4, 3, 12, 12)
    with torch.no_grad():
        for _ in range(3):
            out = flat(model(x))
            with torch.autocast("cpu", dtype=torch.bfloat16):
                want = flat(pytorch(x))
            torch.testing.assert_close(out[0], want[0].float(), rtol=2e-2, atol=2e-2)
        torch.testing.assert_close(flat(copy.deepcopy(model)(x))[0], out[0])
    shown = run("diff", original, new).stdout
    assert "under autocast to bf16" in shown and "tsmem::autocast" in shown
    assert run("rewrite", new, "-o", back, "--restore").returncode == 0
    assert run("diff", original, back).returncode == 0
    # Rewritten again without it, it is gone.
    assert run("rewrite", new, "-o", new, "--force").returncode == 2
    assert run("rewrite", new, "-o", back, "--force").returncode == 0
    assert "autocast" not in run("diff", original, back, "--stat").stdout


def test_with_checkpoint_and_in_float16_with_a_scaler(tmp_path):
    torch.manual_seed(0)
    path, new = tmp_path / "net.pt", tmp_path / "new.pt"
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Sequential(nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3)), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 4))
    torch.jit.script(net).save(str(path))
    assert run("rewrite", path, "-o", new, "--amp", "f16", "--checkpoint", "1").returncode == 0
    model = torch.jit.load(str(new)).train()
    scaler, optimizer = torch.amp.GradScaler("cpu", init_scale=2.0**8), torch.optim.SGD(model.parameters(), 0.05)
    x, y, losses = torch.randn(16, 3, 10, 10), torch.randint(4, (16,)), []
    for _ in range(25):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
    assert int(model.state_dict()["1.0.num_batches_tracked"]) == 25


class Residual(nn.Module):
    """What eager mode leaves in half precision under autocast and TorchScript casts to float32: a norm of a sum."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 64)

    def forward(self, x):
        h = self.first(x)
        return self.second(self.norm(h + h))


def test_a_checkpoint_runs_again_by_the_same_lists(tmp_path):
    """It ran again by TorchScript's lists: other casts, and so other gradients."""
    torch.manual_seed(0)
    path, x = tmp_path / "net.pt", torch.randn(32, 64)
    torch.jit.script(nn.Sequential(Residual())).save(str(path))
    gradients = []
    for options in ([], ["--checkpoint", "0"]):
        assert run("rewrite", path, "-o", tmp_path / "new.pt", "--force", "--amp", "bf16", *options).returncode == 0
        model = torch.jit.load(str(tmp_path / "new.pt"))
        leaf = x.clone().requires_grad_()
        model(leaf).square().sum().backward()
        gradients.append([leaf.grad, *(p.grad for p in model.parameters())])
    for with_checkpoint, without in zip(gradients[1], gradients[0]):
        assert (with_checkpoint - without).abs().max() <= 1e-4 * without.abs().max()


def test_a_checkpoint_takes_the_weights_of_this_step(tmp_path):
    """Casts of weights are cached while an autocast lasts; those that backward makes must not outlive it."""
    torch.manual_seed(0)
    path = tmp_path / "net.pt"
    torch.jit.script(nn.Sequential(nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3)))).save(str(path))
    x, results = torch.randn(4, 3, 12, 12), []
    for name, options in (("plain", []), ("checkpointed", ["--checkpoint", "0"])):
        assert run("rewrite", path, "-o", tmp_path / name, "--amp", "bf16", *options).returncode == 0
        model = torch.jit.load(str(tmp_path / name)).train()
        results.append([])
        for _ in range(4):
            model.zero_grad()
            y = model(x)
            y.square().sum().backward()
            results[-1] += [y.detach(), *(p.grad.clone() for p in model.parameters())]
            with torch.no_grad():
                for p in model.parameters():
                    p.mul_(1.5)
    for got, want in zip(*results):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


class Shared(nn.Module):
    """The same layer inside and outside of what runs again."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1)
        self.block = nn.Sequential(self.conv, nn.ReLU())

    def forward(self, x):
        return self.conv(self.block(x))


def test_a_weight_shared_with_a_checkpoint_gets_its_whole_gradient(tmp_path):
    torch.manual_seed(0)
    path, new = tmp_path / "net.pt", tmp_path / "new.pt"
    torch.jit.script(Shared()).save(str(path))
    assert run("rewrite", path, "-o", new, "--amp", "bf16", "--checkpoint", "block").returncode == 0
    a, b = torch.jit.load(str(path)), torch.jit.load(str(new))
    x = torch.randn(2, 4, 8, 8)
    for _ in range(3):
        a.zero_grad(), b.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = a(x)
        y.float().square().sum().backward()
        b(x).square().sum().backward()
        for p, q in zip(a.parameters(), b.parameters()):
            torch.testing.assert_close(q.grad, p.grad, rtol=5e-2, atol=5e-2 * float(p.grad.abs().max()))


class WithBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, x):
        with torch.autocast("cpu", enabled=False):
            x = self.conv(x.float())
        return x


def test_a_block_of_the_models_own_is_refused(tmp_path):
    """TorchScript turns such a block inside out when it runs under another autocast: PyTorch's numbers are no guide."""
    path = tmp_path / "block.pt"
    torch.jit.script(nn.Sequential(WithBlock(), nn.ReLU())).save(str(path))
    fails(2, "rewrite", path, "-o", tmp_path / "x.pt", "--amp", "bf16", says=["autocast block", "leave amp out"])
    assert not (tmp_path / "x.pt").exists()
    assert run("rewrite", path, "-o", tmp_path / "x.pt").returncode == 0


def test_bad_use(original, tmp_path):
    fails(2, "rewrite", original, "-o", tmp_path / "x.pt", "--amp", "fp8", says="--amp")
    fails(2, "rewrite", original, "-o", tmp_path / "x.pt", "--restore", "--amp", "bf16", says="exclude")


def rewritten(tmp_path, net, *options):
    path, new = tmp_path / "net.pt", tmp_path / "new.pt"
    torch.jit.script(net).save(str(path))
    done = run("rewrite", path, "-o", new, "--force", "--amp", "bf16", *options)
    assert done.returncode == 0, done.stderr
    return torch.jit.load(str(path)), torch.jit.load(str(new))


@pytest.mark.parametrize("level", ["ops", "regions"])
def test_second_derivatives(tmp_path, level):
    """Of a cast that backward makes again too: the term of a gradient penalty through the weight."""
    pytorch, model = rewritten(tmp_path, nn.Sequential(nn.Conv2d(16, 32, 3, bias=False), nn.Tanh()), "--level", level)
    x = torch.randn(2, 16, 6, 6, requires_grad=True)

    def penalty(call, weight):
        (g,) = torch.autograd.grad(call(x).float().sum(), x, create_graph=True)
        return torch.autograd.grad(g.float().square().sum(), (x, weight))

    own = penalty(model, next(model.parameters()))
    for a, e in zip(own, penalty(pytorch, next(pytorch.parameters())), strict=True):
        assert (a - e).norm() < 3e-2 * e.norm()


def test_calls_inside_another_autocast_share_nothing(tmp_path):
    pytorch, model = rewritten(tmp_path, nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 4, 3)))
    x = torch.randn(2, 3, 9, 9)

    def grads(m, amp):
        m.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=amp):
            y = m(x)
        y.float().square().sum().backward()
        return [p.grad.clone() for p in m.parameters()]

    want = grads(pytorch, True)
    with torch.autocast("cpu", enabled=False):
        with torch.no_grad():
            model(x)
        model.zero_grad()
        model(x).square().sum().backward()
        for p, w in zip(model.parameters(), want):
            torch.testing.assert_close(p.grad, w, rtol=5e-2, atol=5e-2 * float(w.abs().max()))
        with torch.no_grad():
            before = model(x)
            for p in model.parameters():
                p.mul_(2.0)
            assert (model(x) - before).abs().max() > 0.1 * before.abs().max()
    with torch.inference_mode():
        model(x)
    model(x).sum().backward()


def test_profile_sees_through_it(tmp_path):
    """Memory and time belong to the ops and modules inside, not to the operator that calls them."""
    net = nn.Sequential(nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU()), nn.Sequential(nn.Conv2d(16, 8, 3), nn.ReLU()))
    rewritten(tmp_path, net, "--checkpoint", "1")
    done = run("profile", tmp_path / "new.pt", "--input", "4x3x20x20", "--json", tmp_path / "p.json")
    assert done.returncode == 0, done.stderr
    p = json.loads((tmp_path / "p.json").read_text())
    assert not any(o["op"] in ("tsmem::autocast", "tsmem::checkpoint") for o in p["ops"])
    rows = {m["path"]: m for m in p["modules"]}
    assert rows["0.0"]["forward_seconds"] > 0 and rows["1.0"]["forward_seconds"] > 0
    # What runs again as a whole in backward is one node's, which is the module's.
    assert rows["1"]["backward_seconds"] > 0 and rows["1.0"]["backward_seconds"] == 0
