"""Sampling messages: one generator that plays two weight sets of a model, `trained` and `untrained`.

    generate, sentence = make_generate(model, eos_ids, pad_id)   # FastGenerate if the model allows it
    ids = generate(prompts, streams=..., trained=..., uniforms=..., max_new_tokens=160, temperature=0.9)
    generate.refresh()                                           # after every update of the weights

The call is recipe.Generate's. The uniforms are the only randomness: token t of row i is the inverse CDF of
softmax(logits / temperature) at uniforms[i, t], so a message depends on its own prompt and uniforms, not on the
batch it was drawn in.

FastGenerate keeps keys and values in *slots*, one for each token stream, at positions 0, 1, ... without
padding, so that the next turn of a stream computes its new tokens only. On CUDA a decode step is a captured
graph of Triton kernels and matrix products; on CPU the same driver runs the plain torch of `TorchOps` (ops.py). The
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

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from ops import DONE, POS, SLOT, TOKEN, Layer, Parts, Run, Spec, TorchOps, TritonOps, Where, pick

ARCHITECTURES = {"qwen2": "Qwen2ForCausalLM", "llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
ROPE_TYPES = ("default", "llama3")  # those whose frequencies do not depend on the length of the text
BUCKETS = (8, 16, 32, 64, 96, 128, 192, 256)  # captured batch sizes; beyond them multiples of 128


@dataclass
class Stats:
    """What the calls so far cost; `tokens` counts the ids handed back."""

    decode_steps: int = 0
    tokens: int = 0
    prefill_tokens: int = 0
    reused_tokens: int = 0
    seconds: float = 0.0


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
