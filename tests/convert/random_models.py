"""Small random models, as program text drawn from a grammar.

`program(seed)` returns the source of a module with

    class Net(nn.Module)
    before(net), after(net)     change the model before and after its conversion
    prepare(net)                returns the model to call: the converted one, or a copy
    make_input(randn)           returns the input of a step
    call(net, x)                calls the model
    MODE, MEMORY, GRADIENTS     how to convert and differentiate the model
    log                         values that hooks recorded
"""

import contextlib
import random
import re
import string
from collections.abc import Callable, Iterator
from typing import NamedTuple

from tests.convert import random_model_parts as vocabulary
from tests.convert.random_model_parts import QUESTIONS

HEADER = """\
import collections, contextlib, copy, itertools, pickle, random, types, weakref
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrize, parametrizations, prune
from torch.utils.checkpoint import checkpoint
from torch import is_grad_enabled
from tests.convert import random_model_parts as parts, trial
from tests.convert.random_model_parts import extra_rows, triple

square = parts.SaveAndSquare.apply
log = []

def note(*values):
    log.append(trial.facts(values))

def note_gradients(*values):
    log.append(trial.gradient_facts(values))
"""


def options(text: str) -> list[str]:
    """Splits a text at its bars."""
    return [part.strip() for part in text.split(" |")]


def choose(source: "Scope | Program", text: str, **names: object) -> str:
    """Draws one part of a text, and replaces `$name`."""
    return string.Template(source.choice(options(text))).substitute(names)


# Changes that `torch.utils.checkpoint` does not support: recomputation reads other values.
CHANGES_STATE = re.compile(
    r"\.(eps|momentum|training|data) = |\.data\.|\.eval\(|\.train\(|running|[+*]= |_\(|\] = "
)


class Value(NamedTuple):
    """A tensor of the program: [batch, channels, size, size]."""

    name: str
    channels: int
    size: int


class Module(NamedTuple):
    """A module of the program, by its path in `Net`."""

    kind: str  # norm, relu, conv, bias, drop or block
    path: str
    channels: int  # channels of its input
    is_square: bool = False  # the output has the shape of the input


class Scope:
    """Text of a class: its `__init__` and `forward`, line by line."""

    def __init__(self, program: "Program", channels: int, size: int) -> None:
        self.program, self.random = program, program.random
        self.chance, self.choice = program.chance, program.choice
        self.init: list[str] = []
        self.body: list[str] = []
        self.indent = 2
        self.is_fixed = False  # True within branches and residual blocks: shapes may not change
        self.channels, self.size = channels, size  # of the variable `h`
        self.saved: list[Value] = []
        self.modules: list[Module] = []
        self.count = 0

    def write(self, *lines: str) -> None:
        self.body += ["    " * self.indent + line for line in lines]

    @contextlib.contextmanager
    def block(self, line: str) -> Iterator[None]:
        """Opens an indented block; shapes may not change in it."""
        self.write(line)
        saved = list(self.saved)
        self.indent += 1
        with self.fixed():
            yield
        self.indent, self.saved = self.indent - 1, saved

    def apply(self, *templates: str) -> None:
        """Writes lines that apply templates to h in turn."""
        self.write(*(f"h = {t.format('h')}" for t in templates))

    def new(self, prefix: str) -> str:
        self.count += 1
        return f"{prefix}{self.count}"

    def module(self, prefix: str, text: str, channels: int = 0, is_square: bool = False) -> str:
        """Adds a child; returns the expression for it in `forward`."""
        name = self.new(prefix)
        self.init.append(f"        self.{name} = {text}")
        self.modules.append(Module(prefix, name, channels, is_square))
        return f"self.{name}"

    def save(self) -> str:
        """Writes a new variable with the value of h."""
        name = self.new("s")
        self.write(f"{name} = h")
        self.saved.append(Value(name, self.channels, self.size))
        return name

    def like_h(self) -> str:
        """Returns a saved variable with the shape of h."""
        same = [v.name for v in self.saved if v[1:] == (self.channels, self.size)]
        if same and self.chance(0.7):
            return self.choice(same)
        name = self.save()
        with self.fixed():
            unit(self)
        return name

    @contextlib.contextmanager
    def fixed(self) -> Iterator[None]:
        """Shapes may not change in lines that are written in the body."""
        was_fixed, self.is_fixed = self.is_fixed, True
        yield
        self.is_fixed = was_fixed

    def text(self, name: str) -> str:
        lines = [f"class {name}(nn.Module):", "    def __init__(self):"]
        lines += ["        super().__init__()", *self.init]
        return "\n".join([*lines, "", "    def forward(self, h, extra=None):", *self.body, ""])


# Expressions: templates with {} for the input.


def norm(s: Scope, channels: int) -> str:
    shared = [m.path for m in s.modules if m.kind == "norm" and m.channels == channels]
    if shared and s.chance(0.1):
        return f"self.{s.choice(shared)}({{}})"
    norms = vocabulary.ANY_NORMS if s.program.has_any_norm else vocabulary.NORMS
    norm = choose(s, norms, channels=channels)
    module = s.module("norm", norm, channels, True)
    if s.chance(0.15) and "BatchNorm" in norm:
        names = "running_mean", "running_var", "weight", "bias"
        arguments = ", ".join(f"{module}.{n}" for n in names)
        training = s.choice([f"{module}.training", "self.training"])
        training = "True" if "track_running_stats" in norm else training
        return f"F.batch_norm({{}}, {arguments}, {training}, 0.2, {module}.eps)"
    return f"{module}({{}})"


def relu(s: Scope) -> str:
    found = [m.path for m in s.modules if m.kind == "relu"]
    if found and s.chance(0.3):
        return f"self.{s.choice(found)}({{}})"
    is_any = s.program.has_any_norm
    if s.chance(0.3 if is_any else 0.5):
        modules = vocabulary.ANY_ACTIVATION_MODULES if is_any else vocabulary.RELU_MODULES
        return f"{s.module('relu', choose(s, modules), 0, True)}({{}})"
    return choose(s, vocabulary.ANY_ACTIVATIONS if is_any else vocabulary.RELUS)


def conv(s: Scope, channels: int, size: int, out: int) -> tuple[str, int]:
    """Returns a convolution to `out` channels, and the size of its output."""
    kernel = s.choice([1, 3, 3])
    dilation = 2 if kernel == 3 and s.chance(0.1) else 1
    padding: object = dilation * (kernel // 2)
    stride = 2 if not s.is_fixed and size >= 4 and s.chance(0.15) else 1
    groups = 2 if out % 2 == 0 and s.chance(0.1) else 1
    new_size = (size - 1) // stride + 1
    shared = [
        m.path for m in s.modules if m.kind == "conv" and m.channels == channels and m.is_square
    ]
    if shared and out == channels and s.chance(0.15):
        return f"self.{s.choice(shared)}({{}})", size
    is_square = out == channels and stride == 1
    options = f"bias={s.chance(0.3)}, stride={stride}, dilation={dilation}, groups={groups}"
    template = "{}({{}})"
    if s.chance(0.1) and stride == 1:
        padding = '"same"'
    elif s.chance(0.1) and kernel == 3 and dilation == 1 and size > 2:
        options += f', padding_mode="{s.choice(["circular", "reflect", "replicate", "zeros"])}"'
    elif s.chance(0.1):
        template, padding = f"{{}}(F.pad({{{{}}}}, ({', '.join([str(padding)] * 4)})))", 0
    text = f"nn.Conv2d({channels}, {out}, {kernel}, padding={padding}, {options})"
    module = s.module("conv", text, channels, is_square)
    if template == "{}({{}})" and "padding_mode" not in options and s.chance(0.1):
        numbers = f"{module}.stride, {module}.padding, {module}.dilation, {module}.groups"
        return f"F.conv2d({{}}, {module}.weight, {module}.bias, {numbers})", new_size
    template = template.format(module)
    if s.program.has_any_norm and s.chance(0.2):
        bias = s.module("bias", f"nn.Linear(1, {out})", out) + ".bias.view(1, -1, 1, 1)"
        added = s.choice(["({} + {})", "({}.add_({}))", "torch.add({}, {})"])
        template = added.format(template, bias)
    return template, new_size


# Statements: each one changes h.


def unit(s: Scope) -> None:
    """A batch norm, an activation and a convolution, in different styles."""
    out = s.channels if s.is_fixed else s.choice([s.channels, s.channels, 4, 8])
    style = s.choice(["line", "line", "steps", "named", "sequential", "kept", "conv first"])
    first, size = s.channels, s.size
    if style == "conv first":
        template, size = conv(s, first, s.size, out)
        s.apply(template, norm(s, out), relu(s))
    elif style == "sequential":
        act = s.choice(["nn.ReLU()", "nn.ReLU(inplace=True)"])
        own = f"nn.BatchNorm2d({first})"
        if s.program.has_any_norm:
            act = choose(s, vocabulary.ANY_ACTIVATION_MODULES)
            own = choose(s, vocabulary.ANY_NORMS, channels=first)
        parts = f"{own}, {act}, nn.Conv2d({first}, {out}, 3, padding=1)"
        name = s.module("block", f"nn.Sequential({parts})", first)
        path = name.removeprefix("self.")
        s.modules += [Module("norm", f"{path}[0]", first, True), Module("relu", f"{path}[1]", 0)]
        s.write(f"h = {name}(h)")
    else:
        n, a = norm(s, first), relu(s)
        template, size = conv(s, first, s.size, out)
        if style == "line":
            s.write(f"h = {template.format(a.format(n.format('h')))}")
        elif style == "steps":
            s.apply(n, a, template)
        elif style == "named":
            normalised, activation = s.new("n"), s.new("a")
            s.write(f"{normalised} = {n.format('h')}", f"{activation} = {a.format(normalised)}")
            s.write(f"h = {template.format(activation)}")
            if s.chance(0.3):
                s.saved.append(Value(s.choice([normalised, activation]), first, s.size))
        else:
            name = s.new("a")
            s.write(f"{name} = {a.format(n.format('h'))}", f"h = {template.format(name)}")
            s.saved.append(Value(name, first, s.size))
    s.channels, s.size = out, size


def residual(s: Scope) -> None:
    skip = s.save()
    with s.fixed():
        for _ in range(s.choice([1, 2, 2])):
            unit(s)
    s.write(choose(s, vocabulary.ADDITIONS, s=skip))


def projection(s: Scope) -> None:
    """Two convolutions of one activation."""
    name, a = s.new("a"), relu(s)
    s.write(f"{name} = {a.format(norm(s, s.channels).format('h'))}")
    out = s.channels if s.is_fixed else s.choice([4, 8])
    stride = 2 if not s.is_fixed and s.size >= 4 and s.chance(0.5) else 1
    shape = f"{s.channels}, {out}"
    first = s.module("conv", f"nn.Conv2d({shape}, 3, {stride}, 1, bias=False)", s.channels)
    shortcut = s.module("conv", f"nn.Conv2d({shape}, 1, {stride}, bias=False)", s.channels)
    s.channels, s.size = out, (s.size - 1) // stride + 1
    if s.chance(0.5):
        s.write(f"h = {first}({name})", f"h = h + {shortcut}({name})")
    else:
        skip = s.new("p")
        s.write(f"{skip} = {shortcut}({name})", f"h = {first}({name})", f"del {name}")
        with s.fixed():
            unit(s)
        s.write(f"h = h + {skip}")


def in_row(s: Scope) -> None:
    for _ in range(2):
        residual(s)


def dense(s: Scope) -> None:
    skip = s.save()
    with s.fixed():
        unit(s)
    if s.chance(0.5) and not s.is_fixed and s.channels < 16:
        s.write(f"h = torch.cat([{skip}, h], {s.choice(['1', 'dim=1', '-3'])})")
        s.channels *= 2
    else:
        half = s.channels // 2
        s.write(choose(s, "b, h = h.chunk(2, 1) | b, h = torch.split(h, $half, 1)", half=half))
        s.write(choose(s, "h = torch.cat((h, b), 1) | h = torch.cat((h.relu(), b * 2), dim=1)"))


def pool(s: Scope) -> None:
    if s.chance(0.5):
        s.apply(norm(s, s.channels), relu(s))
    if s.is_fixed or s.size < 4:
        s.write("h = F.avg_pool2d(h, 3, 1, 1)")
    else:
        s.size //= 2
        s.write(f"h = {choose(s, vocabulary.POOLS, size=s.size)}")


def squeeze(s: Scope) -> None:
    """Additions and products with other shapes."""
    gate = s.module("conv", f"nn.Conv2d({s.channels}, {s.channels}, 1)", s.channels, True)
    one = s.module("conv", f"nn.Conv2d({s.channels}, 1, 1)", s.channels)
    n, a = norm(s, s.channels), relu(s)
    pooled, a = (a.format(n.format(x)) for x in ("h.mean((2, 3), keepdim=True)", "h"))
    s.write(choose(s, vocabulary.SQUEEZES, gate=gate, one=one, a=a, pooled=pooled))


def type_question(s: Scope) -> None:
    value = s.choice([s.like_h(), "None"])
    s.write(f'h = parts.add_if_tensor("{s.choice(sorted(QUESTIONS))}", h, {value})')


def branch(s: Scope) -> None:
    with s.block(f"if {choose(s, vocabulary.CONDITIONS)}:"):
        statement(s)
    if s.chance(0.7):
        with s.block("else:"):
            statement(s)


def change(s: Scope) -> None:
    """One line that changes h, a view or a generator."""
    is_any = s.program.has_any_norm and s.chance(0.7)
    s.write(choose(s, vocabulary.ANY_CHANGES if is_any else vocabulary.CHANGES))


def change_between(s: Scope) -> None:
    """Changes between the parts of a unit: of their results or of their parameters."""
    n, a = norm(s, s.channels), relu(s)
    with s.fixed():
        c, _ = conv(s, s.channels, s.size, s.channels)
    text = s.choice([vocabulary.CHANGES, vocabulary.NORM_CHANGES, vocabulary.CONV_CHANGES])
    module = (c if text is vocabulary.CONV_CHANGES else n).split("(")[0]
    if not module.startswith("self.") or s.program.has_any_norm:
        text = s.choice([vocabulary.CHANGES, vocabulary.ANY_CHANGES])
    parts = [f"h = {t.format('h')}" for t in (n, a, c)]
    parts.insert(s.choice([1, 2, 3]), choose(s, text, m=module))
    s.write(*parts)


def write(s: Scope) -> None:
    """Changes what a norm reads, or what it or a later operation returns, in place."""
    n, a = norm(s, s.channels), relu(s)
    is_source_written = s.chance(0.5)
    if is_source_written:
        s.write("h = h * 1")
    skip = s.save()
    with s.fixed():
        c, _ = conv(s, s.channels, s.size, s.channels)
    parts = [n, a, s.choice([c, "F.avg_pool2d({}, 3, 1, 1)", f"({c} + {skip})"])]
    s.apply(*parts[: s.choice([1, 2, 3, 3])])
    written = choose(s, vocabulary.WRITES)
    s.write(re.sub(r"\bh\b", skip, written) if is_source_written else written)


def state(s: Scope) -> None:
    """Attributes and buffers that `forward` sets."""
    act = relu(s)
    owner = act.split("(")[0] if act.startswith("self.") else "self"
    drop = s.module("drop", "nn.Dropout(0.2)", 0, True)
    name = s.new("t")
    s.init += [
        f'        self.register_buffer("{name}", torch.zeros({s.channels}))',
        f"        self.{name}_list = {s.choice(['[]', 'collections.deque(maxlen=2)'])}",
        f"        self.{name}_box = types.SimpleNamespace(values=[], last=None)",
        f"        self.{name}_calls, self.{name}_rng = 0, random.Random(3)",
        f"        self.{name}_cycle = itertools.cycle([1.0, 2.0, 0.5])",
    ]
    if s.chance(0.5):
        s.apply(norm(s, s.channels))
    for _ in range(2):
        mean = "h.detach().mean((0, 2, 3))"
        s.write(choose(s, vocabulary.STATE, t=name, mean=mean, owner=owner, drop=drop))
    s.apply(act)


def autograd(s: Scope) -> None:
    """Tensor hooks, checkpoints, and gradients within `forward`."""
    if s.chance(0.5):
        s.apply(norm(s, s.channels))
    kind = s.choice(["hook", "grad", "checkpoint", "nested", "again", "free"])
    if kind == "hook":
        with s.block("if h.requires_grad:"):
            s.write(choose(s, vocabulary.TENSOR_HOOKS))
    elif kind in ("checkpoint", "nested", "again"):
        block = s.module("block", f"{block_class(s, False)}()", s.channels, True)
        inner = block
        if kind == "nested":
            inner = f"lambda t: checkpoint({block}, t * 1, use_reentrant={s.chance(0.3)}) * 1"
        if kind == "again":
            s.write(f"h = parts.Again.apply(h, {block}, *{block}.parameters())")
        else:
            s.write(f"h = checkpoint({inner}, h, use_reentrant={s.chance(0.3)})")
    elif kind == "free":
        s.write("h = parts.Free.apply(h * 1.0)")
    else:
        skip, source = s.new("g"), s.new("g")
        s.write(f"{skip} = h")
        with s.block("with torch.enable_grad():"):
            s.write(choose(s, "h = h.detach().requires_grad_() | h = (h * 1.0).requires_grad_()"))
            s.write(f"{source} = h")
            unit(s)
            graph = f"create_graph={s.chance(0.5)}, retain_graph=True"
            s.write(f"h, = torch.autograd.grad(h.square().sum(), {source}, {graph})")
        s.write("h = trial.with_strides_of_gradients(h)", f"h = h * 0.1 + {skip}")


def mode(s: Scope) -> None:
    """A block under another mode of PyTorch."""
    with s.block(f"with {choose(s, vocabulary.MODES)}:"):
        statement(s)
        if s.chance(0.3):
            unit(s)


def errors(s: Scope) -> None:
    """Exceptions that `forward` catches, or that the second call raises."""
    n, a = norm(s, s.channels), relu(s)
    bad = s.module("conv", f"nn.Conv2d({s.channels + 1}, {s.channels}, 3, padding=1)", s.channels)
    if s.chance(0.25):
        s.init.append("        self.calls = 0")
        s.write("self.calls += 1", f"h = {n.format('h')}")
        with s.block("if self.calls == 2:"):
            s.write(choose(s, 'raise ValueError("out of forward") | h = $bad(h)', bad=bad))
        return
    with s.block("try:"):
        s.write(choose(s, vocabulary.ERRORS, bad=bad, x=a.format(n.format("h"))))
    with s.block("except (RuntimeError, ValueError) as error:"):
        s.write("note(type(error).__name__)", "h = h * 2")


def child(s: Scope) -> None:
    block = s.module("block", f"{block_class(s, True)}()", s.channels, True)
    s.write(choose(s, vocabulary.CALLS_OF_CHILDREN, m=block))


def odd_child(s: Scope) -> None:
    """A child that returns no tensor."""
    ending, call = s.choice(options(vocabulary.ODD_CHILDREN)).split(" -> ")
    block = s.module("block", f"{block_class(s, True, ending)}()", s.channels, True)
    s.write(call.replace("$m", block))


def block_class(s: Scope, is_changing: bool, ending: str = "return h") -> str:
    """Writes a class that keeps the shape of h; returns its name.

    `is_changing=False`: no changes in place, which PyTorch does not detect in recomputed blocks.
    """
    inner = Scope(s.program, s.channels, s.size)
    inner.is_fixed = True
    statements = [unit, projection] + [residual, change_between] * is_changing
    for _ in range(s.choice([1, 1, 2])):
        s.choice(statements)(inner)
    inner.write(ending)
    return s.program.add_class("Block", inner)


STATEMENTS: list[Callable[[Scope], None]] = [
    *(residual, projection, in_row, dense, pool, squeeze, type_question, branch, change, write),
    *(change_between, change_between, state, autograd, mode, errors, child, odd_child),
]


def statement(s: Scope) -> None:
    s.choice([unit, unit, *STATEMENTS])(s)


class Program:
    """The text of a random model."""

    def __init__(self, seed: int, has_any_norm: bool = False, dims: int = 2) -> None:
        self.has_any_norm, self.dims = has_any_norm, dims
        self.random = random.Random(seed)
        self.choice = self.random.choice
        self.classes: list[str] = []
        self.scopes: dict[str, Scope] = {}

    def chance(self, p: float) -> bool:
        return self.random.random() < p

    def rarely(self, text: str, p: float, usual: str) -> str:
        """Draws one part of a text with probability p, else returns `usual`."""
        return choose(self, text) if self.chance(p) else usual

    def add_class(self, prefix: str, scope: Scope) -> str:
        name = f"{prefix}{len(self.classes)}" if prefix != "Net" else prefix
        self.classes.append(scope.text(name))
        self.scopes[name] = scope
        return name

    def text(self) -> str:
        channels, size = self.choice([4, 8]), self.choice([4, 6, 8])
        batch = self.choice([2, 2, 3, 1])
        net = Scope(self, channels, size)
        if self.chance(0.4):
            net.save()
        for write in self.random.sample(STATEMENTS, self.choice([1, 2, 3, 3, 4])):
            write(net)
            if self.chance(0.5):
                unit(net)
        unit(net)
        skip = self.choice(net.saved).name if net.saved else "h"
        ending = choose(self, vocabulary.RETURNS, s=skip) if self.chance(0.3) else "h"
        net.write(f"return {ending}")
        self.add_class("Net", net)
        before, after = (self._setups(self._modules(net)) for _ in range(2))
        call = self.rarely(vocabulary.CALLS, 0.15, "return net(x)")
        if "checkpoint" in call and CHANGES_STATE.search("".join(self.classes)):
            call = "return net(x)"
        given = self.rarely(vocabulary.INPUTS, 0.5, "x")
        shape = ", ".join(map(str, (batch, channels, *[size] * self.dims)))
        kinds = ["both", "both", "backward", "returned", "second"]
        prepared = self.rarely(vocabulary.PREPARATIONS, 0.1, "return net")
        if "parts." in prepared or "checkpoint(" in "".join([call, *self.classes]):
            kinds.remove("second")  # which they do not support
        functions = {
            "before(net)": before,
            "after(net)": after,
            "prepare(net)": [prepared],
            "make_input(randn)": [f"x = randn({shape})", f"return {given}"],
            "call(net, x)": [call],
        }
        parts = [HEADER, *self.classes]
        for head, lines in functions.items():
            parts.append("\n".join([f"def {head}:", *(f"    {line}" for line in lines), ""]))
        parts += [
            f'MODE = "{self.choice(["convert"] * 9 + ["fuse"])}"',
            f'MEMORY = "{self.choice(["store", "rebuild", "checkpoint"])}"',
            f'GRADIENTS = "{self.choice(kinds)}"\n',
        ]
        text = "\n".join(parts)
        if "nstance" in text and "channels_last" in text:
            # PyTorch's own gradient of an instance norm of one channels_last image can be wrong.
            text = text.replace("randn(1,", "randn(2,")
        return in_dimensions(text, self.dims)

    def _setups(self, modules: list[Module]) -> list[str]:
        lines = []
        while self.chance(0.35):
            m = self.choice(modules)
            own = getattr(vocabulary, f"{m.kind.upper()}_SETTINGS", vocabulary.SETTINGS)
            texts = [own, vocabulary.SETTINGS, f"net.$m.{choose(self, vocabulary.HOOKS)}"]
            lines.append(choose(self, self.choice(texts), m=m.path, channels=m.channels))
        return lines or ["pass"]

    def _modules(self, scope: Scope) -> list[Module]:
        """Returns the modules of a scope and of its blocks."""
        found = list(scope.modules)
        for line in scope.init:
            path, _, kind = line.strip().removeprefix("self.").partition(" = ")
            inner = self.scopes.get(kind.removesuffix("()"))
            if inner is not None:
                found += [m._replace(path=f"{path}.{m.path}") for m in self._modules(inner)]
        return found


# Patterns of texts about images, and what replaces them for sequences and for volumes.
_DIMENSIONS = (
    (r"(Norm|Conv|Pool|_pool|conv|dropout)2d", r"\g<1>1d", r"\g<1>3d"),
    (r"channels_last", "contiguous_format", "channels_last_3d"),
    (r"\(0, 2, 3\)", "(0, 2)", "(0, 2, 3, 4)"),
    (r"mean\(\(2, 3\)", "mean((2,)", "mean((2, 3, 4)"),
    (r"permute\(0, 2, 3, 1\)\.permute\(0, 3, 1, 2\)", "permute(0, 2, 1).permute(0, 2, 1)",
     "permute(0, 2, 3, 4, 1).permute(0, 4, 1, 2, 3)"),
    (r"(transpose|swapaxes)\(2, 3\)", r"\g<1>(2, 2)", r"\g<1>(2, 4)"),
    (r"view\(1, -1, 1, 1\)", "view(1, -1, 1)", "view(1, -1, 1, 1, 1)"),
    (r"ones\(3, 3, 1, 1,", "ones(3, 3, 1,", "ones(3, 3, 1, 1, 1,"),
    (r"h\[0, 0, 0, 0\]", "h[0, 0, 0]", "h[0, 0, 0, 0, 0]"),
    (r"dim\(\) == 4", "dim() == 3", "dim() == 5"),
    (r", -3\)", ", -2)", ", -4)"),
    (r"stride = \(2, 2\)", "stride = (2,)", "stride = (2, 2, 2)"),
    (r"pool(\w+)\(h, \((\d), \2\)\)", r"pool\1(h, \2)", r"pool\1(h, (\2, \2, \2))"),
    (r"\((\d), (\d), (\d), (\d)\)\)", r"(\1, \2))", r"(\1, \2, \3, \4, \1, \2))"),
    (r"\[:, :, (\S+), \1\]", r"[:, :, \1]", r"[:, :, \1, \1, \1]"),
)  # fmt: skip


def in_dimensions(text: str, dims: int) -> str:
    """Returns the program of images for sequences (1) or volumes (3)."""
    for pattern, *replacements in _DIMENSIONS if dims != 2 else ():
        text = re.sub(pattern, replacements[dims // 2], text)
    return text


def program(seed: int, has_any_norm: bool = False, dims: int = 2) -> str:
    return Program(seed, has_any_norm, dims).text()
