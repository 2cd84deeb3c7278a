"""What a decode step is made of: attention, norms, rotation, sampling, once in plain torch and once in Triton.

TorchOps runs anywhere and is the reference; TritonOps overrides it with kernels that a CUDA graph can hold. The
matrix products between them are torch's in both, see decode.py.

Shapes: N tokens or rows, H query heads, K key/value heads, G = H / K, D head size, L positions, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

SLOT, POS, CELL, TOKEN, DONE = range(5)  # lines of the decoding state, see Run

Parts = list[tuple[Tensor, Tensor | None]]  # weight [out, in] and bias [out] of outputs that lie side by side


@dataclass(frozen=True)
class Layer:
    """One decoder layer of a weight set."""

    norm_in: Tensor
    norm_mid: Tensor
    q_norm: Tensor | None
    k_norm: Tensor | None
    qkv: Parts
    out: Parts
    gate_up: Parts
    down: Parts


@dataclass(frozen=True)
class Spec:
    """The numbers of a model that the operations need."""

    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    scale: float


@dataclass
class Where:
    """Where the N tokens of a forward pass stand, and what plain torch derives from that for all layers."""

    slot: Tensor  # [N]
    pos: Tensor  # [N]
    decode: bool  # one token a row
    limit: int = 0  # no row is longer (plain torch only)
    window: slice | None = None  # the slots, if they are consecutive: then attention reads the cache in place
    rope: tuple[Tensor, Tensor] | None = None  # cos and signed sin, [N, 1, D]
    flat: Tensor | None = None  # lines of the flattened cache that the new keys and values go to, [N * 2K]
    bias: Tensor | None = None  # 0 where a position is visible, -inf elsewhere, [N * K, 1, L]


@dataclass
class Run:
    """Buffers of the sampling. The last line of uniforms and out takes the rows that fill up a bucket."""

    uniforms: Tensor  # [rows + 1, tokens]
    out: Tensor  # [rows + 1, tokens]
    state: Tensor  # [5, rows]: slot, position, cell of uniforms and out, last token, ended or not
    eos: Tensor  # [number of end-of-turn ids]
    ends: Tensor  # [V], 1 for an end-of-turn id
    inverse: Tensor  # [1], 1 / temperature, or 0 for greedy
    temperature: float = 1.0


def pick(logits: Tensor, u: Tensor, temperature: float) -> Tensor:
    """Inverse CDF of softmax(logits [N, V] / temperature) at u [N]; the argmax at temperature 0 -> [N]."""
    if temperature == 0:
        return logits.argmax(-1)
    cdf = (logits.double() / temperature).softmax(-1).cumsum(-1)  # ends nearer to 1 than any u
    return torch.searchsorted(cdf, u.double()[:, None], right=True)[:, 0]


class TorchOps:
    """The operations between the matrix products, in plain torch."""

    def __init__(self, spec: Spec):
        self.spec = spec

    def bind(self, cache: Tensor, angles: Tensor, scaling: float) -> None:
        """Tables for a layer's cache [2, slots, K, L, D] and the angles [L, D/2] of the rotation."""
        heads, length, device = self.spec.kv_heads, cache.shape[3], cache.device
        cos, sin = angles.cos() * scaling, angles.sin() * scaling
        self.rope = torch.stack([torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)], 1)  # [L, 2, D]
        head = torch.arange(2 * heads, device=device)  # keys of all heads, then values
        self.lines = (head // heads * (cache.shape[1] * heads) + head % heads) * length
        self.bias = torch.full((length, length), -torch.inf, dtype=cache.dtype, device=device).triu_(1)

    def prepare(self, at: Where) -> None:
        """What all layers share."""
        heads, length = self.spec.kv_heads, len(self.bias)
        cos, sin = self.rope[at.pos].split(1, 1)
        at.rope = cos, sin
        at.flat = (torch.add(at.pos, at.slot, alpha=heads * length)[:, None] + self.lines).view(-1)
        if at.decode:
            pos = at.pos[:, None].expand(-1, heads).reshape(-1)
            at.bias = self.bias[:, : at.limit].index_select(0, pos)[:, None]

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """RMS norm over the last dimension, in float32."""
        if x.dtype == torch.float32:
            return F.rms_norm(x, x.shape[-1:], weight, self.spec.eps)
        h = x.float()
        return weight * (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.spec.eps)).to(x.dtype)

    def add_norm(self, x: Tensor, delta: Tensor | None, weight: Tensor) -> tuple[Tensor, Tensor]:
        """x + delta and its norm, both [N, hidden]."""
        x = x if delta is None else x + delta
        return x, self.norm(x, weight)

    def rotate_store(self, qkv: Tensor, layer: Layer, cache: Tensor, at: Where) -> Tensor:
        """Norm (if any) and rotate queries and keys, write keys and values to cache [2, slots, K, L, D].

        qkv [N, (H + 2K) * D] -> the queries [N, H, D]."""
        s, (cos, sin) = self.spec, at.rope
        qkv = qkv.view(len(qkv), -1, s.head_dim)
        q, k, v = qkv.split([s.heads, s.kv_heads, s.kv_heads], 1)
        qk = qkv[:, : s.heads + s.kv_heads]
        if layer.q_norm is not None:
            qk = torch.cat([self.norm(q, layer.q_norm), self.norm(k, layer.k_norm)], 1)
        qk = torch.addcmul(qk * cos, qk.roll(s.head_dim // 2, -1), sin).to(qkv.dtype)
        kv = torch.cat([qk[:, s.heads :], v], 1)
        cache.view(-1, s.head_dim).index_copy_(0, at.flat, kv.view(-1, s.head_dim))
        return qk[:, : s.heads]

    def attend(self, q: Tensor, cache: Tensor, at: Where) -> Tensor:
        """Attention of one query a row, q [N, H, D], to its slot of [2, slots, K, L, D] -> [N, H * D]."""
        s, n = self.spec, len(q)
        if at.window is not None:
            kv = cache[:, at.window].flatten(1, 2)[:, :, : at.limit]
        else:
            kv = cache[:, :, :, : at.limit].index_select(1, at.slot).flatten(1, 2)
        q = q.reshape(n * s.kv_heads, -1, s.head_dim)
        scores = torch.baddbmm(at.bias, q, kv[0].transpose(1, 2), alpha=s.scale)
        return torch.bmm(scores.softmax(-1, torch.float32).to(q.dtype), kv[1]).view(n, -1)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """silu(gate) * up, [N, 2I] -> [N, I]."""
        gate, up = gate_up.chunk(2, -1)
        return F.silu(gate) * up

    def advance(self, logits: Tensor, state: Tensor, run: Run) -> None:
        """Sample a token a row from logits [N, V], write it out and move state [5, N] on."""
        cell = state[CELL]
        token = pick(logits, run.uniforms.view(-1).index_select(0, cell), run.temperature)
        run.out.view(-1).index_copy_(0, cell, token)
        state[POS : CELL + 1] += 1
        state[TOKEN] = token
        state[DONE] += run.ends.index_select(0, token)


class Kernel:
    """A Triton kernel, compiled at its first launch: importing this module must not need Triton."""

    def __init__(self, function: Callable[..., None]):
        self.function, self.jit = function, None

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        global tl
        if self.jit is None:
            import triton
            import triton.language as tl

            self.jit = triton.jit(self.function)
        return self.jit[grid]


tl: Any = None  # triton.language, once a kernel has been launched


@Kernel
def add_norm_kernel(x, delta, weight, y, eps, width, ADD: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    inside = i < width
    at = tl.program_id(0).to(tl.int64) * width + i
    h = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    if ADD:  # the sum is rounded to the model's dtype before its norm, as the model itself does
        h += tl.load(delta + at, mask=inside, other=0.0).to(tl.float32)
        h = h.to(x.dtype.element_ty).to(tl.float32)
        tl.store(x + at, h.to(x.dtype.element_ty), mask=inside)
    h = h / tl.sqrt(tl.sum(h * h, 0) / width + eps)
    w = tl.load(weight + i, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + at, (h.to(x.dtype.element_ty).to(tl.float32) * w).to(x.dtype.element_ty), mask=inside)


@Kernel
def rotate_store_kernel(
    qkv, q, cache, slot, pos, table, q_norm, k_norm, eps, value_stride, slot_stride, head_stride,
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, NORM: tl.constexpr,
):
    n, h = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i = tl.arange(0, D // 2)
    source = qkv + (n * (H + 2 * K) + h) * D
    a = tl.load(source + i).to(tl.float32)
    b = tl.load(source + D // 2 + i).to(tl.float32)
    p = tl.load(pos + n)
    if h < H + K:
        if NORM:
            weight = q_norm if h < H else k_norm
            r = 1.0 / tl.sqrt((tl.sum(a * a, 0) + tl.sum(b * b, 0)) / D + eps)
            a = (a * r).to(q.dtype.element_ty).to(tl.float32) * tl.load(weight + i).to(tl.float32)
            b = (b * r).to(q.dtype.element_ty).to(tl.float32) * tl.load(weight + D // 2 + i).to(tl.float32)
        cos, sin = tl.load(table + p * D + i), tl.load(table + p * D + D // 2 + i)
        a, b = a * cos - b * sin, b * cos + a * sin
    if h < H:
        target = q + (n * H + h) * D
    else:
        target = cache + tl.load(slot + n) * slot_stride + (h - H) % K * head_stride + p * D
        target += (h - H) // K * value_stride
    tl.store(target + i, a.to(q.dtype.element_ty))
    tl.store(target + D // 2 + i, b.to(q.dtype.element_ty))


@Kernel
def attend_kernel(
    q, cache, slot, pos, partial, peak, total, scale, value_stride, slot_stride, head_stride,
    K: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, D: tl.constexpr, S: tl.constexpr,
    BLOCK: tl.constexpr, PRECISION: tl.constexpr,
):
    n, k, s = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    length = tl.load(pos + n).to(tl.int32) + 1
    span = (length + S * BLOCK - 1) // (S * BLOCK) * BLOCK  # whole blocks for each of the S splits
    first = s * span
    last = tl.minimum(first + span, length)
    g, d, j = tl.arange(0, GP), tl.arange(0, D), tl.arange(0, BLOCK)
    head = (n * K + k) * G + g
    queries = tl.load(q + head[:, None] * D + d[None, :], mask=g[:, None] < G, other=0.0)
    keys = cache + tl.load(slot + n) * slot_stride + k * head_stride
    m = tl.full([GP], float("-inf"), tl.float32)
    z = tl.zeros([GP], tl.float32)
    o = tl.zeros([GP, D], tl.float32)
    for begin in range(first, last, BLOCK):
        at = begin + j
        key = tl.load(keys + at[None, :] * D + d[:, None], mask=at[None, :] < last, other=0.0)
        score = tl.dot(queries, key, input_precision=PRECISION) * (scale * 1.4426950408889634)
        score = tl.where(at[None, :] < last, score, float("-inf"))
        new = tl.maximum(m, tl.max(score, 1))
        shrink, p = tl.exp2(m - new), tl.exp2(score - new[:, None])
        values = keys + value_stride + at[:, None] * D + d[None, :]
        value = tl.load(values, mask=at[:, None] < last, other=0.0)
        z = z * shrink + tl.sum(p, 1)
        o = o * shrink[:, None] + tl.dot(p.to(value.dtype), value, input_precision=PRECISION)
        m = new
    tl.store(peak + head * S + s, m, mask=g < G)
    tl.store(total + head * S + s, z, mask=g < G)
    tl.store(partial + (head[:, None] * S + s) * D + d[None, :], o, mask=g[:, None] < G)


@Kernel
def combine_kernel(partial, peak, total, out, S: tl.constexpr, D: tl.constexpr):
    head = tl.program_id(0).to(tl.int64)
    s, d = tl.arange(0, S), tl.arange(0, D)
    m = tl.load(peak + head * S + s)
    share = tl.exp2(m - tl.max(m, 0))  # a split with no positions has peak -inf, total 0
    z = tl.sum(share * tl.load(total + head * S + s), 0)
    o = tl.load(partial + (head * S + s[:, None]) * D + d[None, :])
    tl.store(out + head * D + d, (tl.sum(o * share[:, None], 0) / z).to(out.dtype.element_ty))


@Kernel
def silu_mul_kernel(gate_up, y, width, BLOCK: tl.constexpr):
    n, i = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(gate_up + n * 2 * width + i, mask=i < width, other=0.0).to(tl.float32)
    up = tl.load(gate_up + n * 2 * width + width + i, mask=i < width, other=0.0).to(tl.float32)
    gate = (gate / (1.0 + tl.exp(-gate))).to(y.dtype.element_ty).to(tl.float32)
    tl.store(y + n * width + i, (gate * up).to(y.dtype.element_ty), mask=i < width)


@Kernel
def block_sums_kernel(logits, inverse, peak, total, width, BLOCKS: tl.constexpr, BLOCK: tl.constexpr):
    n, b = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i = b * BLOCK + tl.arange(0, BLOCK)
    scale = tl.load(inverse)
    scale = tl.where(scale == 0.0, 1.0, scale)
    x = tl.load(logits + n * width + i, mask=i < width, other=float("-inf")).to(tl.float32) * scale
    m = tl.maximum(tl.max(x, 0), -1e30)
    tl.store(peak + n * BLOCKS + b, m)
    tl.store(total + n * BLOCKS + b, tl.sum(tl.exp(x - m), 0))


@Kernel
def select_kernel(
    logits, inverse, peak, total, uniforms, out, state, eos, width, rows, n_eos,
    BLOCKS: tl.constexpr, BLOCKS_P: tl.constexpr, BLOCK: tl.constexpr, EOS_P: tl.constexpr,
):
    n = tl.program_id(0).to(tl.int64)
    cell = tl.load(state + 2 * rows + n)
    scale, u = tl.load(inverse), tl.load(uniforms + cell)
    greedy = scale == 0.0
    scale = tl.where(greedy, 1.0, scale)
    # The block of the vocabulary in which the cumulated probability passes u, or which holds the maximum.
    j = tl.arange(0, BLOCKS_P)
    m = tl.load(peak + n * BLOCKS + j, mask=j < BLOCKS, other=-1e30)
    top = tl.max(m, 0)
    w = tl.load(total + n * BLOCKS + j, mask=j < BLOCKS, other=0.0) * tl.exp(m - top)
    goal = u * tl.sum(w, 0)
    last = tl.max(tl.where(w > 0.0, j, 0), 0)  # where rounding could let the sum end below the goal
    block = tl.minimum(tl.min(tl.where((tl.cumsum(w, 0) > goal) & (w > 0.0), j, BLOCKS_P), 0), last)
    block = tl.where(greedy, tl.min(tl.where(m == top, j, BLOCKS_P), 0), block)
    goal -= tl.sum(tl.where(j < block, w, 0.0), 0)
    # The token in it.
    k = tl.arange(0, BLOCK)
    i = block * BLOCK + k
    x = tl.load(logits + n * width + i, mask=i < width, other=float("-inf")).to(tl.float32) * scale
    p = tl.exp(x - top)
    last = tl.max(tl.where(p > 0.0, k, 0), 0)
    token = tl.minimum(tl.min(tl.where((tl.cumsum(p, 0) > goal) & (p > 0.0), k, BLOCK), 0), last)
    token = tl.where(greedy, tl.min(tl.where(x == top, k, BLOCK - 1), 0), token)
    token = (block * BLOCK + token).to(tl.int64)
    # Write it and move on: position, cell, token, end of turn.
    e = tl.arange(0, EOS_P)
    ended = tl.max(tl.where(tl.load(eos + e, mask=e < n_eos, other=-1) == token, 1, 0), 0)
    tl.store(out + cell, token)
    tl.store(state + rows + n, tl.load(state + rows + n) + 1)
    tl.store(state + 2 * rows + n, cell + 1)
    tl.store(state + 3 * rows + n, token)
    tl.store(state + 4 * rows + n, tl.load(state + 4 * rows + n) + ended)


def power(n: int, least: int = 1) -> int:
    """The smallest power of two that is at least n and `least`."""
    return max(least, 1 << (n - 1).bit_length())


class TritonOps(TorchOps):
    """The same operations as Triton kernels; attention reads no more than each row's own length."""

    VOCAB_BLOCK = 2048
    ATTEND_BLOCK = 64
    PROGRAMS = 1024  # of the attention, to fill a large GPU: the sequence is split until there are as many

    def bind(self, cache: Tensor, angles: Tensor, scaling: float) -> None:
        self.table = torch.stack([angles.cos(), angles.sin()], 1) * scaling  # [L, 2, D/2]

    def prepare(self, at: Where) -> None:
        """Nothing: the kernels look up slots and positions themselves."""

    def add_norm(self, x: Tensor, delta: Tensor | None, weight: Tensor) -> tuple[Tensor, Tensor]:
        y = torch.empty_like(x)
        other = x if delta is None else delta
        add_norm_kernel[(len(x),)](
            x, other, weight, y, self.spec.eps, x.shape[1], ADD=delta is not None, BLOCK=power(x.shape[1])
        )
        return x, y

    def rotate_store(self, qkv: Tensor, layer: Layer, cache: Tensor, at: Where) -> Tensor:
        s = self.spec
        q = qkv.new_empty(len(qkv), s.heads, s.head_dim)
        norms = (qkv, qkv) if layer.q_norm is None else (layer.q_norm, layer.k_norm)
        rotate_store_kernel[(len(qkv), s.heads + 2 * s.kv_heads)](
            qkv, q, cache, at.slot, at.pos, self.table, *norms, s.eps, *cache.stride()[:3],
            H=s.heads, K=s.kv_heads, D=s.head_dim, NORM=layer.q_norm is not None, num_warps=1,
        )
        return q

    def attend(self, q: Tensor, cache: Tensor, at: Where) -> Tensor:
        s, n = self.spec, len(q)
        splits = min(16, power(max(1, self.PROGRAMS // (n * s.kv_heads))))
        partial = torch.empty(n * s.heads, splits, s.head_dim, dtype=torch.float32, device=q.device)
        peak, total = torch.empty(2, n * s.heads, splits, dtype=torch.float32, device=q.device)
        group = s.heads // s.kv_heads
        attend_kernel[(n, s.kv_heads, splits)](
            q, cache, at.slot, at.pos, partial, peak, total, s.scale, *cache.stride()[:3],
            K=s.kv_heads, G=group, GP=power(group, 16), D=s.head_dim, S=splits, BLOCK=self.ATTEND_BLOCK,
            PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        )
        out = torch.empty_like(q)
        combine_kernel[(n * s.heads,)](partial, peak, total, out, S=splits, D=s.head_dim, num_warps=2)
        return out.view(n, -1)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        width = gate_up.shape[1] // 2
        y = gate_up.new_empty(len(gate_up), width)
        silu_mul_kernel[(len(y), -(-width // 1024))](gate_up, y, width, BLOCK=1024)
        return y

    def advance(self, logits: Tensor, state: Tensor, run: Run) -> None:
        n, width = logits.shape
        blocks = -(-width // self.VOCAB_BLOCK)
        peak, total = torch.empty(2, n, blocks, dtype=torch.float32, device=logits.device)
        block_sums_kernel[(n, blocks)](
            logits, run.inverse, peak, total, width, BLOCKS=blocks, BLOCK=self.VOCAB_BLOCK
        )
        select_kernel[(n,)](
            logits, run.inverse, peak, total, run.uniforms, run.out, state, run.eos, width, state.stride(0),
            len(run.eos), BLOCKS=blocks, BLOCKS_P=power(blocks), BLOCK=self.VOCAB_BLOCK,
            EOS_P=power(len(run.eos)),
        )
