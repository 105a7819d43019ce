"""Make Triton's interpreter several times as fast, and equal on every CPU. Import this with TRITON_INTERPRET set."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import numpy as np
from triton.runtime import interpreter


def patch() -> None:
    _call_directly()
    _patch_once_a_launch()
    _skip_checks()
    _share_shapes()
    _keep_operands()
    _sum_in_one_order()
    _round_fma_once()


def _call_directly() -> None:
    """Triton's interpreter calls each function of triton.language through two others, which pass the semantics on, and
    each unwraps its arguments. Use one call, and return at once what is not wrapped."""
    core, semantic = interpreter.tl.core, interpreter.interpreter_semantic
    checked = core.builtin(lambda: None).__code__
    unwrap = core._unwrap_if_constexpr
    bare = core.tensor, int, float, bool, core.dtype

    def patch_attr(place: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        function = member.__wrapped__ if getattr(member, "__code__", None) is checked else member

        def call(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = semantic
            return function(*args, **kwargs)

        scope.set_attr(place, name, call)

    interpreter._patch_attr = patch_attr
    core._unwrap_if_constexpr = lambda x: x if type(x) in bare else unwrap(x)


def _patch_once_a_launch() -> None:
    """Triton's interpreter patches triton.language at each launch, and again at each call of a device function inside
    it; `tl.sum` is one. Patching takes longer than most of those calls, so do it once a launch, with the patches of the
    first launch."""
    both = SimpleNamespace(__globals__={"tl": interpreter.tl, "core": interpreter.tl.core})
    patch, scope, patches = interpreter._patch_lang, None, []

    def restore() -> None:
        nonlocal scope
        restored, scope = scope, None
        type(restored).restore(restored)

    def once(function: Any) -> Any:
        nonlocal scope
        if scope is not None:  # within a launch
            return None
        if patches:
            scope = interpreter._LangPatchScope()
            for place, name, value in patches:
                scope.set_attr(place, name, value)
        else:
            scope = patch(both)
            patches.extend((place, name, place.__dict__[name]) for place, name, _ in scope._changes)
        scope.restore = restore
        return scope

    interpreter._patch_lang = once


def _skip_checks() -> None:
    """Look dtypes up once, and leave out the checks of every integer sum for overflow, which a GPU does not do, and of
    the size of every array's numbers."""
    look_up = interpreter._get_np_dtype
    known: dict[str, Any] = {}

    def np_dtype(kind: Any) -> Any:
        name = kind.scalar.name if isinstance(kind, interpreter.tl.block_type) else kind.name
        return known[name] if name in known else known.setdefault(name, look_up(kind))

    def handle(self: Any, data: Any, dtype: Any) -> None:
        self.data, self.dtype, self.attr = data, dtype, {}

    compute, boolean = interpreter.InterpreterBuilder.binary_op, np.dtype(bool)

    def binary_op(self: Any, lhs: Any, rhs: Any, op: Any) -> Any:
        if lhs.data.dtype is not boolean:
            output = op(lhs.data, rhs.data)
            if output.itemsize <= lhs.data.itemsize:
                return interpreter.TensorHandle(output, lhs.dtype.scalar)
        return compute(self, lhs, rhs, op)

    interpreter._get_np_dtype = np_dtype
    interpreter.TensorHandle.__init__ = handle
    interpreter.InterpreterBuilder.binary_op = binary_op
    interpreter.interpreter_builder.options = dataclasses.replace(
        interpreter.interpreter_builder.options, sanitize_overflow=False
    )


def _share_shapes() -> None:
    """Each operation makes types and tensors, whose shapes are tuples of constants. Their construction takes longer
    than the operation, so make the parts of a shape once, and recognise equal shapes by identity."""
    core, semantic = interpreter.tl.core, interpreter.interpreter_semantic
    make_type, broadcast = core.block_type.__init__, type(semantic).broadcast_impl_value
    promote = type(semantic).computation_type_impl
    shapes: dict[tuple[int, ...], tuple[Any, int, tuple[Any, Any]]] = {}
    made: dict[int, tuple[Any, int, tuple[Any, Any]]] = {}  # the same by the identity of a shape that was made here
    promoted: dict[tuple[str | bool, ...], Any] = {}

    def block_type(self: Any, element_ty: Any, shape: Any) -> None:
        known = made.get(id(shape))
        if known is None:
            key = tuple([n.value if isinstance(n, core.constexpr) else n for n in shape])
            if key not in shapes:
                make_type(self, element_ty, shape)
                of_tensors = core.tuple([core.constexpr(n) for n in key]), core.constexpr(self.numel)
                shapes[key] = made[id(self.shape)] = self.shape, self.numel, of_tensors
            known = shapes[key]
        self.element_ty = element_ty
        self.shape, self.numel, self.of_tensors = known

    scalar = core.tuple([]), core.constexpr(1)

    def tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = type.of_tensors if type.is_block() else scalar

    def equal(self: Any, other: Any) -> bool:
        return isinstance(other, core.block_type) and self.shape is other.shape and self.element_ty == other.element_ty

    def of_one_shape(self: Any, left: Any, right: Any) -> tuple[Any, Any]:
        if left.type.is_block() and right.type.is_block() and left.type.shape is right.type.shape:
            return left, right
        return broadcast(self, left, right)

    def promotion(self: Any, left: Any, left_is_scalar: bool, right: Any, right_is_scalar: bool, divides: bool) -> Any:
        key = left.name, left_is_scalar, right.name, right_is_scalar, divides
        if key not in promoted:
            promoted[key] = promote(self, left, left_is_scalar, right, right_is_scalar, divides)
        return promoted[key]

    core.block_type.__init__ = block_type
    core.block_type.__eq__ = equal
    core.block_type.to_ir = lambda self, builder: self
    core.block_type.name = property(lambda self: f"<{self.shape}, {self.element_ty}>", lambda self, name: None)
    core.tensor.__init__ = tensor
    type(semantic).broadcast_impl_value = of_one_shape
    type(semantic).computation_type_impl = promotion


def _keep_operands() -> None:
    """Operands of most operations need no conversion; whether they do depends on their dtypes alone. Of two shapes the
    result's one is known after the first time, and numpy broadcasts the values. A number next to a tensor becomes the
    same constant each time."""
    core, semantic = interpreter.tl.core, type(interpreter.interpreter_semantic)
    convert, cast, equal = semantic.binary_op_type_checking_impl, semantic.cast, core.dtype.__eq__
    kept: dict[tuple[Any, ...], bool] = {}
    types: dict[tuple[int, int], Any] = {}
    constants: dict[tuple[Any, ...], Any] = {}

    def alike(self: Any, lhs: Any, rhs: Any) -> tuple[Any, Any]:
        if lhs.shape is rhs.shape:
            return lhs, rhs
        key = id(lhs.shape), id(rhs.shape)
        if key not in types:
            types[key] = self.broadcast_impl_value(lhs, rhs)[0].type
        of = types[key].with_element_ty
        return core.tensor(lhs.handle, of(lhs.dtype)), core.tensor(rhs.handle, of(rhs.dtype))

    def operands(self: Any, lhs: Any, rhs: Any, *flags: Any, **more: Any) -> tuple[Any, Any]:
        """`flags` and `more` say which operation it is: whether it takes pointers, computes, or divides."""
        left, right = type(lhs), type(rhs)
        if left is right is core.tensor:
            key: tuple[Any, ...] = lhs.dtype.name, rhs.dtype.name, *flags, *more.items()
            if kept.get(key):
                return alike(self, lhs, rhs)
            a, b = convert(self, lhs, rhs, *flags, **more)
            kept[key] = a.dtype == lhs.dtype and b.dtype == rhs.dtype
            return a, b
        if left is core.tensor and right in (int, float):
            key = lhs.dtype.name, id(lhs.shape), repr(rhs), *flags, *more.items()
            if key in constants:
                return lhs, constants[key]
            a, b = convert(self, lhs, rhs, *flags, **more)
            if a is lhs:
                constants[key] = b
            return a, b
        return convert(self, lhs, rhs, *flags, **more)

    def cast_unless_equal(self: Any, x: Any, dtype: Any, *rounding: Any, **more: Any) -> Any:
        return x if x.dtype is dtype else cast(self, x, dtype, *rounding, **more)

    semantic.binary_op_type_checking_impl = operands
    semantic.cast = cast_unless_equal
    core.dtype.__eq__ = lambda self, other: self is other or equal(self, other)


def _sum_in_one_order() -> None:
    """Triton's interpreter computes `tl.dot` with BLAS, which on some CPUs adds up a row differently from the next. A
    GPU treats all rows of a tile alike, so do that here too."""

    def dot(self: Any, a: Any, b: Any, d: Any, *_: Any) -> Any:
        kind = d.data.dtype
        product = np.einsum("...ij,...jk->...ik", a.data.astype(kind), b.data.astype(kind))
        return interpreter.TensorHandle(product + d.data, d.dtype.scalar)

    interpreter.InterpreterBuilder.create_dot = dot


def _round_fma_once() -> None:
    """Before 3.9, Triton's interpreter rounds twice in `tl.fma` of float32, and a GPU once. So round the float64 sum
    to odd: of its two neighbours in float64 take the one with the odd last bit, and float32 is rounded right."""
    fma = interpreter.InterpreterBuilder.create_fma
    if hasattr(interpreter._interpreter, "fma_fp32"):
        return

    def once(self: Any, x: Any, y: Any, z: Any) -> Any:
        if z.data.dtype != np.float32:
            return fma(self, x, y, z)
        product, addend = np.multiply(x.data, y.data, dtype=np.float64), z.data.astype(np.float64)  # both exact
        total = np.asarray(product + addend)
        with np.errstate(invalid="ignore"):  # infinities
            part = total - product
            error = (product - (total - part)) + (addend - part)
        bits = total.view(np.int64)
        even = np.isfinite(total) & (error != 0) & (bits & 1 == 0)
        odd = np.where(even, bits + np.where((error > 0) == (total > 0), 1, -1), bits).view(np.float64)
        return interpreter.TensorHandle(odd.astype(np.float32), z.dtype.scalar)

    interpreter.InterpreterBuilder.create_fma = once
