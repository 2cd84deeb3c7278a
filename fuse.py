"""Cheaper passes through a LoRA model while it is trained: the same formulas in fewer kernels, with less kept.

A micro-batch costs as much in launching small kernels as in computing, and what the gated MLP keeps for its
backward pass is two thirds of all activations. So a projection with its adapter is one autograd function here, the
MLP another, which keeps gate and up and computes their product again, and the RMSNorm is torch's own kernel.
`fuse(model)` changes the modules of the architectures it knows and leaves all others as they are.

Shapes: N tokens, I in, O out, R the adapter's rank; W [O, I], A [R, I], B [O, R].
"""

from __future__ import annotations

import types
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

NORMS = ("LlamaRMSNorm", "Qwen2RMSNorm", "Qwen3RMSNorm")
MLPS = ("LlamaMLP", "Qwen2MLP", "Qwen3MLP")


class Projection(NamedTuple):
    """A frozen linear layer and its adapter: y = x W^T + bias + scale (x A^T) B^T."""

    weight: Tensor
    bias: Tensor | None
    a: Tensor
    b: Tensor
    scale: float


def project(x: Tensor, p: Projection) -> tuple[Tensor, Tensor]:
    """x [N, I] -> y [N, O] and x A^T [N, R], which the backward pass needs."""
    low = x @ p.a.to(x.dtype).T
    return F.linear(x, p.weight, p.bias).addmm_(low, p.b.to(x.dtype).T, alpha=p.scale), low


def project_back(dy: Tensor, x: Tensor, low: Tensor, p: Projection) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of x, A and B from that of y."""
    dlow = (dy @ p.b.to(dy.dtype)).mul_(p.scale)
    db = (dy.T @ low).to(p.b.dtype).mul_(p.scale)
    da = (dlow.T @ x).to(p.a.dtype)
    return (dy @ p.weight).addmm_(dlow, p.a.to(dy.dtype)), da, db


class Project(torch.autograd.Function):
    """`project` as one node of the graph. W and its bias are frozen."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *p: Any) -> Tensor:
        y, low = project(x, Projection(*p))
        ctx.save_for_backward(x, low, *p[:4])
        ctx.scale = p[4]
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, low, *p = ctx.saved_tensors
        dx, da, db = project_back(dy, x, low, Projection(*p, ctx.scale))
        return dx, None, None, da, db, None


class GatedMLP(torch.autograd.Function):
    """down(silu(gate(x)) * up(x)); keeps x, gate and up (2 x intermediate size a token in place of 4)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *parts: Any) -> Tensor:
        gate_p, up_p, down_p = Projection(*parts[:5]), Projection(*parts[5:10]), Projection(*parts[10:])
        gate, gate_low = project(x, gate_p)
        up, up_low = project(x, up_p)
        y, down_low = project(F.silu(gate).mul_(up), down_p)
        ctx.save_for_backward(x, gate, up, gate_low, up_low, down_low, *gate_p[:4], *up_p[:4], *down_p[:4])
        ctx.scales = gate_p.scale, up_p.scale, down_p.scale
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, gate, up, gate_low, up_low, down_low, *p = ctx.saved_tensors
        gate_p, up_p, down_p = (Projection(*p[4 * i : 4 * i + 4], scale) for i, scale in enumerate(ctx.scales))
        act = F.silu(gate)
        dh, down_da, down_db = project_back(dy, act * up, down_low, down_p)
        dup, dup_a, dup_b = project_back(dh * act, x, up_low, up_p)
        dgate = torch.ops.aten.silu_backward(dh.mul_(up), gate)
        dx, dgate_a, dgate_b = project_back(dgate, x, gate_low, gate_p)
        gradients = [(None, None, da, db, None) for da, db in
                     ((dgate_a, dgate_b), (dup_a, dup_b), (down_da, down_db))]  # fmt: skip
        return dx.add_(dup), *gradients[0], *gradients[1], *gradients[2]


def projection_of(module: nn.Module) -> Projection | None:
    """A module's weights, if it is a plain linear layer with one plain LoRA adapter that is switched on."""
    active = getattr(module, "active_adapters", ())
    if len(active) != 1 or module.disable_adapters or module.merged:
        return None
    name = active[0]
    base = module.base_layer
    if name not in module.lora_A or name in module.lora_variant or module.lora_bias[name]:
        return None
    if type(base) is not nn.Linear or (module.training and type(module.lora_dropout[name]) is not nn.Identity):
        return None
    a, b = module.lora_A[name].weight, module.lora_B[name].weight
    return Projection(base.weight, base.bias, a, b, module.scaling[name])


def linear_forward(self: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    p = None if args or kwargs else projection_of(self)
    if p is None:
        return type(self).forward(self, x, *args, **kwargs)
    y = Project.apply(x.to(p.weight.dtype).reshape(-1, x.shape[-1]), *p)
    return y.view(*x.shape[:-1], -1)


def mlp_forward(self: Any, x: Tensor) -> Tensor:
    parts = [projection_of(module) for module in (self.gate_proj, self.up_proj, self.down_proj)]
    if None in parts:
        return type(self).forward(self, x)
    y = GatedMLP.apply(x.to(parts[0].weight.dtype).reshape(-1, x.shape[-1]), *parts[0], *parts[1], *parts[2])
    return y.view(*x.shape[:-1], -1)


def norm_forward(self: Any, hidden_states: Tensor) -> Tensor:
    return F.rms_norm(hidden_states, self.weight.shape, self.weight, self.variance_epsilon)


def fuse(model: nn.Module) -> None:
    """Let a model's RMSNorms, adapted projections and gated MLPs compute as above, where they are of a known kind."""
    from peft.tuners.lora import Linear

    for module in model.modules():
        kind = type(module).__name__
        if kind in NORMS:
            module.forward = types.MethodType(norm_forward, module)
        elif type(module) is Linear:
            module.forward = types.MethodType(linear_forward, module)
        elif kind in MLPS and module.config.hidden_act == "silu":
            module.forward = types.MethodType(mlp_forward, module)


def unfuse(model: nn.Module) -> None:
    """Give every module its own forward pass back."""
    for module in model.modules():
        if getattr(vars(module).get("forward"), "__func__", None) in (norm_forward, linear_forward, mlp_forward):
            del module.forward
