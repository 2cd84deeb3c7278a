"""Sampling messages: one generator that plays two weight sets of a model, `trained` and `untrained`.

    generate, sentence = make_generate(model, eos_ids, pad_id)   # FastGenerate if the model allows it
    ids = generate(prompts, streams=..., trained=..., uniforms=..., max_new_tokens=160, temperature=0.9)
    generate.refresh()                                           # after every update of the weights

The call is recipe.Generate's. The uniforms are the only randomness: token t of row i is the inverse CDF of
softmax(logits / temperature) at uniforms[i, t], so a message depends on its own prompt and uniforms, not on the
batch it was drawn in.

FastGenerate keeps keys and values in *slots*, one for each token stream, at positions 0, 1, ... without
padding, so that the next turn of a stream computes its new tokens only. On CUDA a decode step is a captured
graph of Triton kernels and matrix products; on CPU the same driver runs the plain torch of `TorchOps`. The
trained set is a copy of the projection weights, rewritten in place by `refresh()`; the untrained set is the
model's own tensors. HFGenerate does the same with transformers' `generate`, for every other model.

Shapes: N tokens or rows, H query heads, K key/value heads, G = H / K, D head size, L positions, V vocabulary.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

ARCHITECTURES = {"qwen2": "Qwen2ForCausalLM", "llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
ROPE_TYPES = ("default", "llama3")  # those whose frequencies do not depend on the length of the text
BUCKETS = (8, 16, 32, 64, 96, 128, 192, 256)  # captured batch sizes; beyond them multiples of 128
SLOT, POS, CELL, TOKEN, DONE = range(5)  # lines of the decoding state, see Run


@dataclass
class Stats:
    """What the calls so far cost; `tokens` counts the ids handed back."""

    decode_steps: int = 0
    tokens: int = 0
    prefill_tokens: int = 0
    reused_tokens: int = 0
    seconds: float = 0.0


def pick(logits: Tensor, u: Tensor, temperature: float) -> Tensor:
    """Inverse CDF of softmax(logits [N, V] / temperature) at u [N]; the argmax at temperature 0 -> [N]."""
    if temperature == 0:
        return logits.argmax(-1)
    cdf = (logits.double() / temperature).softmax(-1).cumsum(-1)  # ends nearer to 1 than any u
    return torch.searchsorted(cdf, u.double()[:, None], right=True)[:, 0]


def cut(ids: list[int], eos_ids: Sequence[int]) -> list[int]:
    """The ids up to and including the first end-of-turn id."""
    return ids[: next((i + 1 for i, token in enumerate(ids) if token in eos_ids), len(ids))]


def checked_uniforms(
    prompts: list[list[int]], streams: list[int], trained: list[bool], uniforms: np.ndarray, tokens: int
) -> Tensor:
    """Check a call; its uniforms as float32 [rows, tokens], kept below 1, which rounding could reach."""
    rows = len(prompts)
    if not len(streams) == len(trained) == rows or uniforms.shape != (rows, tokens) or tokens < 1:
        raise ValueError(f"{rows} prompts, {len(streams)} streams, {len(trained)} flags, {uniforms.shape=}")
    if not all(prompts) or (rows and not (uniforms.min() >= 0 and uniforms.max() < 1)):
        raise ValueError("a prompt is empty or a uniform lies outside [0, 1)")
    return torch.from_numpy(np.minimum(uniforms.astype(np.float32), np.float32(1 - 2**-24)))


def unwrap(model: nn.Module) -> tuple[nn.Module, bool]:
    """The transformers model inside and whether a PEFT adapter wraps it."""
    from peft import PeftModel

    return (model.get_base_model(), True) if isinstance(model, PeftModel) else (model, False)


class HFGenerate:
    """Sampling with transformers' `generate`: any causal language model, any device; nothing is cached."""

    def __init__(self, model: nn.Module, eos_ids: Sequence[int], pad_id: int):
        self.model, self.eos_ids, self.pad_id, self.stats = model, list(eos_ids), pad_id, Stats()
        self.base, self.adapted = unwrap(model)

    def refresh(self) -> None:
        """Nothing to do: the model's own weights are used."""

    def release(self) -> None:
        """Nothing to do: nothing is kept between calls."""

    @torch.no_grad()
    def __call__(
        self, prompts: list[list[int]], *, streams: list[int], trained: list[bool], uniforms: np.ndarray,
        max_new_tokens: int, temperature: float,
    ) -> list[list[int]]:
        u = checked_uniforms(prompts, streams, trained, uniforms, max_new_tokens).to(self.base.device)
        began, out = time.perf_counter(), [[] for _ in prompts]
        modes = {module: module.training for module in self.model.modules()}
        grads = {p: p.requires_grad for p in self.model.parameters()}  # disable_adapter() ends by setting it
        config = self.base.generation_config
        try:
            self.model.eval()  # otherwise gradient checkpointing drops the cache
            for flag in sorted(set(trained)):
                rows = [i for i, t in enumerate(trained) if t == flag]
                with self.model.disable_adapter() if self.adapted and not flag else nullcontext():
                    new = self._generate([prompts[i] for i in rows], u[rows], max_new_tokens, temperature)
                for i, ids in zip(rows, new, strict=True):
                    out[i] = cut(ids, self.eos_ids)
        finally:
            self.base.generation_config = config
            for module, mode in modes.items():
                module.training = mode
            for parameter, grad in grads.items():
                parameter.requires_grad_(grad)
        self.stats.prefill_tokens += sum(map(len, prompts))
        self.stats.tokens += sum(map(len, out))
        self.stats.seconds += time.perf_counter() - began
        return out

    def _generate(
        self, prompts: list[list[int]], u: Tensor, steps: int, temperature: float
    ) -> list[list[int]]:
        """One batch, padded on the left. The model's own generation config is set aside meanwhile: it would
        override values of this call that equal transformers' defaults."""
        from transformers import GenerationConfig, LogitsProcessorList

        width = max(map(len, prompts))
        ids = torch.tensor([[self.pad_id] * (width - len(p)) + p for p in prompts], device=u.device)
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=u.device)

        def sample(context: Tensor, scores: Tensor) -> Tensor:
            token = pick(scores, u[:, context.shape[1] - width], temperature)
            return torch.zeros_like(scores).scatter_(1, token[:, None], 1.0)

        self.base.generation_config = GenerationConfig()
        config = GenerationConfig(
            max_new_tokens=steps, do_sample=False, use_cache=True, eos_token_id=self.eos_ids,
            pad_token_id=self.pad_id,
        )
        out = self.base.generate(
            ids, attention_mask=mask, generation_config=config, logits_processor=LogitsProcessorList([sample])
        )
        self.stats.decode_steps += out.shape[1] - width - 1
        return out[:, width:].tolist()


# --- Weights --------------------------------------------------------------------------------------

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


def linear(x: Tensor, parts: Parts) -> Tensor:
    """x [N, in] through every part -> [N, sum of outs]."""
    if len(parts) == 1:
        return F.linear(x, *parts[0])
    return torch.cat([F.linear(x, weight, bias) for weight, bias in parts], -1)


def base_of(module: nn.Module) -> nn.Module:
    """The linear layer under a LoRA layer, or the module itself."""
    return getattr(module, "base_layer", module)


def make_layer(block: nn.Module, join: Callable[[list[nn.Module]], Parts]) -> Layer:
    """A layer of the weight set that `join` makes of a list of projections."""
    a, m = block.self_attn, block.mlp
    q_norm, k_norm = getattr(a, "q_norm", None), getattr(a, "k_norm", None)
    return Layer(
        block.input_layernorm.weight, block.post_attention_layernorm.weight,
        None if q_norm is None else q_norm.weight, None if k_norm is None else k_norm.weight,
        qkv=join([a.q_proj, a.k_proj, a.v_proj]), out=join([a.o_proj]),
        gate_up=join([m.gate_proj, m.up_proj]), down=join([m.down_proj]),
    )


def own_parts(modules: list[nn.Module]) -> Parts:
    """The model's own tensors, adapters left out, nothing copied."""
    return [(base_of(m).weight, base_of(m).bias) for m in modules]


def merged(module: nn.Module) -> Tensor:
    """W + scaling * B @ A over the active adapters, in float32 [out, in]."""
    weight = base_of(module).weight.float()
    if base_of(module) is module:
        return weight
    if module.merged:
        raise RuntimeError("the adapter is merged into the base weights: the untrained set no longer exists")
    for name in module.active_adapters:
        if name in module.lora_A:
            a, b = module.lora_A[name].weight, module.lora_B[name].weight
            weight = torch.addmm(weight, b.float(), a.float(), alpha=module.scaling[name])
    return weight


def unsupported_adapter(base: nn.Module) -> str | None:
    """Why an adapter's effect is not just W + scaling * B @ A on the seven projections, or None."""
    from peft.tuners.lora import LoraLayer
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils import ModulesToSaveWrapper

    for name, module in base.named_modules():
        if isinstance(module, ModulesToSaveWrapper):
            return f"{name} is trained in full beside the adapter"
        if not isinstance(module, BaseTunerLayer):
            continue
        if not isinstance(module, LoraLayer) or type(module.base_layer) is not nn.Linear:
            return f"{name} carries an adapter other than LoRA on a plain linear layer"
        if name.rpartition(".")[2] not in PROJECTIONS:
            return f"the adapter on {name} is outside the projections"
        if module.lora_variant or any(module.lora_bias.values()):
            return f"the adapter on {name} is a variant of LoRA (DoRA, a bias, ...)"
    return None


def supports(model: nn.Module) -> str | None:
    """The reason why FastGenerate cannot play this model, or None if it can."""
    base, adapted = unwrap(model)
    config = base.config
    if ARCHITECTURES.get(config.model_type) != type(base).__name__:
        return f"{type(base).__name__} is not one of {', '.join(ARCHITECTURES.values())}"
    if any(kind != "full_attention" for kind in getattr(config, "layer_types", None) or []):
        return "it has layers with a sliding window"
    if config.hidden_act != "silu" or base.model.rotary_emb.rope_type not in ROPE_TYPES:
        return f"activation {config.hidden_act} or rope type {base.model.rotary_emb.rope_type} is not handled"
    if adapted and (reason := unsupported_adapter(base)):
        return reason
    tensors = list(base.parameters())
    if len({(p.device, p.dtype) for n, p in base.named_parameters() if "lora_" not in n}) != 1:
        return "its weights are spread over devices or dtypes"
    if tensors[0].dtype not in (torch.float32, torch.bfloat16):
        return f"dtype {tensors[0].dtype} is not handled"
    modules = base.model.layers.named_modules()
    if any(type(base_of(m)) is not nn.Linear for n, m in modules if n.rpartition(".")[2] in PROJECTIONS):
        return "its projections are not plain linear layers"
    size = base.model.layers[0].self_attn.head_dim
    if tensors[0].is_cuda and (size < 16 or size & (size - 1)):
        return f"head size {size} is not a power of two of at least 16"
    return None


# --- Operations: plain torch, then Triton ---------------------------------------------------------


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


def free_bytes(device: torch.device) -> float:
    """Memory of the device that a new tensor can have."""
    if device.type != "cuda":
        return float("inf")
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + cached


# --- The fast generator ---------------------------------------------------------------------------


@dataclass
class Cached:
    """What a slot holds: the weight set that made it and the tokens whose keys and values are there."""

    slot: int
    trained: bool
    tokens: list[int]


class FastGenerate:
    """Sampling for Llama-like models (see `supports`) with slots, prefix reuse, packing and CUDA graphs.

    cache_gb: the most memory for keys and values; what does not fit is played in several batches or computed
    again. kernels: Triton instead of plain torch; graphs: capture the decode step (both by default on CUDA).
    """

    def __init__(
        self, model: nn.Module, eos_ids: Sequence[int], pad_id: int, *, cache_gb: float | None = None,
        prefill_tokens: int = 16384, look: int | None = None, kernels: bool | None = None,
        graphs: bool | None = None,
    ):
        if reason := supports(model):
            raise ValueError(f"the fast generator cannot play this model: {reason}")
        self.base, adapted = unwrap(model)
        self.embedding, self.head = self.base.model.embed_tokens.weight, self.base.lm_head.weight
        self.device, self.dtype = self.embedding.device, self.embedding.dtype
        cuda = self.device.type == "cuda"
        attention = self.base.model.layers[0].self_attn
        config = self.base.config
        self.spec = Spec(
            config.num_attention_heads, config.num_key_value_heads, attention.head_dim, config.rms_norm_eps,
            attention.scaling,
        )
        self.ops = TritonOps(self.spec) if (cuda if kernels is None else kernels) else TorchOps(self.spec)
        self.captured = cuda if graphs is None else graphs
        self.eos_ids, self.stats = list(eos_ids), Stats()
        self.look = look or (16 if cuda else 4)  # steps between two looks at who is done
        self.prefill_tokens, self.cache_bytes = prefill_tokens, (cache_gb or (50 if cuda else 2)) * 1e9
        blocks = self.base.model.layers
        own = [make_layer(block, own_parts) for block in blocks]
        self.copies: list[tuple[Tensor, nn.Module]] = []  # part of a joined matrix, its projection
        with torch.inference_mode():
            joined = [make_layer(block, self._joined_parts) for block in blocks] if adapted else own
        self.weights = {False: own, True: joined}
        self.cache: list[Tensor] = []  # a layer's keys and values, [2, slots + 1, K, length, D]
        self.length = 0  # positions a slot has, kept over release()
        self.addresses: list[int] = []
        self.release()
        self.refresh()

    def _joined_parts(self, modules: list[nn.Module]) -> Parts:
        """One matrix for all the modules, to be filled by refresh()."""
        parts = own_parts(modules)
        weight = torch.empty(sum(w.shape[0] for w, _ in parts), parts[0][0].shape[1], dtype=self.dtype,
                             device=self.device)
        self.copies += zip(weight.split([w.shape[0] for w, _ in parts]), modules, strict=True)
        return [(weight, None if parts[0][1] is None else torch.cat([bias for _, bias in parts]))]

    @torch.inference_mode()
    def refresh(self) -> None:
        """Rewrite the trained set from the adapter as it is now and forget every cached stream."""
        for target, module in self.copies:
            target.copy_(merged(module))
        self._forget()

    def release(self) -> None:
        """Free the cache, the graphs and the buffers; the next call makes them again."""
        self._drop_graphs()
        self.cache, self.run = [], None
        self.slots = 0
        self._forget()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _drop_graphs(self) -> None:
        """What a graph points at is about to go."""
        self.graphs: dict[tuple[bool, int], torch.cuda.CUDAGraph] = {}
        self.pool = None

    def _forget(self) -> None:
        """No slot holds anything (slot 0 takes the padding rows of a bucket)."""
        self.streams: dict[int, Cached] = {}  # the least recently used first
        self.free = list(range(self.slots, 0, -1))

    def __call__(
        self, prompts: list[list[int]], *, streams: list[int], trained: list[bool], uniforms: np.ndarray,
        max_new_tokens: int, temperature: float,
    ) -> list[list[int]]:
        u = checked_uniforms(prompts, streams, trained, uniforms, max_new_tokens)
        began = time.perf_counter()
        while True:
            try:
                out = self._rows(prompts, streams, trained, u, temperature)
                break
            except torch.cuda.OutOfMemoryError:
                held = sum(layer.nbytes for layer in self.cache) or self.cache_bytes
                if self.prefill_tokens <= 512:
                    raise
            self.release()
            self.cache_bytes, self.prefill_tokens = held / 2, self.prefill_tokens // 2
            print(f"out of memory while playing: going on with {self.cache_bytes / 1e9:.1f} GB of keys and values",
                  file=sys.stderr)
        self.stats.tokens += sum(map(len, out))
        self.stats.seconds += time.perf_counter() - began
        return out

    def _rows(
        self, prompts: list[list[int]], streams: list[int], trained: list[bool], u: Tensor, temperature: float
    ) -> list[list[int]]:
        """Messages for rows of both weight sets, in as many batches as the cache asks for."""
        out: list[list[int]] = [[] for _ in prompts]
        addresses = [p.data_ptr() for p in self.base.parameters()]
        if addresses != self.addresses:  # the graphs would read the old ones
            self._drop_graphs()
            self.addresses = addresses
        with torch.inference_mode():
            for flag in sorted(set(trained)):
                rows = [i for i, t in enumerate(trained) if t == flag]
                self._reserve(len(rows), max(len(prompts[i]) for i in rows) + u.shape[1])
                for start in range(0, len(rows), self.slots):
                    chunk = rows[start : start + self.slots]
                    names = [streams[i] for i in chunk]
                    new = self._play(flag, [prompts[i] for i in chunk], names, u[chunk], temperature)
                    for i, ids in zip(chunk, new, strict=True):
                        out[i] = ids
        return out

    # Memory.

    def _reserve(self, rows: int, longest: int) -> None:
        """A cache with two slots for each of the rows (a chat has two streams), if the budget allows."""
        length, s = max(self.length, -(-longest // 128) * 128), self.spec
        item = 2 * len(self.weights[True]) * s.kv_heads * length * s.head_dim * self.embedding.element_size()
        held = sum(layer.nbytes for layer in self.cache)
        room = min(self.cache_bytes, 0.9 * free_bytes(self.device) + held)
        slots = max(1, min(max(self.slots, 2 * rows), int(room // item) - 1))
        if self.cache and slots <= self.slots and length <= self.length:
            return
        self._drop_graphs()
        kept = {name: c for name, c in self.streams.items() if c.slot <= slots}
        self._grow(slots, length, keep=bool(kept))
        self.slots, self.length = slots, length
        self._forget()
        self.streams, taken = kept, {c.slot for c in kept.values()}
        self.free = [slot for slot in self.free if slot not in taken]
        rotary = self.base.model.rotary_emb
        position = torch.arange(length, device=self.device, dtype=torch.float32)
        angles = position[:, None] * rotary.inv_freq.float().to(self.device)
        self.ops.bind(self.cache[0], angles, rotary.attention_scaling)

    def _grow(self, slots: int, length: int, keep: bool) -> None:
        """A cache of another size, layer by layer: old and new are never there in full at the same time."""
        old = self.cache or [None] * len(self.weights[True])
        n, self.cache = min(slots, self.slots) + 1, []
        for i, layer in enumerate(old):
            shape = 2, slots + 1, self.spec.kv_heads, length, self.spec.head_dim
            if not keep:
                old[i] = layer = None
            new = torch.zeros(shape, dtype=self.dtype, device=self.device)  # finite everywhere: 0 * NaN is NaN
            if layer is not None:
                new[:, :n, :, : self.length] = layer[:, :n]
            old[i] = None
            self.cache.append(new)

    def _assign(
        self, flag: bool, prompts: list[list[int]], streams: list[int]
    ) -> tuple[list[int], list[int]]:
        """A slot for each row, and how many tokens of its prompt it holds (the last is always computed)."""
        held = [self.streams.pop(name, None) for name in streams]
        slots, starts = [], []
        for prompt, c in zip(prompts, held, strict=True):
            if c is None:
                oldest = next(iter(self.streams), None)
                slots.append(self.free.pop() if self.free else self.streams.pop(oldest).slot)
                starts.append(0)
                continue
            pairs = enumerate(zip(c.tokens, prompt, strict=False))
            same = next((i for i, (a, b) in pairs if a != b), min(len(c.tokens), len(prompt)))
            slots.append(c.slot)
            starts.append(min(same, len(prompt) - 1) if c.trained == flag else 0)
        return slots, starts

    def _buffers(self, u: Tensor, temperature: float) -> None:
        """The sampling buffers for u [rows, tokens]. The graphs hold their addresses, so they only grow."""
        rows, tokens = self._bucket(len(u)), -(-u.shape[1] // 128) * 128
        if self.run is None or rows >= len(self.run.out) or tokens > self.run.out.shape[1]:
            if self.run is not None:
                rows, tokens = max(rows, len(self.run.out) - 1), max(tokens, self.run.out.shape[1])
            integers = {"dtype": torch.long, "device": self.device}
            ends = torch.zeros(max(len(self.head), *self.eos_ids) + 1, **integers)
            ends[self.eos_ids] = 1
            self._drop_graphs()
            self.run = Run(
                torch.zeros(rows + 1, tokens, device=self.device), torch.zeros(rows + 1, tokens, **integers),
                torch.zeros(5, rows, **integers), torch.tensor(self.eos_ids, **integers), ends,
                torch.zeros(1, device=self.device),
            )
        self.run.uniforms[: len(u), : u.shape[1]] = u.to(self.device)
        self.run.temperature = temperature
        self.run.inverse.fill_(1 / temperature if temperature else 0.0)

    # Playing.

    def _play(
        self, flag: bool, prompts: list[list[int]], streams: list[int], u: Tensor, temperature: float
    ) -> list[list[int]]:
        """Sample a message for rows that all fit in the cache and use one weight set."""
        slots, starts = self._assign(flag, prompts, streams)
        try:
            self._buffers(u, temperature)
            state = self.run.state
            state.zero_()
            last = [len(p) - 1 for p in prompts]
            cells = range(0, self.run.out.shape[1] * len(u), self.run.out.shape[1])
            state[:TOKEN, : len(u)] = torch.tensor([slots, last, list(cells)], device=self.device)
            for a, b in self._prefill_chunks(prompts, starts):
                logits = self._prefill(flag, prompts[a:b], slots[a:b], starts[a:b])
                self.ops.advance(logits, state[:, a:b], self.run)
            self._decode(flag, len(u), u.shape[1])
            new = [cut(ids, self.eos_ids) for ids in self.run.out[: len(u), : u.shape[1]].tolist()]
        except BaseException:
            self._forget()
            raise
        for name, slot, prompt, ids in zip(streams, slots, prompts, new, strict=True):
            if name in self.streams:  # the same stream twice in one call: the second row's slot is given back
                self.free.append(slot)
            else:
                self.streams[name] = Cached(slot, flag, prompt + ids[:-1])
        return new

    def _prefill_chunks(self, prompts: list[list[int]], starts: list[int]) -> list[tuple[int, int]]:
        """Ranges of rows whose new tokens, padded to the longest, stay within `prefill_tokens`."""
        chunks, first, widest = [], 0, 0
        for i, (prompt, start) in enumerate(zip(prompts, starts, strict=True)):
            widest = max(widest, len(prompt) - start)
            if i > first and (i + 1 - first) * widest > self.prefill_tokens:
                chunks.append((first, i))
                first, widest = i, len(prompt) - start
        return [*chunks, (first, len(prompts))]

    def _prefill(self, flag: bool, prompts: list[list[int]], slots: list[int], starts: list[int]) -> Tensor:
        """Cache the tokens from `starts` on; the logits [rows, V] after each row's last."""
        new = [prompt[start:] for prompt, start in zip(prompts, starts, strict=True)]
        width, self.stats.prefill_tokens = max(map(len, new)), self.stats.prefill_tokens + sum(map(len, new))
        self.stats.reused_tokens += sum(starts)
        sizes = torch.tensor([len(tokens) for tokens in new])
        row = torch.repeat_interleave(torch.arange(len(new)), sizes)
        column = torch.arange(len(row)) - (sizes.cumsum(0) - sizes)[row]
        tokens = torch.tensor([token for tokens in new for token in tokens])
        slot, start = torch.tensor(slots), torch.tensor(starts)
        at = Where(slot[row].to(self.device), (start[row] + column).to(self.device), decode=False)
        place = row.to(self.device), column.to(self.device)
        longest, mask = width, None
        if any(starts):  # otherwise plain causal attention
            longest = min(self.length, -(-max(map(len, prompts)) // 8) * 8)
            mask = torch.arange(longest) <= (start[:, None] + torch.arange(width))[..., None]
            mask = mask[:, None].to(self.device)
        slot = slot.to(self.device)

        def attend(q: Tensor, cache: Tensor) -> Tensor:
            s = self.spec
            padded = q.new_zeros(len(new), width, s.heads, s.head_dim)
            padded[place] = q
            kv = cache[:, :, :, :longest].index_select(1, slot).repeat_interleave(s.heads // s.kv_heads, 2)
            out = F.scaled_dot_product_attention(
                padded.transpose(1, 2), kv[0], kv[1], attn_mask=mask, is_causal=mask is None, scale=s.scale
            )
            return out.transpose(1, 2)[place].reshape(len(q), -1)

        with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
            x, delta = self._layers(flag, tokens.to(self.device), at, attend)
        last = (sizes.cumsum(0) - 1).to(self.device)
        logits = self._logits(x[last], delta[last])
        if not torch.isfinite(logits).all():
            raise FloatingPointError("the model's logits are not finite")
        return logits

    def _layers(
        self, flag: bool, tokens: Tensor, at: Where, attend: Callable[[Tensor, Tensor], Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Tokens [N] through all layers: the residual stream and what is to be added to it, [N, hidden]."""
        self.ops.prepare(at)
        x, delta = F.embedding(tokens, self.embedding), None
        for layer, cache in zip(self.weights[flag], self.cache, strict=True):
            x, h = self.ops.add_norm(x, delta, layer.norm_in)
            q = self.ops.rotate_store(linear(h, layer.qkv), layer, cache, at)
            x, h = self.ops.add_norm(x, linear(attend(q, cache), layer.out), layer.norm_mid)
            delta = linear(self.ops.silu_mul(linear(h, layer.gate_up)), layer.down)
        return x, delta

    def _logits(self, x: Tensor, delta: Tensor) -> Tensor:
        """[N, hidden] twice -> [N, V]."""
        return F.linear(self.ops.add_norm(x, delta, self.base.model.norm.weight)[1], self.head)

    def _bucket(self, rows: int) -> int:
        """The batch size that `rows` rows are decoded at."""
        if not self.captured:
            return rows
        return next((b for b in BUCKETS if b >= rows), -(-rows // 128) * 128)

    def _decode(self, flag: bool, rows: int, tokens: int) -> None:
        """Draw tokens 2, 3, ... of the rows in the state, until all are done or have all `tokens`."""
        drawn, size = 1, self._pack(rows, first=True)
        while size and drawn < tokens:
            burst = min(self.look, tokens - drawn)
            for step in range(burst):
                self._step(flag, size, step)
            drawn += burst
            self.stats.decode_steps += burst
            if drawn < tokens:
                size = self._pack(size)

    def _pack(self, size: int, first: bool = False) -> int:
        """Move the rows still talking to the front if that makes a smaller batch; its size, 0 if none are."""
        state = self.run.state
        done = state[DONE, :size].tolist()
        live = [i for i, d in enumerate(done) if not d]
        bucket = self._bucket(len(live))
        if live and (first or bucket <= (size - 1 if self.captured else size // 2)):
            state[:, : len(live)] = state[:, torch.tensor(live, device=self.device)]
            spare = self.run.out.numel() - self.run.out.shape[1]
            padding = torch.tensor([0, 0, spare, 0, 1], device=self.device)
            state[:, len(live) : bucket] = padding[:, None]
            size = bucket
        if live and not self.captured:
            slots, self.limit = state[SLOT, :size].tolist(), int(state[POS, :size].max()) + 1
            consecutive = slots == list(range(slots[0], slots[0] + size))
            self.window = slice(slots[0], slots[0] + size) if consecutive else None
        return size if live else 0

    def _step(self, flag: bool, size: int, step: int) -> None:
        """One token for the first `size` rows of the state; `step` counts from the last look."""
        if not self.captured:
            return self._draw(flag, Where(*self._places(size), True, self.limit + step, self.window))
        if graph := self.graphs.get((flag, size)):
            return graph.replay()
        self._draw(flag, Where(*self._places(size), True))  # compiles what is needed, and is this step
        graph = torch.cuda.CUDAGraph()
        self.pool = self.pool or torch.cuda.graph_pool_handle()
        with torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local"):
            self._draw(flag, Where(*self._places(size), True))
        self.graphs[flag, size] = graph

    def _places(self, size: int) -> tuple[Tensor, Tensor]:
        return self.run.state[SLOT, :size], self.run.state[POS, :size]

    def _draw(self, flag: bool, at: Where) -> None:
        """A decode step: the last token of every row through the model, the next one sampled."""
        state = self.run.state[:, : len(at.slot)]
        x, delta = self._layers(flag, state[TOKEN], at, lambda q, cache: self.ops.attend(q, cache, at))
        self.ops.advance(self._logits(x, delta), state, self.run)


def make_generate(
    model: nn.Module, eos_ids: Sequence[int], pad_id: int, kind: str = "auto", cache_gb: float | None = None
) -> tuple[FastGenerate | HFGenerate, str]:
    """The generator of `kind` auto, fast or generate, and a sentence for the log that says which and why."""
    if kind not in ("auto", "fast", "generate"):
        raise ValueError(f"kind {kind!r} is not auto, fast or generate")
    reason = "it was asked for" if kind == "generate" else supports(model)
    if kind == "fast" or reason is None:
        fast = FastGenerate(model, eos_ids, pad_id, cache_gb=cache_gb)
        how = "Triton kernels in CUDA graphs" if fast.captured else "plain torch"
        return fast, f"Sampling with the fast generator ({how}): {type(fast.base).__name__} is supported."
    return HFGenerate(model, eos_ids, pad_id), f"Sampling with transformers' generate: {reason}."
