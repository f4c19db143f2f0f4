"""A tape of thirty lines that uses the library's local rules, for their tests and benchmarks.

It is autograd's own tracing with two node types that look up our rules first, and a backward pass in
topological order that sums with `accumulate`. Nothing here communicates, and MPI isn't needed.
"""

from autograd.core import JVPNode, VJPNode, primitive_jvps, primitive_vjps
from autograd.extend import vspace
from autograd.tracer import notrace_primitives, toposort, trace

from mpiad.differentiation.backward import accumulate
from mpiad.differentiation.forward import tangent_rule
from mpiad.differentiation.rules import JVP_RULES, VJP_RULES


class RuleNode(VJPNode):
    __slots__ = ()

    def __init__(self, value, fun, args, kwargs, parent_argnums, parents):
        self.parents = parents
        rule = VJP_RULES.get(fun) or primitive_vjps[fun]
        self.vjp = rule(parent_argnums, value, args, kwargs)


class RuleTangentNode(JVPNode):
    __slots__ = ()

    def __init__(self, value, fun, args, kwargs, parent_argnums, parents):
        rule = JVP_RULES.get(fun) or primitive_jvps.get(fun) or tangent_rule(fun, value, parent_argnums)
        self.g = rule(parent_argnums, [parent.g for parent in parents], value, args, kwargs)


notrace_primitives[RuleNode] = notrace_primitives[VJPNode]
notrace_primitives[RuleTangentNode] = notrace_primitives[JVPNode]


def make_vjp(fun, x):
    value, end = trace(RuleNode.new_root(), fun, x)
    if end is None:
        return lambda g: vspace(x).zeros(), value

    def vjp(g):
        total = _backward(g, end)
        return vspace(x).zeros() if total is None else total

    return vjp, value


def _backward(g, end):
    totals = {end: (g, False)}
    for node in toposort(end):
        total = totals.pop(node)
        if total[0] is None:
            continue
        for parent, part in zip(node.parents, node.vjp(total[0])):
            totals[parent] = accumulate(*totals.get(parent, (None, False)), part)
    return total[0]


def grad(fun):
    def gradient(x):
        vjp, value = make_vjp(fun, x)
        return vjp(vspace(value).ones())

    return gradient


def jvp(fun, x, v):
    value, end = trace(RuleTangentNode.new_root(v), fun, x)
    return value, vspace(value).zeros() if end is None else end.g
