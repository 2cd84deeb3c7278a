"""The fused passes against PEFT's own: outputs, gradients, memory, and everything they must leave alone."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, Qwen2Config, Qwen3Config

from fuse import fuse

SIZES = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "initializer_range": 0.25,
}  # fmt: skip
PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
CONFIGS: dict[str, Callable[[], object]] = {
    "qwen2": lambda: Qwen2Config(**SIZES),
    "llama with biases": lambda: LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True),
    "qwen3": lambda: Qwen3Config(**SIZES, head_dim=16),
}


def adapted(config: object, dtype: torch.dtype = torch.float32, **lora: object) -> nn.Module:
    """A model with an adapter that has something to say: PEFT's B starts at zero."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    targets = {"r": 4, "lora_alpha": 8, "target_modules": PROJECTIONS, "task_type": "CAUSAL_LM", **lora}
    model = get_peft_model(model, LoraConfig(**targets))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    return model.train()


def run(model: nn.Module) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits of a batch and the gradients of a loss over them."""
    ids = torch.arange(40).reshape(2, 20) * 7 % 61
    logits = model(input_ids=ids).logits
    logits.float().log_softmax(-1)[..., 3].sum().backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return logits.detach(), gradients


@pytest.mark.parametrize("name", CONFIGS)
def test_the_same_logits_and_gradients_as_pefts_own(name: str) -> None:
    model = adapted(CONFIGS[name]())
    want, want_gradients = run(model)
    fuse(model)
    got, got_gradients = run(model)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    assert got_gradients.keys() == want_gradients.keys() and len(got_gradients) == 2 * 7 * 2
    for key, gradient in want_gradients.items():
        assert gradient.abs().max() > 0, key
        torch.testing.assert_close(got_gradients[key], gradient, rtol=1e-4, atol=1e-5 * float(gradient.abs().max()))


def test_in_bfloat16_under_autocast_it_is_no_further_from_float32_than_pefts_own() -> None:
    exact = adapted(Qwen2Config(**SIZES), torch.float32)
    rounded = copy.deepcopy(exact)
    for name, parameter in rounded.named_parameters():
        if "lora_" not in name:
            parameter.data = parameter.data.bfloat16()
    fused = copy.deepcopy(rounded)
    fuse(fused)
    with torch.no_grad():
        for name, parameter in exact.named_parameters():
            if "lora_" not in name:
                parameter.copy_(parameter.bfloat16())
    _, truth = run(exact)
    errors = []
    for model in (rounded, fused):
        with torch.autocast("cpu", torch.bfloat16):
            _, gradients = run(model)
        assert all(gradient.dtype == torch.float32 for gradient in gradients.values())
        errors.append(sum(float((gradients[k] - truth[k]).norm() / truth[k].norm()) for k in truth) / len(truth))
    assert errors[1] < 1.2 * errors[0], errors
    assert errors[1] < 0.1, errors


def test_less_is_kept_for_the_backward_pass() -> None:
    kept = {}
    for fused in (False, True):
        model = adapted(Qwen2Config(**{**SIZES, "intermediate_size": 320}))
        if fused:
            fuse(model)
        storages: dict[int, int] = {}

        def pack(tensor: Tensor, storages: dict[int, int] = storages) -> Tensor:
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            out = model(input_ids=torch.arange(60)[None]).logits  # alive: what was kept is not freed meanwhile
        kept[fused] = sum(size for place, size in storages.items() if place not in weights)
        del out
    tokens, layers, wide = 60, 2, 320 * 4
    assert kept[False] - kept[True] >= 2 * tokens * layers * wide  # silu(gate) and its product with up


def test_an_adapter_switched_off_merged_or_with_dropout_is_pefts_business() -> None:
    model = adapted(Qwen2Config(**SIZES))
    plain = copy.deepcopy(model)
    fuse(model)
    ids = torch.arange(12)[None]
    with torch.no_grad():
        with model.disable_adapter(), plain.disable_adapter():
            torch.testing.assert_close(model(input_ids=ids).logits, plain(input_ids=ids).logits, rtol=1e-5, atol=1e-5)
        want = plain(input_ids=ids).logits
        model.merge_adapter()
        torch.testing.assert_close(model(input_ids=ids).logits, want, rtol=1e-4, atol=1e-4)
        model.unmerge_adapter()
        torch.testing.assert_close(model(input_ids=ids).logits, want, rtol=1e-4, atol=1e-4)
    dropped = adapted(Qwen2Config(**SIZES), lora_dropout=0.5)
    fuse(dropped)
    torch.manual_seed(1)
    first = dropped(input_ids=ids).logits
    assert not torch.equal(first, dropped(input_ids=ids).logits)


def test_other_models_are_left_as_they_are() -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(GPT2Config(vocab_size=61, n_positions=64, n_embd=32, n_layer=2, n_head=2))
    fuse(model)
    assert not any("forward" in vars(module) for module in model.modules())
    gelu = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES, hidden_act="gelu"))
    want = gelu(input_ids=torch.arange(12)[None]).logits
    fuse(gelu)
    torch.testing.assert_close(gelu(input_ids=torch.arange(12)[None]).logits, want, rtol=1e-5, atol=1e-5)
