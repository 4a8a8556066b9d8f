"""Mutants: the source with one small change each.

Comparisons move by one, ones appear and vanish, terms are dropped, signs and arguments
swapped. What only makes an error message, an assertion or an annotation is left alone.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator
from dataclasses import dataclass

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
    ast.Mult: ast.Add,
    ast.FloorDiv: ast.Mod,
    ast.Mod: ast.FloorDiv,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
}
_OTHER = {"min": "max", "max": "min", "any": "all", "all": "any", "amax": "amin"}


@dataclass(frozen=True)
class Mutant:
    """One changed module.

    Attributes:
        module: the module's name.
        function: the function or method in it.
        change: `original -> changed`, and which of several equal ones it is.
        source: the unchanged source.
        target, changed: the expression in it, and what takes its place.
    """

    module: str
    function: str
    change: str
    source: ast.Module
    target: ast.AST
    changed: ast.AST

    @property
    def name(self) -> str:
        """Stable as long as the changed expression stays."""
        return f"{self.module.rpartition('.')[2]}.{self.function}: {self.change}"

    @property
    def tree(self) -> ast.Module:
        """The changed source."""
        made = replaced(self.source, self.target, self.changed)
        assert isinstance(made, ast.Module)
        return made

    @property
    def changed_function(self) -> ast.FunctionDef:
        """The changed function alone, without its decorators."""
        whole = dict(functions(self.source))[self.function]
        made = replaced(whole, self.target, self.changed)
        assert isinstance(made, ast.FunctionDef)
        made = copy.copy(made)
        made.decorator_list = []
        return made


def mutants(module: str, source: str) -> Iterator[Mutant]:
    """Every mutant of a module's functions, in order."""
    tree = ast.parse(source)
    for function, node in functions(tree):
        count: dict[str, int] = {}
        for target, parent in list(expressions(node)):
            for changed in changes(target, parent):
                told = f"{ast.unparse(target)} -> {ast.unparse(changed)}"
                count[told] = count.get(told, 0) + 1
                more = f" ({count[told]})" if count[told] > 1 else ""
                yield Mutant(module, function, told + more, tree, target, changed)


def functions(tree: ast.Module) -> Iterator[tuple[str, ast.AST]]:
    """Functions and methods by their name, those inside others with them."""

    def walk(node: ast.AST, prefix: str) -> Iterator[tuple[str, ast.AST]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef):
                yield from walk(child, f"{prefix}{child.name}.")
            elif isinstance(child, ast.FunctionDef):
                yield f"{prefix}{child.name}", child

    yield from walk(tree, "")


def expressions(node: ast.AST) -> Iterator[tuple[ast.AST, ast.AST]]:
    """Expressions that compute something, with what they are part of; the outer ones first."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Raise | ast.Assert | ast.JoinedStr | ast.arguments):
            continue
        if _called(child) == "isinstance":
            continue
        if isinstance(node, ast.AnnAssign) and child is node.annotation:
            continue
        if isinstance(node, ast.FunctionDef) and child is node.returns:
            continue
        if isinstance(child, ast.expr):
            yield child, node
        yield from expressions(child)


def _called(node: ast.AST) -> str:
    """The last part of what is called; nothing for other expressions."""
    if not isinstance(node, ast.Call):
        return ""
    return getattr(node.func, "attr", getattr(node.func, "id", ""))


_SYMMETRIC = frozenset({"min", "max", "maximum", "logaddexp", "equal", "allclose", "transpose"})
"""Functions whose first two arguments may be swapped."""

_COUNTING = frozenset({"range", "arange", "min", "max", "clamp", "roll", "expand"})
_ALWAYS = ast.BinOp | ast.Compare | ast.Slice


def changes(node: ast.AST, parent: ast.AST) -> Iterator[ast.AST]:
    """The ways to get an expression slightly wrong."""
    match node:
        case ast.Compare(ops=[op]) if type(op) in _NEIGHBOUR:
            yield _with(node, ops=[_NEIGHBOUR[type(op)]()])
        case ast.BinOp(op=op) if type(op) in _OPPOSITE:
            yield _with(node, op=_OPPOSITE[type(op)]())
            yield node.left
            if isinstance(op, ast.Add | ast.BitAnd | ast.BitOr):
                yield node.right
        case ast.BoolOp(op=op, values=[first, *rest]):
            yield first
            yield rest[0] if len(rest) == 1 else _with(node, values=rest)
        case ast.UnaryOp(op=ast.Not() | ast.Invert() | ast.USub(), operand=operand):
            yield operand
        case ast.Constant(value=int() as value) if not isinstance(value, bool):
            counted = isinstance(parent, _ALWAYS) or _called(parent) in _COUNTING
            if counted and abs(value) <= 8:
                yield ast.Constant(value + 1)
        case ast.Call():
            yield from _calls(node)


def _calls(node: ast.Call) -> Iterator[ast.AST]:
    name, function = _called(node), node.func
    if name in _OTHER:
        other = copy.copy(function)
        setattr(other, "attr" if isinstance(function, ast.Attribute) else "id", _OTHER[name])
        yield _with(node, func=other)
    if name == "where" and len(node.args) == 3:
        yield node.args[1]
        yield node.args[2]
    elif len(node.args) >= 2 and name not in _SYMMETRIC and _differ(*node.args[:2]):
        yield _with(node, args=[node.args[1], node.args[0], *node.args[2:]])
    if name in ("clamp", "clamp_", "abs", "round") and isinstance(function, ast.Attribute):
        yield function.value


def _differ(one: ast.expr, other: ast.expr) -> bool:
    starred = isinstance(one, ast.Starred) or isinstance(other, ast.Starred)
    return not starred and ast.unparse(one) != ast.unparse(other)


def _with(node: ast.AST, **fields: object) -> ast.AST:
    """A copy of a node with fields changed."""
    made = copy.copy(node)
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def replaced(tree: ast.AST, target: ast.AST, changed: ast.AST) -> ast.AST:
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
    assert isinstance(made, ast.AST)
    return made
