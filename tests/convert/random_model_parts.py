"""Functions that the programs of `random_models.py` call, and the vocabulary of these programs."""

import builtins
import collections
import concurrent.futures
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard


class Triple(torch.autograd.Function):
    """Multiplies a tensor by 3; the gradient is 5 instead of 3, to show that its backward runs."""

    forward = staticmethod(lambda ctx, t: t * 3)
    backward = staticmethod(lambda ctx, dy: dy * 5)


class SaveAndSquare(torch.autograd.Function):
    """Squares a tensor and saves it; the gradient is halved."""

    @staticmethod
    def forward(ctx, t):
        ctx.save_for_backward(t)
        return t * t

    backward = staticmethod(lambda ctx, dy: dy * ctx.saved_tensors[0])


class HalveInPlace(torch.autograd.Function):
    """Halves a tensor in place."""

    @staticmethod
    def forward(ctx, t):
        ctx.mark_dirty(t)
        return t.mul_(0.5)

    backward = staticmethod(lambda ctx, dy: dy * 0.25)


class Same(torch.autograd.Function):
    """Returns its input; the gradient is reversed."""

    forward = staticmethod(lambda ctx, t: t.view_as(t))
    backward = staticmethod(lambda ctx, dy: -dy)


class Free(torch.autograd.Function):
    """Adds 1 to a tensor, and frees it."""

    @staticmethod
    def forward(ctx, t):
        y = t + 1
        t.untyped_storage().resize_(0)
        return y

    backward = staticmethod(lambda ctx, dy: dy * 2)


class Again(torch.autograd.Function):
    """Calls a module, and again in the backward."""

    @staticmethod
    def forward(ctx, t, module, *parameters):
        ctx.module, ctx.parameters = module, parameters
        ctx.save_for_backward(t)
        return module(t)

    @staticmethod
    def backward(ctx, dy):
        with torch.enable_grad():
            t = ctx.saved_tensors[0].detach().requires_grad_()
            inputs = [t, *(p for p in ctx.parameters if p.requires_grad)]
            found = iter(torch.autograd.grad(ctx.module(t), inputs, dy))
        return (
            next(found),
            None,
            *(next(found) if p.requires_grad else None for p in ctx.parameters),
        )


triple = Triple.apply


class TensorList(list):
    """A list that a forward returns."""


class Pair(NamedTuple):
    """A tuple that a forward returns."""

    first: Tensor
    second: Tensor


class Halved(nn.Module):
    """A parametrization."""

    def forward(self, weight):
        return weight * 0.5


def _by_match(value):
    match value:
        case Tensor():
            return True
    return False


# Different checks whether a value is a tensor.
QUESTIONS = {
    "isinstance": lambda t: isinstance(t, Tensor),
    "builtins": lambda t: builtins.isinstance(t, torch.Tensor),
    "is_tensor": torch.is_tensor,
    "jit": lambda t: torch.jit.isinstance(t, Tensor),
    "issubclass": lambda t: issubclass(type(t), Tensor),
    "match": _by_match,
    "name": lambda t: type(t).__name__ == "Tensor",
    "class": lambda t: t.__class__.__name__ == "Tensor" and t.__class__.__module__ == "torch",
    "attribute": lambda t: hasattr(t, "grad_fn") and not hasattr(t, "node_of_a_graph"),
    "hashable": lambda t: isinstance(t, collections.abc.Hashable) and t in {t},
}


def add_if_tensor(question, a, b):
    """Returns the sum if `b` is a tensor by one of the `QUESTIONS`."""
    return a + b if QUESTIONS[question](b) else a * 1.5


def raises_value_error(t):
    raise ValueError("raised on purpose")


def in_thread(function, *args):
    """Calls a function in another thread with this thread's grad mode; re-raises its error."""
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        pool.submit(torch.set_grad_enabled, torch.is_grad_enabled())
        return pool.submit(function, *args).result()


def circular_conv_forward(self, x, weight, bias):
    """Replaces `nn.Conv2d._conv_forward` of an instance."""
    padding = (0, 0) if isinstance(self.padding, str) else self.padding
    pads = [n for p in reversed(padding) for n in (p, p)]
    x = nn.functional.pad(x, pads, mode="circular")
    return nn.functional.conv2d(x, weight, bias, self.stride, 0, self.dilation, self.groups)


def doubled_forward(self, x):
    """Replaces the forward of a module."""
    return type(self).forward(self, x) * 2


class GroupNorm(nn.GroupNorm):
    """A group norm whose backward does not crash.

    PyTorch's backward of a channels_last input that needs no gradient does, on a CPU.
    """

    def forward(self, x):
        return super().forward(x if x.requires_grad else x.contiguous())


def extra_rows(h):
    """A value for each image and channel, which has a gradient if `h` has one."""
    return h.mean((2, 3), keepdim=True) if h.dim() == 4 else h.mean()


def data_parallel(net):
    """Wraps `net` in DistributedDataParallel, in a group of one process."""
    start_process_group()
    return nn.parallel.DistributedDataParallel(net, find_unused_parameters=True)


def sharded(net):
    """Wraps `net` and its `nn.Sequential` children in FSDP2, in a group of one process.

    Other blocks are not wrapped: FSDP would free the weights of a block that returns nothing.
    """
    start_process_group()
    mesh = torch.distributed.init_device_mesh("cpu", (1,))
    for child in net.children():
        if type(child) is nn.Sequential:
            fully_shard(child, mesh=mesh)
    return fully_shard(net, mesh=mesh)


def start_process_group():
    """Starts a group of one process, if there is none."""
    if not torch.distributed.is_initialized():
        store = torch.distributed.HashStore()
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)


def end_process_group():
    """Ends the process group, if there is one."""
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


# The vocabulary of `random_models.py`: alternatives between bars; `$name` is replaced.

NORMS = """
    nn.BatchNorm2d($channels) | nn.BatchNorm2d($channels) | nn.BatchNorm2d($channels) |
    nn.BatchNorm2d($channels) | nn.BatchNorm2d($channels) | nn.BatchNorm2d($channels) |
    nn.BatchNorm2d($channels, momentum=None) | nn.BatchNorm2d($channels, momentum=0.3) |
    nn.BatchNorm2d($channels, momentum=True) | nn.BatchNorm2d($channels, affine=False) |
    nn.BatchNorm2d($channels, track_running_stats=False) | nn.BatchNorm2d($channels, eps=1e-2) |
    nn.BatchNorm2d($channels, momentum=0)
"""

RELU_MODULES = "nn.ReLU() | nn.ReLU() | nn.ReLU(inplace=True) | nn.ReLU(True)"

RELUS = """
    F.relu({}) | F.relu({}) | torch.relu({}) | {}.relu() | F.relu({}, inplace=True) | F.relu_({}) |
    {}.relu_() | {}.clamp(min=0) | F.leaky_relu({}, 0.1)
"""

ANY_NORMS = """
    parts.GroupNorm(2, $channels) | parts.GroupNorm(1, $channels, eps=1e-2) |
    parts.GroupNorm($channels, $channels) | nn.GroupNorm(2, $channels, affine=False) |
    nn.InstanceNorm2d($channels) | nn.InstanceNorm2d($channels, affine=True) |
    nn.InstanceNorm2d($channels, affine=True, track_running_stats=True) |
    nn.BatchNorm2d($channels) | nn.BatchNorm2d($channels, affine=False)
"""

ANY_ACTIVATION_MODULES = """
    nn.SiLU() | nn.SiLU(inplace=True) | nn.GELU() | nn.GELU("tanh") | nn.ELU() | nn.Mish() |
    nn.LeakyReLU(0.2, inplace=True) | nn.LeakyReLU(-0.1) | nn.ReLU6() | nn.Hardswish() |
    nn.Softplus() | nn.Sigmoid() | nn.Tanh() | nn.Identity() | nn.SELU() | nn.ReLU() |
    nn.Dropout(0.3) | nn.Dropout(0.3, inplace=True)
"""

ANY_ACTIVATIONS = """
    F.silu({}) | F.silu({}, inplace=True) | F.leaky_relu({}, 0.1) | F.leaky_relu_({}) |
    F.elu_({}, 0.5) | F.hardtanh({}, 0, 6) | {}.sigmoid() | torch.tanh_({}) | F.gelu({}) |
    F.softplus({}, 2.0) | F.softplus({}, 1, 10) | F.mish({}, True) | {}.clamp(0, 6) | {} |
    (lambda t: t * torch.sigmoid(t))({}) | (lambda t: t.sigmoid() * t)({}) |
    (lambda t: t.mul_(t.sigmoid()))({}) | F.dropout(F.silu({}), 0.3, self.training) |
    F.silu({} * (1 + extra_rows(h)) + extra_rows(h)) | F.relu({} + extra_rows(h)) |
    F.silu(torch.addcmul(extra_rows(h), {}, 1 + extra_rows(h))) | {}.mul_(1 + extra_rows(h)).relu()
"""

ANY_CHANGES = """
    h = h * 0.7 | h = 0.5 * h | h = h / 1.5 | h = h + extra_rows(h) | h = extra_rows(h) + h |
    h += extra_rows(h) | h = h * extra_rows(h) | h = F.interpolate(h, size=h.shape[2:]) |
    h = F.interpolate(h, scale_factor=2)[:, :, ::2, ::2] | h = h.to(h.dtype).contiguous() |
    h = F.layer_norm(h, h.shape[1:]) | h = F.silu(F.layer_norm(h, h.shape[1:])) |
    h = F.interpolate(F.avg_pool2d(h, 2), size=h.shape[2:], mode="nearest") | h = h / h.numel() |
    h = F.dropout(h, 0.2, self.training, True) | h = F.dropout(F.group_norm(h, 1), 0.2) |
    h = F.silu(F.instance_norm(h)) | h = F.pad(h, (0, 1, 0, 1))[:, :, :-1, :-1]
"""

TENSOR_HOOKS = """
    h.register_hook(note_gradients) | h.register_hook(lambda g: g * 2) |
    h.retain_grad(); self.kept = h
"""

ADDITIONS = """
    h = h + $s | h = h + $s | h = $s + h | h += $s | h = torch.add(h, $s) | h = h.add_($s) |
    h = h + $s + h.size(0) | h = torch.add(h, $s, alpha=0.5) | h = torch.add($s, other=h)
"""

POOLS = """
    F.avg_pool2d(h, 2) | F.max_pool2d(h, 2) | F.max_pool2d(h, kernel_size=2, stride=2) |
    F.adaptive_avg_pool2d(h, $size) | F.adaptive_max_pool2d(h, ($size, $size)) |
    nn.AvgPool2d(2)(h) | F.max_pool2d(h, 2, return_indices=True)[0]
"""

SQUEEZES = """
    h = h * torch.sigmoid($gate(h.mean((2, 3), keepdim=True))) | h = h + $one($a) |
    h = h * $gate(F.adaptive_avg_pool2d(h, 1)).sigmoid() | h = h + h.mean(1, keepdim=True) |
    h = h + $gate($pooled)
"""

CONDITIONS = """
    h.mean() > 0 | h.sum() < 1 | h.shape[-1] > 4 | h.size(1) == 8 | self.training |
    h.dtype in {torch.float64} | h.dtype is torch.float64 | str(h.dtype) == "torch.float64" |
    h.grad_fn is None | h.requires_grad | h.is_contiguous() | h.is_leaf | len(h) == 2 |
    {8: 3.0}.get(h.shape[-1]) | torch.is_grad_enabled() | is_grad_enabled() | h.dim() == 4 |
    h.stride(1) == 1 | random.random() < 0.5 | torch.rand(()) < 0.5 | h.is_floating_point() |
    torch.equal(h, h.clone()) | h.detach().max().item() > 1 | h._base is None |
    bool((h == 0).any()) | h.is_contiguous(memory_format=torch.channels_last) | h.norm() > 10 |
    float(h[0, 0, 0, 0]) > 0 | weakref.ref(h)() is h | h.data_ptr() != 0 | h.is_shared()
"""

CHANGES = """
    h = h + 1 | h += 1 | h = h.mul_(1.5) | h *= 0.5 | h.clamp_(-1, 1) | h[:, 0] = 0.5 |
    h[:, :1].mul_(2) | h.view(-1).add_(1) | h[0].zero_() | h = h.clone().add_(1) | h = -h |
    h.data.mul_(0.5) | h.detach().add_(0.5) | h = h.transpose(2, 3) | h = h.flip(1) |
    h = h.contiguous() | h = h.to(torch.float64) | h = h.type_as(h) | h = h.double() |
    h = h.to(memory_format=torch.channels_last) | h = h.view(h.size(0), -1).view(h.shape) |
    h = h.reshape(h.shape[0], -1).view_as(h) | h = h.flatten(1).unflatten(1, h.shape[1:]) |
    h = torch.where(h > 0, h, h * 0.1) | h = F.relu6(h) |
    h = h.permute(0, 2, 3, 1).permute(0, 3, 1, 2) | h = F.dropout(h, 0.3) |
    h = F.dropout(h, 0.3, self.training) | h = F.dropout2d(h, 0.5) | h = h + torch.rand_like(h) |
    h = h * torch.rand(h.shape, dtype=h.dtype) | h = h + random.random() | torch.manual_seed(3) |
    torch.random.manual_seed(4) | torch.rand(3) | random.seed(5) | h = h + torch.zeros_like(h) |
    h = h.new_ones(h.shape) + h | h = h - h.detach() * 0.5 |
    h = torch.add(h.detach(), 1, out=torch.empty_like(h)) | h = h * h.numel() / 100 | h = h ** 2 |
    h = torch.from_numpy(h.detach().numpy()) + h |
    h = h + torch.tensor(h.tolist(), dtype=h.dtype) | h = triple(h) | h = square(h) |
    h = parts.HalveInPlace.apply(h) | h = parts.Same.apply(h) | h = parts.Triple.apply(h) |
    h = copy.copy(h) | h = F.interpolate(h, scale_factor=1) | h = sum([h, h, h]) |
    h = torch.stack([h, h]).sum(0) | h = torch.cat([h]) | h = h[:] | h = h[...] |
    h = F.pad(h, (1, 1, 1, 1))[:, :, 1:-1, 1:-1] | h = next(iter([h])) | h = h.expand_as(h) |
    note(h.shape, h.dtype, h.stride()) | h = h.as_subclass(torch.Tensor) | h = nn.Identity()(h) |
    h.requires_grad_() | h = h.squeeze(1) | h = h.float().double() | h = torch.relu_(h) |
    h = torch.utils._pytree.tree_map(lambda t: t, [h])[0] | h = h.set_(h.clone()) |
    u = h; u += 1 | u = h; u.relu_(); h = h + u | h = h if h in [h] else -h |
    h = h.swapaxes(2, 3) | h = h.to(torch.float64, copy=True)
"""

NORM_CHANGES = """
    $m.running_mean.add_(0.5) | $m.running_var.mul_(0.9) | $m.eval() | $m.train(False) |
    h = h + $m.running_mean.view(1, -1, 1, 1) | $m.num_batches_tracked += 1 | $m.eps = 0.01 |
    $m.running_mean = torch.lerp($m.running_mean, h.detach().mean((0, 2, 3)), 0.1) |
    $m.momentum = 0.4 | $m.reset_running_stats() | $m.weight.requires_grad = False |
    h = copy.deepcopy($m)(h) | $m.training = False | note($m.state_dict()) |
    self.load_state_dict(self.state_dict()) | h = h * $m.num_batches_tracked
"""

CONV_CHANGES = """
    $m.weight.requires_grad = False | $m.weight.data.mul_(0.9) | h = h * $m.weight.mean() |
    $m.weight.data = $m.weight.data * 0.9 | $m.weight.grad = None
"""

STATE = """
    self.$t = torch.lerp(self.$t, $mean, 0.1) | self.$t.copy_($mean) | self.$t.lerp_($mean, 0.1) |
    self.${t}_list.append(h) | self.${t}_box.values.append(h) | self.${t}_box.last = h |
    self.${t}_calls += 1 | h = h * self.${t}_rng.random() | h = h * next(self.${t}_cycle) |
    $owner.seen = h | self.seen = h | $drop.p = 0.5 | h = $drop(h) | self.last_shape = h.shape |
    h = h + self.$t.view(1, -1, 1, 1) | self.${t}_list.append(h.detach()) |
    self.cache = {h: 1}; h = next(iter(self.cache)) | self.seen, self.also = h, h
"""

MODES = """
    torch.no_grad() | torch.enable_grad() | torch.autocast("cpu", dtype=torch.bfloat16) |
    torch.set_grad_enabled(False) | torch.random.fork_rng()
"""

ERRORS = """
    h = $bad($x) | h = $x; parts.raises_value_error(h) |
    h = F.conv2d($x, torch.ones(3, 3, 1, 1, dtype=h.dtype), groups=2)
"""

CALLS_OF_CHILDREN = """
    h = $m(h) | h = $m($m(h)) | h = h + $m(h) | h = parts.in_thread($m, h) |
    h = $m(h, extra=h) | h = $m.forward(h) | h = copy.deepcopy($m)(h) |
    for _ in range(2): h = $m(h)
"""

# The end of a block that returns no tensor, and its call.
ODD_CHILDREN = """
    return None -> $m(h) | return h, extra -> h, _ = $m(h) | return [h] -> h = $m(h).pop() |
    return {"out": h} -> h = $m(h)["out"] | return lambda t: t + h -> h = $m(h)(h) |
    return h, h -> h, u = $m(h); h = h if u is h else h * 2 |
    return parts.TensorList([h]) -> u = $m(h); h = u[0] * len(type(u).__name__) |
    extra.append(h) -> u = [h]; $m(h, u); h = u[-1] + u[0] |
    return (t for t in (h, h)) -> h = sum($m(h)) |
    return parts.Pair(h, h * 2) -> h = $m(h).first |
    yield h; yield h + 1 -> for h in $m(h): pass
"""

HOOKS = """
    register_forward_hook(lambda m, i, o: note(i, o)) |
    register_forward_hook(lambda m, i, o: o * 2 if isinstance(o, torch.Tensor) else None) |
    register_forward_hook(lambda m, i, o: note(o.view(o.size(0), -1).sum())) |
    register_forward_pre_hook(lambda m, i: note(i)) |
    register_forward_pre_hook(lambda m, i: (i[0] * 2, *i[1:])) |
    register_full_backward_hook(lambda m, i, o: note_gradients(i, o)) |
    register_full_backward_pre_hook(lambda m, o: note_gradients(o)) |
    register_forward_hook(lambda m, i, k, o: note(i, k), with_kwargs=True)
"""

SETTINGS = """
    net.$m.requires_grad_(False) | net.$m.eval() | net.requires_grad_(False) |
    for q in list(net.parameters())[:6]: q.requires_grad_(False) |
    for m in net.modules(): m.training = not isinstance(m, nn.BatchNorm2d) |
    net.to(memory_format=torch.channels_last) | net.$m.to(memory_format=torch.channels_last) |
    net.$m.forward = types.MethodType(parts.doubled_forward, net.$m)
"""

NORM_SETTINGS = """
    net.$m = nn.InstanceNorm2d($channels, affine=True).double() | net.$m = nn.Identity() |
    net.$m = nn.BatchNorm2d($channels, eps=0.1).double() | net.$m = nn.ReLU(inplace=True) |
    parametrize.register_parametrization(net.$m, "weight", parts.Halved()) |
    net.$m.weight.register_hook(lambda g: g * 2) | net.$m.eps = 0.1 | net.$m.momentum = None
"""

RELU_SETTINGS = """
    net.$m = nn.LeakyReLU(0.1) | net.$m = nn.Identity() | net.$m = nn.Sigmoid() |
    net.$m = nn.ReLU(inplace=True) | net.$m.inplace = True
"""

CONV_SETTINGS = """
    net.$m.padding = "same" | net.$m.padding = 1 | net.$m.stride = (2, 2) | net.$m.stride = 1 |
    net.$m.padding_mode = "circular" | net.$m.padding_mode = "reflect" | net.$m.bias = None |
    parametrize.register_parametrization(net.$m, "weight", parts.Halved()) |
    prune.l1_unstructured(net.$m, "weight", 0.3) | parametrizations.weight_norm(net.$m) |
    prune.random_unstructured(net.$m, "weight", 0.3) | net.$m = nn.Identity() |
    net.$m._conv_forward = types.MethodType(parts.circular_conv_forward, net.$m)
"""

PREPARATIONS = """
    return copy.deepcopy(net) | return pickle.loads(pickle.dumps(net)) |
    return parts.data_parallel(net) | return parts.sharded(net)
"""

INPUTS = """
    x.requires_grad_() | x.contiguous(memory_format=torch.channels_last) | x.transpose(2, 3) |
    x.contiguous(memory_format=torch.channels_last).requires_grad_() | x[:, :, :, :] |
    torch.cat([x, x], 1)[:, :x.size(1)] | x.requires_grad_() * 1 | x[:1].expand(x.shape)
"""

CALLS = """
    return checkpoint(net, x, use_reentrant=False) |
    return checkpoint(net, x, use_reentrant=True) |
    with torch.autocast("cpu", dtype=torch.bfloat16): return net(x) | return net(net(x)) |
    return parts.in_thread(net, x) | with torch.enable_grad(): return net(x) |
    return net(x), x | with torch.no_grad(): return net(x) | return net.forward(x) |
    return net(h=x) | return net(x), net(x) |
    return torch.func.functional_call(net, dict(net.named_parameters()), (x,))
"""

RETURNS = """
    (h, $s) | {"out": h, "skip": $s} | [h, $s] | parts.TensorList([h, $s]) | (h, h) |
    parts.Pair(h, $s) | types.SimpleNamespace(out=h, skip=$s) | h.mean() | (h, None, 3) |
    $s | h.relu() | h.detach(), h | h.view(h.size(0), -1)
"""
