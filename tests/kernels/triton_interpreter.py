"""Patches of Triton's interpreter: it rounds as hardware does and takes a third of the time."""

import dataclasses

import numpy as np
import torch
from triton import language
from triton.language import core
from triton.runtime import interpreter


def patch() -> None:
    """Patches the interpreter of this process."""
    _round_to_nearest()
    _round_once()
    _allow_scalars_as_bounds()
    _skip_overflow_checks()
    _prepare_once()
    _reuse_types()


def _round_to_nearest() -> None:
    """Rounds float32 to bfloat16 to nearest, as hardware does, and not towards zero."""
    other = interpreter._convert_float

    def convert(value, source, target, rounding_mode):
        if (source, target) == (language.float32, language.bfloat16):
            rounded = torch.from_numpy(np.ascontiguousarray(value)).bfloat16()
            return rounded.view(torch.uint16).numpy()
        if (source, target) == (language.bfloat16, language.float32):
            return value.astype(np.uint32) << 16
        return other(value, source, target, rounding_mode)

    interpreter._convert_float = convert


def _round_once() -> None:
    """Rounds `fma` of float32 once."""
    plain = interpreter.InterpreterBuilder.create_fma

    def fma(self, x, y, z):
        if x.data.dtype != np.float32:
            return plain(self, x, y, z)
        with np.errstate(all="ignore"):
            exact = x.data.astype(np.float64) * y.data + z.data
            return interpreter.TensorHandle(exact.astype(np.float32), z.dtype.scalar)

    interpreter.InterpreterBuilder.create_fma = fma


def _allow_scalars_as_bounds() -> None:
    """Lets scalars be bounds of loops with NumPy 2.5, as Triton 3.9 does."""
    patch_tensor = interpreter._patch_lang_tensor

    def patch_tensor_and_index(tensor, *scope):
        patch_tensor(tensor, *scope)
        tensor.__index__ = lambda self: int(self.handle.data.squeeze())

    interpreter._patch_lang_tensor = patch_tensor_and_index


def _skip_overflow_checks() -> None:
    """Leaves out the check of every integer operation, which takes several operations."""
    options = interpreter.interpreter_builder.options
    interpreter.interpreter_builder.options = dataclasses.replace(options, sanitize_overflow=False)


def _prepare_once() -> None:
    """Prepares the language for a kernel, and not again for each device function it calls."""
    prepare = interpreter._patch_lang
    plain_range = language.static_range

    def prepare_once(function):
        uses = [m for m in function.__globals__.values() if m is language or m is core]
        if any(m.static_range is plain_range for m in uses):
            return prepare(function)
        return None

    interpreter._patch_lang = prepare_once


def _reuse_types() -> None:
    """Keeps block types, and what tensors and NumPy derive from a type, by the name of the type."""
    types, numpy_types, shapes = {}, {}, {}
    new_type, new_tensor = core.block_type.__init__, core.tensor.__init__
    new_numpy_type = interpreter._get_np_dtype

    def reuse_type(self, element_ty, shape):
        if type(self) is not core.block_type:
            new_type(self, element_ty, shape)
            return
        key = element_ty.name, *shape
        if key not in types:
            new_type(self, element_ty, shape)
            types[key] = vars(self)
        self.__dict__ = types[key]

    def reuse_numpy_type(tensor_type):
        name = tensor_type.name
        if name not in numpy_types:
            numpy_types[name] = new_numpy_type(tensor_type)
        return numpy_types[name]

    def reuse_shape(self, handle, type):
        name = type.name
        if name not in shapes:
            new_tensor(self, handle, type)
            shapes[name] = {n: vars(self)[n] for n in ("shape", "numel", "dtype")}
        self.__dict__ = {"handle": handle, "type": type, **shapes[name]}

    core.block_type.__init__ = reuse_type
    interpreter._get_np_dtype = reuse_numpy_type
    core.tensor.__init__ = reuse_shape
