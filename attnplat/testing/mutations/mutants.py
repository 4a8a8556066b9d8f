"""Mutants: the source with one small change each.

Comparisons move by one, ones appear and vanish, terms are dropped, signs and arguments
swapped. What only makes an error message, an assertion or an annotation is left alone.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass

Change = Callable[[ast.AST], Iterator[ast.AST]]

_NEIGHBOUR: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
}
_OPPOSITE: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.FloorDiv: ast.Mod,
    ast.Mod: ast.FloorDiv,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
}
_OTHER = {"min": "max", "max": "min", "any": "all", "all": "any", "amax": "amin", "zeros": "ones"}


@dataclass(frozen=True)
class Mutant:
    """One changed module.

    Attributes:
        module: the module's name.
        function: the function or method in it.
        change: `original -> changed`, and which of several equal ones it is.
        tree: the changed source.
    """

    module: str
    function: str
    change: str
    tree: ast.Module

    @property
    def name(self) -> str:
        """Stable as long as the changed expression stays."""
        return f"{self.module.rpartition('.')[2]}.{self.function}: {self.change}"


def mutants(module: str, source: str) -> Iterator[Mutant]:
    """Every mutant of a module's functions, in order."""
    tree = ast.parse(source)
    for function, node in functions(tree):
        count: dict[str, int] = {}
        for target in list(expressions(node)):
            for changed in changes(target):
                told = f"{ast.unparse(target)} -> {ast.unparse(changed)}"
                count[told] = count.get(told, 0) + 1
                more = f" ({count[told]})" if count[told] > 1 else ""
                yield Mutant(module, function, told + more, replaced(tree, target, changed))


def functions(tree: ast.Module) -> Iterator[tuple[str, ast.AST]]:
    """Functions and methods by their name, those inside others with them."""

    def walk(node: ast.AST, prefix: str) -> Iterator[tuple[str, ast.AST]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef):
                yield from walk(child, f"{prefix}{child.name}.")
            elif isinstance(child, ast.FunctionDef):
                yield f"{prefix}{child.name}", child

    yield from walk(tree, "")


def expressions(node: ast.AST) -> Iterator[ast.AST]:
    """Expressions that compute something, the outer ones first."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Raise | ast.Assert | ast.JoinedStr | ast.arguments):
            continue
        if isinstance(child, ast.AnnAssign):
            if child.value is not None:
                yield child.value
                yield from expressions(child.value)
            continue
        if isinstance(node, ast.FunctionDef) and child is node.returns:
            continue
        if isinstance(child, ast.expr):
            yield child
        yield from expressions(child)


def changes(node: ast.AST) -> Iterator[ast.AST]:
    """The ways to get an expression slightly wrong."""
    match node:
        case ast.Compare(ops=[op]) if type(op) in _NEIGHBOUR:
            yield _with(node, ops=[_NEIGHBOUR[type(op)]()])
        case ast.BinOp(op=op) if type(op) in _OPPOSITE:
            yield _with(node, op=_OPPOSITE[type(op)]())
            yield node.left
            if not isinstance(op, ast.Sub | ast.Mod | ast.FloorDiv):
                yield node.right
        case ast.BoolOp(op=op, values=[first, *rest]):
            yield _with(node, op=ast.Or() if isinstance(op, ast.And) else ast.And())
            yield first
            yield rest[0] if len(rest) == 1 else _with(node, values=rest)
        case ast.UnaryOp(op=ast.Not() | ast.Invert() | ast.USub(), operand=operand):
            yield operand
        case ast.Constant(value=bool()):
            yield ast.Constant(not node.value)
        case ast.Constant(value=int() as value) if abs(value) <= 8:
            yield ast.Constant(value + 1)
        case ast.Call():
            yield from _calls(node)
        case ast.IfExp(body=body, orelse=orelse):
            yield body
            yield orelse


def _calls(node: ast.Call) -> Iterator[ast.AST]:
    function = node.func
    name = getattr(function, "attr", getattr(function, "id", ""))
    if name in _OTHER:
        other = copy.deepcopy(function)
        setattr(other, "attr" if isinstance(function, ast.Attribute) else "id", _OTHER[name])
        yield _with(node, func=other)
    if name == "where" and len(node.args) == 3:
        yield _with(node, args=[node.args[0], node.args[2], node.args[1]])
        yield node.args[1]
    elif len(node.args) >= 2 and not any(isinstance(a, ast.Starred) for a in node.args[:2]):
        yield _with(node, args=[node.args[1], node.args[0], *node.args[2:]])
    if name in ("clamp", "clamp_", "contiguous", "abs", "floor", "round"):
        yield function.value if isinstance(function, ast.Attribute) else node


def _with(node: ast.AST, **fields: object) -> ast.AST:
    """A copy of a node with fields changed."""
    made = copy.copy(node)
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def replaced(tree: ast.Module, target: ast.AST, changed: ast.AST) -> ast.Module:
    """The tree with one node replaced; all others are shared."""

    class Replace(ast.NodeTransformer):
        def visit(self, node: ast.AST) -> ast.AST:
            if node is target:
                return ast.copy_location(copy.copy(changed), target)
            fields, altered = {}, False
            for name, value in ast.iter_fields(node):
                new = self._value(value)
                altered = altered or new is not value
                fields[name] = new
            return _with(node, **fields) if altered else node

        def _value(self, value: object) -> object:
            if isinstance(value, ast.AST):
                return self.visit(value)
            if isinstance(value, list):
                made = [self._value(item) for item in value]
                same = all(a is b for a, b in zip(made, value, strict=True))
                return value if same else made
            return value

    made = Replace().visit(tree)
    assert isinstance(made, ast.Module)
    return ast.fix_missing_locations(made)
