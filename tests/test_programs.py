"""Small programs that a rewrite has to see through: each gives the numbers of the original at every level, or is left as it is."""
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import conftest
from command_line import run

conftest.load()


class Conv(nn.Module):
    def __init__(self, channels=4):
        super().__init__()
        self.conv = nn.Conv2d(channels, 4, 3, padding=1)

    def forward(self, x):
        return self.conv(x)


class Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)

    def forward(self, x):
        return F.relu(self.norm(self.conv(x)))


class HardsigmoidInPlace(Norm):
    """TorchScript's derivative is that of the one which is not in place: its sixth is no float32."""

    def forward(self, x):
        return F.hardsigmoid(self.norm(self.conv(x)), inplace=True) * F.hardsigmoid(self.conv(x) * 1.5, inplace=True)


class BranchGivesATensorOutTwice(Conv):
    def forward(self, x):
        if x.size(0) > 1:
            y = self.conv(x)
            identity = y
        else:
            y = self.conv(x)
            identity = self.conv(y)
        y = F.relu(y, inplace=True)
        return y + identity


class BranchGivesAnOverwrittenTensorOutTwice(Conv):
    def forward(self, x):
        if x.size(0) > 1:
            y = self.conv(x).add_(1.0)
            z = y
        else:
            y = self.conv(x)
            z = x
        y += 1.0
        y = F.relu_(y)
        return y * 2 + z


class OverwritesInsideNoGrad(Conv):
    def forward(self, x):
        y = self.conv(x)
        with torch.no_grad():
            y = F.relu_(y)
        return y * 2


class AddsInsideNoGrad(Conv):
    def forward(self, x):
        y = self.conv(x)
        with torch.no_grad():
            y += torch.sigmoid(x)
            y *= 0.5
        return torch.relu(y)


class OverwritesInABranchInsideNoGrad(Conv):
    def forward(self, x):
        y = self.conv(x)
        with torch.no_grad():
            if x.size(0) > 1:
                y = F.hardtanh_(y)
        return y * y


class SwishAfterNorm(Norm):
    def forward(self, x):
        y = self.norm(self.conv(x))
        return y * torch.sigmoid(y)


class HardtanhTimesNorm(Norm):
    def forward(self, x):
        y = self.norm(self.conv(x))
        return y * F.relu6(y)


class TwiceANorm(Norm):
    def forward(self, x):
        y = self.norm(self.conv(x))
        return F.relu(y + y)


class SquareOfAnActivation(Norm):
    def forward(self, x):
        y = F.silu(self.norm(self.conv(x)))
        z = F.gelu(self.conv(x))
        return y * y + z * z


class Concat(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(8, 4, 1)

    def forward(self, a, b):
        return self.conv(torch.cat([a, b], 1))


class WritesToAPieceLater(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.both = nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(8, 4, 1)

    def forward(self, x):
        a, b = self.first(x), self.second(x)
        z = self.both(torch.cat([a, b], 1))
        a += z
        return a


class OverwritesWhatABranchGivesForNothing(WritesToAPieceLater):
    def forward(self, x):
        a, b = self.first(x), self.second(x)
        if x.size(0) > 1:
            z = self.both(torch.cat([a, b], 1))
            v = a.view(a.size())
        else:
            z = a
            v = torch.relu(b)
        torch.selu_(v)
        return z


class CallerWritesToAPieceLater(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.concat = nn.Conv2d(4, 4, 1), Concat()

    def forward(self, x):
        a, b = self.conv(x), self.conv(x * 2)
        z = self.concat(b, self.concat(a, b))
        a += z
        return a


class LoopWritesToAPiece(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.concat = nn.Conv2d(4, 4, 1), Concat()

    def forward(self, x):
        a = self.conv(x)
        for _ in range(3):
            a += self.concat(a, x)
        return a


class WritesThroughAView(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.concat = nn.Conv2d(4, 4, 1), Concat()

    def forward(self, x):
        a = self.conv(x)
        z = self.concat(a, x)
        a[:, 0] = 1.0
        return a + z


class Giver(nn.Module):
    """Its argument or a view of it, which the operator's schema doesn't say; the linear layer's input is that, and it is overwritten later. PyTorch's own layer copies its input."""

    def __init__(self):
        super().__init__()
        self.conv, self.linear = nn.Conv2d(4, 4, 1), nn.Linear(4, 4)

    def forward(self, x):
        h = self.conv(x)
        y = self.linear(self.given(h).movedim(1, 3)).relu_()  # between what TorchScript doesn't differentiate by itself
        h.view(2, 4, 64).sub_(0.5)
        return y, h


class DropoutGives(Giver):
    def given(self, h: torch.Tensor):
        return F.dropout(h, 0.3, self.training)


class TypeAsGives(Giver):
    def given(self, h: torch.Tensor):
        return h.type_as(h)


class EinsumGives(Giver):
    def given(self, h: torch.Tensor):
        return torch.einsum("ncwh->nchw", h)


class SumToSizeGives(Giver):
    def given(self, h: torch.Tensor):
        return h.sum_to_size(list(h.shape))


class BroadcastGives(Giver):
    def given(self, h: torch.Tensor):
        return torch.broadcast_tensors([h, h])[0]


class ChunkGives(Giver):
    def given(self, h: torch.Tensor):
        return torch.unsafe_chunk(h, 1)[0]


class OverwritesWhatASpelledOutGeluTakes(nn.Module):
    """Neither the half of x nor its error function keeps x."""

    def forward(self, x):
        y = x * 0.5 * (1.0 + torch.erf(x / 1.4142135623730951))
        x.transpose(0, 1).add_(0.5)
        return y


class SigmoidOfSum(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm2d(4)

    def forward(self, x, r):
        return torch.sigmoid(self.norm(x) + r)


class CallerWritesToAResidualLater(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.end = nn.Conv2d(4, 4, 1), SigmoidOfSum()

    def forward(self, x):
        r = self.conv(x)
        z = self.end(x, r)
        r.add_(1.0)
        return z + r


class UnusedDropout(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.dropout = nn.Conv2d(4, 4, 1), nn.Dropout(0.5)

    def forward(self, x):
        unused = F.relu(self.dropout(x))
        other = F.dropout(x, 0.5, True)
        return self.dropout(self.conv(x))


class DropoutInPlaceOfWhatIsUsed(nn.Module):
    """Its result is not used, but it writes to a tensor of which something else is asked: it draws."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 1)

    def forward(self, x):
        v = self.conv(x)
        if v.requires_grad:
            unused = torch.dropout_(v, 0.3, self.training).clone()
            y = x * 2.0
        else:
            y = v
        return y + 1.0


class DropoutInPlaceOfWhatIsNotUsed(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 1)

    def forward(self, x):
        unused = torch.dropout_(self.conv(x), 0.3, self.training).clone()
        both = torch.dropout_(self.conv(x), 0.3, self.training)
        return x * 2.0 + both


class NormAndDeadDropout(nn.Module):
    def __init__(self):
        super().__init__()
        self.mean, self.var, self.dropout = nn.Buffer(torch.zeros(4)), nn.Buffer(torch.ones(4)), nn.Dropout2d(0.3, inplace=True)

    def forward(self, x):
        unused = self.dropout(F.batch_norm(x, self.mean, self.var))
        return x, x


class DeadDropoutInALoop(nn.Module):
    """TorchScript takes the dropout out of the method that is called, and would not find it dead in the loop."""

    def __init__(self):
        super().__init__()
        self.called, self.conv = NormAndDeadDropout(), nn.Conv2d(4, 4, 1)

    def forward(self, x):
        y = x
        for i in range(2):
            y, _ = self.called(y)
        return F.gelu(self.conv(y))


class DropoutBesideSqueeze(nn.Module):
    """LibTorch's pass that groups what it differentiates throws for this graph."""

    def forward(self, x):
        v = x[:1].squeeze()
        a, _ = F.max_pool2d(v, 3, 1, 1, return_indices=True)
        b = 0.01 * (x[:1].mean() + v.mean() + a.mean())
        return F.dropout(x, 0.5, self.training) + b


class DropoutAmongSqueezes(nn.Module):
    def forward(self, x):
        y = x[:1]
        v = y.squeeze()
        a, i = F.max_pool2d(v, 3, 1, 1, return_indices=True)
        b = 0.01 * (y.mean() + y.mean() + v.mean() + a.mean())
        return F.dropout(x, 0.5, self.training) + b, x, y


class ReturnsItsArgument(nn.Module):
    def forward(self, x):
        return x


class WritesToWhatACallReturned(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.same = nn.Conv2d(4, 4, 1), ReturnsItsArgument()

    def forward(self, x):
        y = self.conv(x)
        z = self.same(y)
        z = F.relu_(z)
        return z + y


class UnusedNormInAList(Norm):
    def forward(self, x):
        y = self.conv(x)
        both = [y, self.norm(y)]
        return F.relu(both[0])


class OverwritesWhatADropoutOfNothingGives(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.dropout = nn.LayerNorm(4), nn.Dropout(0.0)

    def forward(self, x):
        y = self.norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        y = self.dropout(y)
        return F.relu6(y, inplace=True) + F.silu(x)


class OverwritesWhatADropoutGivesInEvaluation(nn.Module):
    """TorchScript may keep what is before the dropout, for its own derivative: its dropout makes a tensor, in evaluation too."""

    def forward(self, x):
        y = F.softplus(torch.sigmoid(x) * x, 2.0, 10.0)
        return F.relu(F.dropout(y, 0.3, self.training), inplace=True)


class OverwritesAViewOfADropout(nn.Module):
    """The dropout's argument is what backward needs of the operator before, and its result what it needs of the one behind."""

    def forward(self, x):
        y = F.dropout(torch.tanh(x), 0.3, self.training)
        y.view(-1).sub_(1.0)
        z = F.dropout(torch.sigmoid(y), 0.3, self.training)
        z.mul_(x)
        return torch.tanh(y) * z


class UnusedCall(nn.Module):
    def __init__(self):
        super().__init__()
        self.unused, self.conv = Norm(), nn.Conv2d(4, 4, 1)

    def forward(self, x):
        self.unused(x)
        return self.conv(x)


class UnusedActivationOfANorm(Norm):
    # The activation is a function of PyTorch's, which leaves nothing of itself; the norm runs, for its statistics.
    def forward(self, x):
        y = torch.batch_norm(x, self.norm.weight, self.norm.bias, self.norm.running_mean, self.norm.running_var, self.training, 0.1, 1e-5, False)
        y = F.elu(y, 0.5)
        return F.max_pool2d(x, 3, 1, 1, return_indices=True)[0]


class UnusedNormInATuple(Norm):
    def forward(self, x):
        y = self.conv(x)
        both = (y, self.norm(y))
        return F.relu(both[0])


class UnusedNormInADictionary(Norm):
    def forward(self, x):
        y = self.conv(x)
        both = {"plain": y, "norm": self.norm(y)}
        return F.relu(both["plain"])


class NormBehindAList(Norm):
    def forward(self, x):
        y = [self.conv(x)]
        z = [x, self.norm(y[0])]
        return F.relu(z[1]) + len(y)


class OverwrittenListBehindANorm(Norm):
    def forward(self, x):
        y = [self.conv(x)]
        z = self.norm(y[0])
        y[0] = x
        return F.relu(z) + y[0]


class SumOfTwoLayouts(Norm):
    def forward(self, x):
        y = x.contiguous(memory_format=torch.channels_last)
        z = F.silu(y + self.norm(self.conv(x)))
        return z, F.silu(self.norm(self.conv(x)) + y), y * torch.sigmoid(self.norm(z.contiguous()))


class UnusedDropoutInALoop(nn.Module):
    def forward(self, x):
        y = F.dropout(x, 0.5, self.training)
        for z in [y, y]:
            x = F.relu(x) + 1
        return x


class UnusedNormOfADropout(Norm):
    def forward(self, x):
        y = self.conv(x)
        torch.batch_norm(F.dropout(y, 0.5, self.training), None, None, self.norm.running_mean, self.norm.running_var, True, 0.1, 1e-5, True)
        return F.dropout(F.relu(y), 0.5, self.training)


class UnusedDropoutsInACallThatReturnsItsArgument(nn.Module):
    def __init__(self):
        super().__init__()
        self.same = DropsForNothing()

    def forward(self, x):
        return F.dropout(self.same(x), 0.5, self.training)


class DropsForNothing(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Dropout(0.3), nn.Dropout(0.3)

    def forward(self, x):
        self.b(self.a(x))
        return x


class OverwritesAnUnusedNorm(Norm):
    """Among calls it can't be told that the write is dead; with all of them inlined it can."""

    def forward(self, x):
        y = self.norm(self.conv(x))
        z = F.celu(y)
        w = torch.tanh_(y)
        F.threshold(w, 0.25, -1.0)
        return self.conv(z)


class OverwritesASourceForNothing(Norm):
    def forward(self, x):
        a, b = F.relu(self.conv(x)), self.conv(x) * 2
        y = self.norm(self.conv(torch.cat([a, b], 1)[:, 2:6]))
        for z in [y, x]:
            F.mish(b, inplace=True)
            y = F.relu(y) + F.dropout(z, 0.5, self.training)
        return y


class OverwritesATensorOfAListForNothing(Conv):
    """The dropout is dead, as what it is made for is a write that nothing sees: TorchScript can tell beside aten::cat alone."""

    def forward(self, x):
        x = F.max_pool2d(x, 3, 1, 1)
        if x.size(0) > 2:
            F.glu(torch.cat([x, x], 1), 1)
            y = x * 2.0
        else:
            y = x
        noise = F.dropout(y, 0.2, True)
        z = self.conv(x) + y
        y -= noise
        return z


class PaddingSame(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(4, 4, 3, padding="same"), nn.BatchNorm2d(4)

    def forward(self, x):
        return F.relu(self.norm(self.conv(x)))


class TwoNorms(nn.Module):
    """The last layer's norms are not used: TorchScript does not run them, nor would it without a checkpoint around them."""

    def __init__(self):
        super().__init__()
        self.used, self.unused = Norm(), Norm()
        self.both = Branches()

    def forward(self, x):
        y = self.used(x)
        self.unused(y)
        z, _ = self.both(y)
        self.used(y)
        return z


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = Norm(), Norm()

    def forward(self, x):
        return self.a(x), self.b(x)


class Detached(nn.Module):
    """Results that need no gradient: of the argument's memory and of its own, as views and as whole tensors."""

    def forward(self, x):
        y = torch.sigmoid(x)
        with torch.no_grad():
            z = torch.tanh(x)
        return y, x.detach(), y.detach(), y.detach()[:1], y[1:], z, z[:1], torch.ones_like(x)


class UsesDetached(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.detached = nn.Conv2d(4, 4, 1), Detached()

    def forward(self, x):
        return self.detached(self.conv(x))


class UnusedDropoutsThatAreOverwritten(nn.Module):
    def __init__(self):
        super().__init__()
        self.drop, self.conv = nn.AlphaDropout(0.3), nn.Conv2d(4, 4, 1)

    def forward(self, x):
        y, _ = self.twice(x)
        self.twice(y)
        return self.conv(x)

    def twice(self, x):
        y = self.conv(self.drop(x))
        z = y * 2
        z.tanh_()
        return y, z[:]


class TwoDrawsOfOneTensor(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 1)

    def forward(self, x):
        x = self.conv(x)
        return F.dropout(x, 0.5, self.training) - F.dropout(x, 0.5, self.training)


class TwoDrawsOfOneAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        x = self.linear(x)
        return F.scaled_dot_product_attention(x, x, x, None, 0.5) - F.scaled_dot_product_attention(x, x, x, None, 0.5)


class Counts(nn.Module):
    """Reads a buffer that it has overwritten, by a product, which keeps it, and by a sum, which does not."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 1)
        self.register_buffer("calls", torch.zeros(4, 1, 1))

    def forward(self, x, unused):
        self.calls.add_(1.0)
        y = self.conv(x + self.calls)
        return y * y * (self.calls + 1) * self.calls.clone(), x


class UsesCounts(nn.Module):
    def __init__(self):
        super().__init__()
        self.counts, self.norm, self.linear = Counts(), nn.BatchNorm2d(4), nn.Linear(8, 8)

    def forward(self, x):
        y, z = self.counts(x, self.linear(x))
        y, _ = self.counts(self.norm(y), F.softsign(self.linear(x)))
        return F.relu(y) + z


class BlockWithAResidual(Norm):
    def forward(self, x):
        y = self.norm(self.conv(x))
        y += x
        return F.relu(y, inplace=True)


class BlocksThatOverwriteTheirSums(nn.Module):
    """A sum that is overwritten later is no argument of the calls before, although what was added to it is."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(BlockWithAResidual(), BlockWithAResidual())

    def forward(self, x):
        return self.blocks(F.relu(x * 2, inplace=True))


class OverwritesAResidualForNothing(Norm):
    """Nothing sees the write; a smooth activation's derivative needs the residual."""

    def forward(self, x):
        r = x * 1.0
        y = self.norm(x)
        y += r
        y = F.hardswish(y, inplace=True)
        r[:, 0] = r[:, 1]
        return y


class GivesAView(nn.Module):
    def __init__(self, without_grad: bool):
        super().__init__()
        self.conv, self.without_grad = nn.Conv2d(4, 4, 1), without_grad

    def forward(self, x):
        y = self.conv(x)
        with torch.no_grad():
            a, b = x.view(x.size()), y.narrow(1, 0, 2)
        return (a, b, y) if self.without_grad else (a * 1, b * 1, y)


class CallsGiveViewsMadeUnderNoGrad(nn.Module):
    """They pass no gradient on, and what they are views of does."""

    def __init__(self):
        super().__init__()
        self.before, self.views, self.others = Norm(), GivesAView(True), GivesAView(False)

    def forward(self, x):
        x = self.before(x)
        a, b, y = self.views(x)
        c, d, z = self.others(x)
        return torch.clip(a, 0.0, 6.0), b * 2, y, c, d, z


class CallOnAViewMadeUnderNoGrad(nn.Module):
    """Such a view says that it needs a gradient, and passes none on."""

    def __init__(self):
        super().__init__()
        self.called = nn.ReLU()

    def forward(self, x):
        with torch.no_grad():
            v = x[:]
        return self.called(v), x * 2


class Centred(nn.Module):
    """The mean of a norm's earlier calls is taken off, and the norm moves it on."""

    def __init__(self):
        super().__init__()
        self.linear, self.norm, self.scale = nn.Linear(8, 8), nn.BatchNorm2d(4), nn.Parameter(torch.randn(8))

    def mean(self):
        mean = self.norm.running_mean
        assert mean is not None
        return mean.view(-1, 1, 1)

    def forward(self, x):
        h = F.silu(self.linear(x))
        return (h - self.mean()) * self.scale + self.norm(h)


class CentredAfterTheNorm(Centred):
    def forward(self, x):
        h = F.silu(self.linear(x))
        y = self.norm(h)
        return (h - self.mean()) * self.scale + y


class WhitenedByBuffers(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.scale = nn.Linear(8, 8), nn.Parameter(torch.randn(8))
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("var", torch.ones(4))

    def forward(self, x):
        h = F.silu(self.linear(x))
        z = (h - self.mean.view(4, 1, 1)) / torch.sqrt(self.var.view(4, 1, 1) + 1e-5)
        return z * self.scale + F.batch_norm(h.detach(), self.mean, self.var, None, None, True, 0.1)


class MovesABufferAndReadsIt(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.scale = nn.Linear(8, 8), nn.Parameter(torch.randn(8))
        self.register_buffer("moved", torch.zeros(8))

    def forward(self, x):
        self.moved.add_(0.1)
        h = F.silu(self.linear(x))
        return (h - self.moved) * self.scale


class OverwritesWhatTheIterationBeforeMade(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        h = torch.zeros_like(x)
        out = torch.zeros_like(x)
        for _ in range(2):
            h.add_(1.0)
            y = self.linear(x)
            out = out + 0.5 * y * (1 + torch.erf(y / 1.4142135623730951))
            h = y
        return out


class FillsAMaskAnew(nn.Module):
    def forward(self, x):
        mask = torch.zeros(8, 8, dtype=x.dtype)
        allowed = torch.ones(8, 8, dtype=torch.bool).tril()
        y = F.scaled_dot_product_attention(x, x, x, mask, 0.3) + F.scaled_dot_product_attention(x, x, x, allowed)
        mask.fill_(-1.0)
        allowed.logical_not_().fill_diagonal_(True)
        return y + F.scaled_dot_product_attention(x, x, x, mask) + F.scaled_dot_product_attention(x, x, x, allowed)


class ProductsInPlace(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))

    def forward(self, x):
        y = x.flatten(0, 2)
        a = torch.zeros_like(y.t()).addmm_(self.weight, torch.relu(y).t())
        z = x.flatten(0, 1)
        b = torch.zeros_like(z.transpose(1, 2)).baddbmm_(torch.sigmoid(z).transpose(1, 2), z)
        return a, b


class WritesToALossesRowsLater(Conv):
    """PyTorch's linear layer keeps a copy of the rows, which are a view here."""

    def __init__(self):
        super().__init__()
        self.last = nn.Linear(4, 40)

    def forward(self, x):
        y = self.conv(x)
        rows = y.permute(0, 2, 3, 1).reshape(2, 64, 4)
        loss = F.cross_entropy(self.last(rows).reshape(128, 40), torch.arange(128) % 40, reduction="none")
        y *= 2.0
        return y + loss.mean()


class NegatedView(Conv):
    def __init__(self):
        super().__init__()
        self.last = nn.Linear(4, 4)

    def forward(self, x):
        y = F.silu(self.conv(x))
        return self.last(torch.imag(torch.conj(torch.view_as_complex(y.view(2, 4, 8, 4, 2)))))


class GradientOfAConjugate(Norm):
    def forward(self, x):
        y = self.norm(self.conv(x))
        return torch.view_as_real(torch.conj(torch.complex(y, F.relu(self.norm(x)))) * torch.complex(x, x))


PROGRAMS = [
    Centred,
    CentredAfterTheNorm,
    WhitenedByBuffers,
    MovesABufferAndReadsIt,
    OverwritesWhatTheIterationBeforeMade,
    FillsAMaskAnew,
    ProductsInPlace,
    OverwritesAResidualForNothing,
    CallOnAViewMadeUnderNoGrad,
    CallsGiveViewsMadeUnderNoGrad,
    BlocksThatOverwriteTheirSums,
    UnusedDropoutsThatAreOverwritten,
    TwoDrawsOfOneTensor,
    TwoDrawsOfOneAttention,
    UsesCounts,
    UnusedNormInAList,
    OverwritesWhatADropoutGivesInEvaluation,
    UnusedCall,
    UnusedActivationOfANorm,
    OverwritesWhatADropoutOfNothingGives,
    OverwritesAViewOfADropout,
    UnusedNormInATuple,
    UnusedNormInADictionary,
    NormBehindAList,
    OverwrittenListBehindANorm,
    SumOfTwoLayouts,
    UnusedDropoutInALoop,
    UnusedNormOfADropout,
    UnusedDropoutsInACallThatReturnsItsArgument,
    OverwritesAnUnusedNorm,
    OverwritesASourceForNothing,
    OverwritesATensorOfAListForNothing,
    PaddingSame,
    TwoNorms,
    UsesDetached,
    BranchGivesATensorOutTwice,
    BranchGivesAnOverwrittenTensorOutTwice,
    OverwritesInsideNoGrad,
    AddsInsideNoGrad,
    OverwritesInABranchInsideNoGrad,
    SwishAfterNorm,
    HardtanhTimesNorm,
    TwiceANorm,
    SquareOfAnActivation,
    WritesToAPieceLater,
    OverwritesWhatABranchGivesForNothing,
    CallerWritesToAPieceLater,
    LoopWritesToAPiece,
    WritesThroughAView,
    OverwritesWhatASpelledOutGeluTakes,
    DropoutGives,
    TypeAsGives,
    EinsumGives,
    SumToSizeGives,
    BroadcastGives,
    ChunkGives,
    CallerWritesToAResidualLater,
    UnusedDropout,
    DropoutInPlaceOfWhatIsUsed,
    DropoutInPlaceOfWhatIsNotUsed,
    DeadDropoutInALoop,
    DropoutBesideSqueeze,
    DropoutAmongSqueezes,
    WritesToWhatACallReturned,
    WritesToALossesRowsLater,
    NegatedView,
    GradientOfAConjugate,
    Norm,
    HardsigmoidInPlace,
]
CHECKPOINTED = ["TwoNorms.used", "TwoNorms.unused", "TwoNorms.both.?", "UsesDetached.detached", "UsesCounts.counts", "BlocksThatOverwriteTheirSums.blocks.?", "CallOnAViewMadeUnderNoGrad.called", "CallsGiveViewsMadeUnderNoGrad.*s"]
LEVELS = {
    "regions": [],
    "ops": ["--level", "ops"],
    "conv-bn-act": ["--only", "conv-bn-act"],
    "conv-bn-act-recompute": ["--only", "conv-bn-act-recompute"],
    "checkpoint": [part for glob in CHECKPOINTED for part in ("--checkpoint", glob)],
}


class Programs(nn.Module):
    """All of them in one file: each is called on its own."""

    def __init__(self):
        super().__init__()
        for program in PROGRAMS:
            self.add_module(program.__name__, program())

    def forward(self, x):
        return x


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("programs")
    torch.manual_seed(0)
    torch.jit.script(Programs().double()).save(str(folder / "original.pt"))
    for level, options in LEVELS.items():
        done = run("rewrite", folder / "original.pt", "-o", folder / f"{level}.pt", *options)
        assert done.returncode == 0, f"{level}: {done.stderr}"
    # An original for each level, as TorchScript's first calls run what is unused, and later ones don't.
    return {level: [torch.jit.load(str(folder / f"{name}.pt")) for name in ("original", level)] for level in LEVELS}


# TorchScript's own dropout of nothing draws from the third call on, and ours at once.
DRAWS_LATER = ["OverwritesWhatADropoutOfNothingGives"]


def record(model, training):
    """What four calls give: outputs, gradients, buffers, whether outputs need a gradient, their strides, the generator's state."""
    start = {name: value.clone() for name, value in model.state_dict().items()}
    model.train(training)
    tensors, facts = [], []
    for seed in range(4):
        torch.manual_seed(seed)
        x = torch.randn(2, 4, 8, 8, dtype=torch.double, requires_grad=True)
        model.zero_grad()
        out = model(x * 1)
        outs = [out] if isinstance(out, torch.Tensor) else list(out)
        facts.append([(o.requires_grad, o.stride()) for o in outs])
        facts.append(torch.get_rng_state().tolist())
        torch.manual_seed(seed)
        torch.autograd.backward([o for o in outs if o.requires_grad], [torch.randn_like(o) for o in outs if o.requires_grad])
        grads = [p.grad for p in [x, *model.parameters()]]
        facts.append([g is None for g in grads])
        facts.append(torch.get_rng_state().tolist())
        tensors += [o.detach().clone() for o in outs] + [g for g in grads if g is not None] + [b.clone() for b in model.buffers()]
    model.load_state_dict(start)
    return tensors, facts


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("program", [p.__name__ for p in PROGRAMS])
def test_same_numbers(models, program, level):
    for training in (True, False):
        a, b = (getattr(model, program) for model in models[level])
        (x, facts), (y, other) = record(a, training), record(b, training)
        if program in DRAWS_LATER:
            facts, other = ([fact for i, fact in enumerate(all) if i not in (1, 5)] for all in (facts, other))
        assert facts == other
        for s, t in zip(x, y, strict=True):
            torch.testing.assert_close(t, s, rtol=1e-9, atol=1e-9)


def gradients_of_two_calls(model):
    """What one backward through two calls gives; the error where it raises."""
    start = {name: value.clone() for name, value in model.state_dict().items()}
    model.train()
    torch.manual_seed(0)
    inputs = [torch.randn(2, 4, 8, 8, dtype=torch.double, requires_grad=True) for _ in range(2)]
    try:
        outs = [o for x in inputs for out in [model(x * 1)] for o in ([out] if isinstance(out, torch.Tensor) else out) if o.requires_grad]
        return torch.autograd.grad(sum((o * torch.randn_like(o)).sum() for o in outs), [*inputs, *model.parameters()], allow_unused=True)
    except RuntimeError as error:
        return str(error)
    finally:
        model.load_state_dict(start)


@pytest.mark.parametrize("level", LEVELS)
def test_same_gradients_of_two_calls(models, level):
    """The second call may overwrite what the first one has read."""
    compared = 0
    for program in PROGRAMS:
        a, b = (gradients_of_two_calls(getattr(model, program.__name__)) for model in models[level])
        if isinstance(a, str):  # some overwrite their own parameters' views or buffers, which PyTorch's backward refuses
            continue
        assert not isinstance(b, str), f"{program.__name__}: {b}"
        compared += 1
        for s, t in zip(a, b, strict=True):
            if s is None or t is None:  # zeros may be none
                s, t = (g if g is not None else torch.zeros_like(other) if other is not None else torch.zeros(1) for g, other in ((s, t), (t, s)))
            torch.testing.assert_close(t, s, rtol=1e-9, atol=1e-9, msg=lambda m: f"{program.__name__}: {m}")
    assert compared > len(PROGRAMS) // 2


class DropsForNothingBefore(nn.Module):
    """TorchScript differentiates the layers by itself and moves them, and what their dropout draws for nothing, behind the other dropout."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.SiLU(), nn.Dropout(0.0), nn.Linear(8, 8))

    def forward(self, x):
        y = self.layers(x)
        return F.dropout(torch.log1p(x.abs()), 0.3, self.training), y


class DropsForNothingAndViews(DropsForNothingBefore):
    """Here it leaves them in their place."""

    def forward(self, x):
        y = self.layers(x).view(2, 4, 64)
        return F.dropout(torch.log1p(x.abs()), 0.3, self.training), y


class DropsForNothingBesideAttention(DropsForNothingBefore):
    """Attention that drops nothing in training either and a dropout of nothing in place, as they draw nothing, are no border between what draws. The second layers' draw is moved behind the dropout."""

    def __init__(self):
        super().__init__()
        self.others = nn.Sequential(nn.Linear(8, 8), nn.SiLU(), nn.Dropout(0.0), nn.Linear(8, 8))

    def forward(self, x):
        y = F.dropout(self.layers(x), 0.0, self.training, inplace=True)
        y = F.scaled_dot_product_attention(y, x, y, dropout_p=0.0 if self.training else 0.0)
        y = self.others(y)
        return F.dropout(torch.log1p(x.abs()).view(2, 4, 64), 0.3, self.training), y


class DropsForNothingAndScales(DropsForNothingBefore):
    """What the dropout of nothing gives is overwritten, as a transformer's layers scale it: TorchScript differentiates the dropout with the linear layer before it."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.SiLU(), nn.Linear(8, 8), nn.Dropout(0.0))
        self.gamma = nn.Parameter(torch.full((8,), 0.5))

    def forward(self, x):
        y = self.layers(x)
        y.mul_(self.gamma)
        return F.dropout(torch.log1p((x + y).abs()), 0.3, self.training), y


@pytest.mark.parametrize("options", [["--level", "regions"], ["--level", "ops"], ["--checkpoint", "layers"], ["--skip", "dropout"], ["--only", "linear"]])
@pytest.mark.parametrize("program", [DropsForNothingBefore, DropsForNothingAndViews, DropsForNothingBesideAttention, DropsForNothingAndScales])
def test_draws_behind_a_dropout_of_nothing(program, options, tmp_path):
    """They are those of the original's later calls."""
    torch.manual_seed(0)
    torch.jit.script(program()).save(str(tmp_path / "original.pt"))
    done = run("rewrite", tmp_path / "original.pt", "-o", tmp_path / "rewritten.pt", *options)
    assert done.returncode == 0, done.stderr

    def dropped(name):
        model = torch.jit.load(str(tmp_path / name))
        outputs = []
        for _ in range(4):
            torch.manual_seed(1)
            x = torch.ones(2, 4, 8, 8, requires_grad=True)
            out = model(x * 1)
            sum(o.sum() for o in out).backward()
            outputs.append(out[0].detach())
        return outputs

    if options[0] == "--level":
        assert "tsmem.dropout" in torch.jit.load(str(tmp_path / "rewritten.pt")).code + torch.jit.load(str(tmp_path / "rewritten.pt")).layers.code
    for mine, pytorchs in zip(dropped("rewritten.pt")[2:], dropped("original.pt")[2:], strict=True):
        torch.testing.assert_close(mine, pytorchs)


class NormForADeadBranch(nn.Module):
    """TorchScript runs the norm in every call: it differentiates it together with the sum before it, which is used. Rewritten, that sum is another operator."""

    def __init__(self):
        super().__init__()
        self.conv, self.layer_norm, self.norm, self.other = nn.Conv2d(4, 4, 3, padding=1), nn.LayerNorm(8), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 1)

    def forward(self, x):
        y = self.conv(x)
        z = self.layer_norm(y)
        total = x + z
        total = torch.where(total > 0, total, 0.25 * total)
        total = torch.batch_norm(total, self.norm.weight, self.norm.bias, self.norm.running_mean, self.norm.running_var, self.training, 0.1, 1e-5, False)
        if x.size(0) > 1:
            self.other(F.dropout(total, 0.5, True))
            overwritten, result = z.clone(), z
        else:
            overwritten = self.other(y)
            result = overwritten
        F.elu(overwritten, 0.5, inplace=True)
        return result


class NormForADeadWrite(nn.Module):
    """TorchScript drops the norm from the second call on: what is made of it only overwrites something that is not looked at any more."""

    def __init__(self):
        super().__init__()
        self.conv, self.pool, self.fc = nn.Conv2d(4, 4, 3, padding=1), nn.AdaptiveAvgPool2d(1), nn.Conv2d(4, 4, 1)
        self.layers = nn.Sequential(nn.BatchNorm2d(4), nn.SiLU(), nn.MaxPool2d(3, 1, 1))

    def forward(self, x):
        y = self.conv(x)
        z = F.relu(x + x)
        z = z * torch.sigmoid(self.fc(self.pool(z))).expand_as(z)
        seen = self.layers(z)
        pooled = F.avg_pool2d(x, 3, 1, 1)
        y.add_(F.relu(seen))
        return torch.tanh(pooled)


class NormBesideWhatIsSimplified(nn.Module):
    """Traced, without a branch: TorchScript drops the unused norm in each call all the same, as it drops what else is dead."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.fc = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Linear(4, 4)

    def forward(self, x):
        y = self.conv(x)
        z = self.fc(self.norm(y).permute(0, 2, 3, 1).reshape(2, 64, 4))
        F.dropout(z, 0.2, True)
        return F.relu(y) + y.narrow(0, 0, y.size(0))


class NormThatIsOverwritten(nn.Module):
    """TorchScript runs the norm in the first call. Where its code is inlined, to read the file folds constants, and drops the write that was its use."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)

    def forward(self, x):
        y = self.norm(self.conv(x))
        y.mul_(0.5)
        return self.conv(x)


def test_a_norm_that_only_a_dead_write_uses(tmp_path):
    torch.manual_seed(0)
    torch.jit.script(NormThatIsOverwritten().double()).save(str(tmp_path / "original.pt"))
    done = run("rewrite", tmp_path / "original.pt", "-o", tmp_path / "rewritten.pt")
    assert done.returncode == 0, done.stderr
    models = [torch.jit.load(str(tmp_path / f"{name}.pt")) for name in ("original", "rewritten")]
    x = torch.randn(2, 4, 8, 8, dtype=torch.double, requires_grad=True)
    for model in models:
        model(x * 1).sum().backward()
    assert models[0].norm.running_mean.abs().max() > 0
    for ours, pytorchs in zip(*(m.buffers() for m in models), strict=True):
        torch.testing.assert_close(ours, pytorchs)


@pytest.mark.parametrize("options", [[], ["--level", "ops"], ["--only", "mul"], ["--only", "conv"]])
@pytest.mark.parametrize("how", ["script", "trace"])
@pytest.mark.parametrize("program", [NormForADeadBranch, NormForADeadWrite, NormBesideWhatIsSimplified])
def test_norms_that_only_dead_code_uses(program, how, options, tmp_path):
    """They run in the calls in which the original's run, whatever becomes of the code around them."""
    torch.manual_seed(0)
    model = program().double()
    module = torch.jit.script(model) if how == "script" else torch.jit.trace(model, torch.randn(2, 4, 8, 8, dtype=torch.double), check_trace=False)
    module.save(str(tmp_path / "original.pt"))
    done = run("rewrite", tmp_path / "original.pt", "-o", tmp_path / "rewritten.pt", *options)
    assert done.returncode == 0, done.stderr
    original, rewritten = (torch.jit.load(str(tmp_path / f"{name}.pt")) for name in ("original", "rewritten"))
    for call in range(4):
        x = torch.randn(2, 4, 8, 8, dtype=torch.double, requires_grad=True)
        for model in (original, rewritten):
            model(x * 1).sum().backward()
        for (name, theirs), ours in zip(original.named_buffers(), rewritten.buffers(), strict=True):
            torch.testing.assert_close(ours, theirs, msg=lambda m: f"call {call}: {name}: {m}")


class NumbersBesideALoss(nn.Module):
    """Traced, each number is a float64 tensor without dimensions, as the loss is a float32 one."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 1)

    def forward(self, x):
        y = F.relu(self.conv(x))
        z = torch.sigmoid(0.5 * y - 2.0) / 4.0
        loss, other = (y * y).mean(), z.abs().sum()
        return 0.5 * torch.tanh(loss), torch.sigmoid(other) + 2.5, other * 3.0 - 1.5, torch.exp(loss) / 8.0, z


@pytest.mark.parametrize("options", [[], ["--level", "ops"]])
def test_traced_numbers_stay_numbers(options, tmp_path):
    torch.manual_seed(0)
    x = torch.randn(2, 4, 8, 8)
    torch.jit.trace(NumbersBesideALoss(), x).save(str(tmp_path / "original.pt"))
    done = run("rewrite", tmp_path / "original.pt", "-o", tmp_path / "rewritten.pt", *options)
    assert done.returncode == 0, done.stderr
    original, rewritten = (torch.jit.load(str(tmp_path / f"{name}.pt")) for name in ("original", "rewritten"))
    for _ in range(3):
        for theirs, ours in zip(original(x), rewritten(x), strict=True):
            assert theirs.dtype == ours.dtype == torch.float32
            torch.testing.assert_close(ours, theirs)
        for model in (original, rewritten):
            sum(o.sum() for o in model(x)).backward()
        for theirs, ours in zip(original.parameters(), rewritten.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad)


class LowRank(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.down, self.up, self.dropout = nn.Linear(32, 32), nn.Linear(32, 4, bias=False), nn.Linear(4, 32, bias=False), nn.Dropout(0.1)

    def forward(self, x):
        return self.linear(x) + self.up(self.down(self.dropout(x)))


class DrawsInAnotherOrder(nn.Module):
    """TorchScript runs the second dropout before the first, from its second call on."""

    def __init__(self):
        super().__init__()
        self.q, self.v = LowRank(), LowRank()

    def forward(self, x):
        q, v = self.q(x), self.v(x).view(-1, 32)
        return q.view(-1, 32) * v


class LeastOfEquals(nn.Module):
    """TorchScript's own derivative gives neither of two equal elements a gradient, from its second call on."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(32, 4)

    def forward(self, x):
        y = self.linear(x)
        ratio = torch.exp(y - y.detach())
        return torch.min(ratio * 2.0, ratio.clamp(0.8, 1.2) * 2.0)


@pytest.mark.parametrize("program", [DrawsInAnotherOrder, LeastOfEquals])
def test_as_written_where_torchscript_is_not(program, tmp_path):
    """The rewritten model gives eager PyTorch's numbers in each call, and verification says what it compared with."""
    torch.manual_seed(0)
    model, x = program().double(), torch.randn(2, 16, 32, dtype=torch.double)
    torch.jit.script(model).save(str(tmp_path / "original.pt"))
    done = run("rewrite", tmp_path / "original.pt", "-o", tmp_path / "rewritten.pt", "--input", "2x16x32:f64")
    assert done.returncode == 0 and "ran without TorchScript's optimiser" in done.stdout, done.stdout + done.stderr
    verified = run("verify", tmp_path / "original.pt", tmp_path / "rewritten.pt", "--input", "2x16x32:f64")
    assert verified.returncode == 0 and "once TorchScript has optimised it" in verified.stdout, verified.stdout + verified.stderr
    rewritten = torch.jit.load(str(tmp_path / "rewritten.pt"))
    for seed in range(4):
        results = []
        for m in (model, rewritten):
            m.zero_grad()
            torch.manual_seed(seed)
            y = m(x)
            y.pow(2).sum().backward()
            results.append([y.detach(), *(p.grad for p in m.parameters())])
        torch.testing.assert_close(results[1], results[0])


class DropsAllBesideACall(nn.Module):
    """Whether the dropout of everything draws depends on what TorchScript differentiates together in the original, where the call is no border."""

    def __init__(self):
        super().__init__()
        self.drop = nn.Dropout(1.0)
        self.mlp = nn.Sequential(nn.Linear(4, 8), nn.SiLU(), nn.Dropout(0.2), nn.Linear(8, 4))

    def forward(self, x):
        y = self.drop(x * 2).unsqueeze(0).squeeze(0)
        z = x.permute(0, 2, 3, 1).contiguous().view(2, 64, 4)
        return y, (z + self.mlp(z)).transpose(1, 2).unflatten(2, [8, 8])


def test_draws_beside_a_call_that_runs_again(tmp_path):
    torch.manual_seed(0)
    torch.jit.script(DropsAllBesideACall()).save(str(tmp_path / "original.pt"))
    done = run("rewrite", tmp_path / "original.pt", "-o", tmp_path / "rewritten.pt", "--checkpoint", "mlp")
    assert done.returncode == 0, done.stderr
    models = [torch.jit.load(str(tmp_path / f"{name}.pt")) for name in ("original", "rewritten")]
    for call in range(4):
        outputs = []
        for model in models:
            torch.manual_seed(call)
            outputs.append(model(torch.randn(2, 4, 8, 8, requires_grad=True) * 1))
            sum(o.sum() for o in outputs[-1]).backward()
        if call > 1:  # TorchScript's own draws differ before
            torch.testing.assert_close(*outputs)


class MaskedLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.attention, self.out = nn.LayerNorm(16), nn.MultiheadAttention(16, 2, dropout=0.1), nn.Linear(16, 16)
        self.statistics = nn.BatchNorm1d(16)

    def forward(self, x, padding: torch.Tensor):
        y = self.norm(x)
        y, _ = self.attention(query=y, key=y, value=y, key_padding_mask=padding, need_weights=False)
        y = x + self.out(y)
        return self.statistics(y.permute(1, 2, 0)).permute(2, 0, 1)


class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([MaskedLayer() for _ in range(2)])

    def forward(self, x, padding: torch.Tensor):
        for layer in self.layers:
            x = layer(x, padding)
        return x


def test_masks_and_statistics_of_later_layers_stand_in_no_way(tmp_path):
    """Each layer fills a new mask in place and moves a norm's statistics: memory that the attention before it has nothing of."""
    torch.manual_seed(0)
    torch.jit.script(Masked().double()).save(str(tmp_path / "original.pt"))
    done = run("rewrite", tmp_path / "original.pt", "-o", tmp_path / "rewritten.pt")
    assert done.returncode == 0, done.stderr
    original, rewritten = (torch.jit.load(str(tmp_path / name)) for name in ("original.pt", "rewritten.pt"))
    for layer in rewritten.layers.children():
        for body in (layer.inlined_graph, layer.attention.inlined_graph):
            assert "tsmem::scaled_dot_product_attention" in str(body) and "aten::scaled_dot_product_attention" not in str(body)
    padding = torch.zeros(3, 7, dtype=torch.bool)
    padding[1, 4:] = True
    for _ in range(4):
        results = []
        for model in (original, rewritten):
            torch.manual_seed(1)
            x = torch.randn(7, 3, 16, dtype=torch.float64, requires_grad=True)
            y = model(x, padding)
            results.append([y.detach(), *torch.autograd.grad(y.square().sum(), [x, *model.parameters()]), *(b.clone() for b in model.buffers())])
        for mine, its in zip(*results, strict=True):
            torch.testing.assert_close(mine, its, rtol=1e-9, atol=1e-9)


class NegativeSlopesInPlace(Conv):
    def forward(self, x, leaky: bool):
        y = self.conv(x)
        return F.leaky_relu(y, -0.2, inplace=True) if leaky else F.elu(y, -0.2, inplace=True)


@pytest.mark.parametrize("level", ["ops", "regions"])
def test_in_place_with_a_negative_slope(level, tmp_path):
    """PyTorch's backward raises an error, as the result does not say what the input was: so does the rewritten model's."""
    torch.jit.script(NegativeSlopesInPlace()).save(str(tmp_path / "model.pt"))
    done = run("rewrite", tmp_path / "model.pt", "-o", tmp_path / "out.pt", "--level", level)
    assert done.returncode == 0, done.stderr
    model = torch.jit.load(str(tmp_path / "out.pt"))
    for leaky in (True, False):
        with pytest.raises(RuntimeError, match="negative slope"):
            model(torch.randn(2, 4, 8, 8), leaky).sum().backward()
