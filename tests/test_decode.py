"""The two generators against transformers, each other and arithmetic, with tiny random models on the CPU."""

from __future__ import annotations

import copy
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM, GemmaConfig, GenerationConfig, MistralConfig, Qwen2Config

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]
from gpu_decode import (  # noqa: E402
    CONFIGS,
    NO_EOS,
    PAD,
    SIZES,
    VOCAB,
    chi_square_z,
    make_model,
    make_prompts,
    next_logits,
    play,
)

from decode import FastGenerate, HFGenerate, make_generate, supports  # noqa: E402
from ops import pick  # noqa: E402

torch.set_num_threads(1)  # the models are too small to share


def make_lora(seed: int = 0, **options: object) -> nn.Module:
    """A random model with random LoRA weights (B is not 0) on a subset of the projections."""
    targets = ["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"]
    config = LoraConfig(**{"r": 4, "lora_alpha": 8, "target_modules": targets, **options})
    model = get_peft_model(make_model(seed=seed), config)
    shake(model, seed)
    return model


def shake(model: nn.Module, seed: int) -> None:
    """New LoRA weights."""
    generator = torch.Generator().manual_seed(seed)
    for key, p in model.named_parameters():
        if "lora_" in key:
            p.data.copy_(0.2 * torch.randn(p.shape, generator=generator))


def reference(model: nn.Module, prompt: list[int], steps: int = 12, eos: list[int] = NO_EOS) -> list[int]:
    """Greedy tokens of transformers' `generate`, one unpadded row at a time."""
    config = GenerationConfig(max_new_tokens=steps, do_sample=False, eos_token_id=eos, pad_token_id=PAD)
    ids = torch.tensor([prompt])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
    return out[0, len(prompt) :].tolist()


def some_eos(model: nn.Module, prompts: list[list[int]], steps: int) -> list[int]:
    """Tokens that end most of the greedy messages early, and not all of them."""
    messages, ids = [reference(model, p, steps) for p in prompts], []
    while sum(any(t in m[:-1] for t in ids) for m in messages) <= 0.6 * len(prompts):
        going = [m for m in messages if not any(t in m[:-1] for t in ids)]
        ids.append(min((t for m in going for t in m[:-1]), key=lambda t: sum(t in m for m in going)))
    assert any(all(t not in m[:-1] for t in ids) for m in messages)
    return ids


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("kind", [FastGenerate, HFGenerate])
def test_greedy_equals_transformers(name: str, kind: type) -> None:
    model, prompts = make_model(name), make_prompts(9)
    eos = some_eos(model, prompts, 24)
    expected = [reference(model, p, 24, eos) for p in prompts]
    assert len({len(e) for e in expected}) > 2  # early stops at different steps
    generate = kind(model, eos, PAD)
    assert play(generate, prompts, steps=24) == expected
    assert play(generate, prompts[2:5], steps=24) == expected[2:5]  # a smaller batch on the same streams
    assert play(generate, prompts[::-1], steps=24) == expected[::-1]


@pytest.mark.parametrize("options", [{"cache_gb": 4.6e-4}, {"prefill_tokens": 30}, {"look": 1}])
def test_chunks_and_packing_change_nothing(options: dict) -> None:
    model, prompts = make_model(), make_prompts(11)
    eos = some_eos(model, prompts, 30)
    generate = FastGenerate(model, eos, PAD, **options)
    assert play(generate, prompts, steps=30) == [reference(model, p, 30, eos) for p in prompts]
    if "cache_gb" in options:
        assert 1 < generate.slots < 11
    if "prefill_tokens" in options:
        assert len(generate._prefill_chunks(prompts, [0] * 11)) > 3


def test_rows_that_stop_are_dropped() -> None:
    model, prompts = make_model(), make_prompts(11)
    sizes, eos = [], some_eos(model, prompts, 30)
    generate = FastGenerate(model, eos, PAD, look=2)
    step = generate._step
    generate._step = lambda flag, size, i: (sizes.append(size), step(flag, size, i))
    play(generate, prompts, steps=30)
    assert sizes[0] >= 10 and sizes[-1] <= 5 and sizes == sorted(sizes, reverse=True)


def test_turns_reuse_the_prefix() -> None:
    model, prompts = make_model(), make_prompts(5, low=5)
    generate = FastGenerate(model, NO_EOS, PAD)
    for turn in range(3):
        before = generate.stats.prefill_tokens
        messages = play(generate, prompts, steps=6, streams=[7, 3, 9, 1, 5])
        assert messages == [reference(model, p, 6) for p in prompts]
        new = generate.stats.prefill_tokens - before
        assert new == (5 * 5 if turn else sum(map(len, prompts)))  # the last sampled token and 4 new ones a row
        prompts = [p + m + [2, 3, 4, turn + 5] for p, m in zip(prompts, messages, strict=True)]
    # Other texts on the same streams: only what is equal may be reused.
    prompts = [[60 - p[0], *p[1:]] for p in prompts[:2]] + [[*p[:4], 1, 2] for p in prompts[2:]]
    before = generate.stats.reused_tokens
    assert play(generate, prompts, steps=6, streams=[7, 3, 9, 1, 5]) == [reference(model, p, 6) for p in prompts]
    assert generate.stats.reused_tokens - before <= 3 * 5
    # The same stream twice in one call, and more streams than slots.
    assert play(generate, prompts, steps=6, streams=[7, 7, 7, 1, 5]) == [reference(model, p, 6) for p in prompts]
    assert len(generate.streams) + len(generate.free) == generate.slots
    many = make_prompts(23, seed=4)
    assert play(generate, many, steps=6, streams=list(range(23))) == [reference(model, p, 6) for p in many]


def test_streams_may_outnumber_the_slots() -> None:
    model = make_model()
    generate, prompts = FastGenerate(model, NO_EOS, PAD, cache_gb=4.6e-4), make_prompts(20, high=30)
    for start in (0, 3, 12, 1):
        rows = range(start, start + 4)
        assert play(generate, [prompts[i] for i in rows], steps=5, streams=list(rows)) == [
            reference(model, prompts[i], 5) for i in rows
        ]
    assert generate.slots < 16 and len(generate.streams) + len(generate.free) == generate.slots


def test_growth_keeps_what_is_cached() -> None:
    model, prompts = make_model(), make_prompts(4, low=20)
    generate = FastGenerate(model, NO_EOS, PAD)
    first = play(generate, prompts, steps=6)
    length = generate.length
    prompts = [p + m for p, m in zip(prompts, first, strict=True)]
    before = generate.stats.prefill_tokens
    assert play(generate, prompts, steps=120) == [reference(model, p, 120) for p in prompts]
    assert generate.length > length and generate.stats.prefill_tokens - before == 4
    generate.release()
    assert generate.cache == []
    assert play(generate, prompts, steps=9) == [reference(model, p, 9) for p in prompts]


def test_out_of_memory_plays_on_with_less(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    model, prompts = make_model(), make_prompts(6)
    generate = FastGenerate(model, NO_EOS, PAD)
    want, whole, prefill, calls = play(generate, prompts, steps=6), generate.cache_bytes, generate._prefill, []

    def crowded(flag: bool, rows: list[list[int]], *more: list[int]) -> torch.Tensor:
        calls.append(len(rows))
        if len(calls) == 1:
            raise torch.cuda.OutOfMemoryError
        return prefill(flag, rows, *more)

    monkeypatch.setattr(generate, "_prefill", crowded)
    monkeypatch.setattr(generate, "prefill_tokens", 1024)
    held = sum(layer.nbytes for layer in generate.cache)
    assert play(generate, prompts, steps=6) == want
    assert generate.cache_bytes == held / 2 < whole and generate.prefill_tokens == 512
    assert "out of memory while playing" in capsys.readouterr().err
    with pytest.raises(torch.cuda.OutOfMemoryError):  # nothing is left to give up
        monkeypatch.setattr(generate, "_prefill", lambda *_: exec("raise torch.cuda.OutOfMemoryError"))
        play(generate, prompts, steps=6)


@pytest.mark.parametrize("name", CONFIGS)
def test_sampling_is_the_same_in_both(name: str) -> None:
    model, prompts = make_model(name), make_prompts(8)
    fast, plain = FastGenerate(model, [5, 9], PAD), HFGenerate(model, [5, 9], PAD)
    messages = play(fast, prompts, steps=30, temperature=0.9)
    assert messages == play(plain, prompts, steps=30, temperature=0.9)
    assert messages == play(fast, prompts, steps=30, temperature=0.9, streams=list(range(50, 58)))
    assert messages != play(fast, prompts, steps=30, temperature=0.9, seed=1)
    assert any(len(m) < 30 and m[-1] in (5, 9) for m in messages)


@pytest.mark.parametrize("kind", [FastGenerate, HFGenerate])
def test_a_message_does_not_depend_on_its_batch(kind: type) -> None:
    model, prompts = make_model(), make_prompts(10)
    uniforms = np.random.default_rng(3).random((10, 20))
    generate = kind(model, [5, 9], PAD)

    def rows(indices: list[int], shift: int) -> list[list[int]]:
        return generate(
            [prompts[i] for i in indices],
            streams=[shift + i for i in indices],
            trained=[True] * len(indices),
            uniforms=uniforms[indices],
            max_new_tokens=20,
            temperature=0.9,
        )

    together = rows(list(range(10)), 0)
    assert [rows([i], 100)[0] for i in range(10)] == together
    assert rows([7, 2, 5], 200) == [together[7], together[2], together[5]]


@pytest.mark.parametrize("kind", [FastGenerate, HFGenerate])
def test_frequencies_fit_the_probabilities(kind: type) -> None:
    model, prompt, rows = make_model(), [3, 4, 5], 3000
    with torch.no_grad():
        p = (model(torch.tensor([prompt])).logits[0, -1].double() / 0.7).softmax(-1).numpy()
    uniforms = np.random.default_rng(0).random((rows, 1))
    drawn = kind(model, NO_EOS, PAD)(
        [prompt] * rows,
        streams=list(range(rows)),
        trained=[True] * rows,
        uniforms=uniforms,
        max_new_tokens=1,
        temperature=0.7,
    )
    assert chi_square_z(np.bincount([d[0] for d in drawn], minlength=VOCAB), p) < 4


def test_pick_is_the_inverse_cdf() -> None:
    logits = torch.tensor([[0.1, 0.2, 0.3, 0.4]]).log().repeat(6, 1)
    u = torch.tensor([0.0, 0.0999, 0.1001, 0.2999, 0.5999, 1 - 2**-24])
    assert pick(logits, u, 1.0).tolist() == [0, 0, 1, 1, 2, 3]
    assert pick(logits, u, 0.0).tolist() == [3] * 6
    never = torch.tensor([[-torch.inf, 0.0, -torch.inf]])
    assert pick(never, torch.tensor([0.0]), 0.5).tolist() == pick(never, u[-1:], 0.5).tolist() == [1]


def test_refresh_follows_the_adapter() -> None:
    model, prompts = make_lora(), make_prompts(6)
    plain = copy.deepcopy(model).unload()
    fast, slow = FastGenerate(model, NO_EOS, PAD), HFGenerate(model, NO_EOS, PAD)
    base = next_logits(fast, prompts, False)
    assert torch.equal(base, next_logits(FastGenerate(plain, NO_EOS, PAD), prompts, True))
    weights = {k: v.clone() for k, v in model.state_dict().items()}
    seen = []
    for seed in (0, 1):
        shake(model, seed)
        fast.refresh()
        whole = copy.deepcopy(model).merge_and_unload()
        expected = [reference(whole, p) for p in prompts]
        assert play(fast, prompts) == expected == play(slow, prompts)
        assert play(fast, prompts, trained=False) == [reference(plain, p) for p in prompts]
        mixed = [True, False, False, True, False, True]
        both = [reference(whole if t else plain, p) for t, p in zip(mixed, prompts, strict=True)]
        assert play(fast, prompts, trained=mixed) == both == play(slow, prompts, trained=mixed)
        assert torch.equal(base, next_logits(fast, prompts, False))
        seen.append(expected)
    assert seen[0] != seen[1]
    shake(model, 0)
    assert all(torch.equal(v, weights[k]) for k, v in model.state_dict().items())
    assert next(p for n, p in model.named_parameters() if "lora_" in n).requires_grad


def test_refresh_rounds_once_in_bfloat16() -> None:
    model = make_lora().to(torch.bfloat16)
    fast = FastGenerate(model, NO_EOS, PAD)
    layer = model.get_base_model().model.layers[1].mlp
    a, b = layer.up_proj.lora_A["default"].weight, layer.up_proj.lora_B["default"].weight
    expected = (layer.up_proj.base_layer.weight.double() + 2.0 * b.double() @ a.double()).float().bfloat16()
    gate, up = fast.weights[True][1].gate_up[0][0].chunk(2)
    assert torch.equal(gate, layer.gate_proj.weight)
    assert (up != expected).float().mean() < 0.01 and torch.allclose(up.float(), expected.float(), rtol=2**-7)
    with torch.no_grad():
        logits = torch.cat([model(torch.tensor([p])).logits[:, -1] for p in make_prompts(6)]).float()
    mine = next_logits(fast, make_prompts(6), True).float()
    assert (logits.log_softmax(-1) - mine.log_softmax(-1)).abs().mean() < 0.1


@pytest.mark.parametrize("name", CONFIGS)
def test_decode_and_prefill_agree_with_the_model(name: str) -> None:
    model, prompts = make_model(name), make_prompts(6, low=8)
    with torch.no_grad():
        expected = torch.cat([model(torch.tensor([p])).logits[:, -1] for p in prompts])
    fast = FastGenerate(model, NO_EOS, PAD)
    for fed in (0, 1, 5):
        torch.testing.assert_close(next_logits(fast, prompts, True, fed), expected, rtol=1e-4, atol=1e-4)


def test_nothing_is_reused_after_refresh_or_under_the_other_weights() -> None:
    model, prompts = make_lora(), make_prompts(4, low=10)
    fast = FastGenerate(model, NO_EOS, PAD)
    for trained, refresh in ((True, False), (False, False), (True, False), (True, True), (False, True)):
        if refresh:
            fast.refresh()
        before = fast.stats.reused_tokens
        play(fast, prompts, trained=trained)
        assert fast.stats.reused_tokens == before
    play(fast, prompts, trained=False)
    assert fast.stats.reused_tokens == sum(map(len, prompts)) - 4


def test_the_models_generation_config_stays_out() -> None:
    model, prompts = make_model(), make_prompts(6, low=10)
    expected = [reference(model, p, 20) for p in prompts]
    sampled = play(HFGenerate(model, [5], PAD), prompts, steps=20, temperature=0.9)
    own = GenerationConfig(
        do_sample=True,
        top_k=1,
        temperature=0.7,
        repetition_penalty=5.0,
        no_repeat_ngram_size=1,
        min_new_tokens=20,
        suppress_tokens=expected[0][:2],
        eos_token_id=[3],
        pad_token_id=1,
        max_length=5,
        use_cache=False,
    )
    model.generation_config = own
    for kind in (HFGenerate, FastGenerate):
        assert play(kind(model, NO_EOS, PAD), prompts, steps=20) == expected
        assert play(kind(model, [5], PAD), prompts, steps=20, temperature=0.9) == sampled
    assert model.generation_config is own


@pytest.mark.parametrize("kind", [FastGenerate, HFGenerate])
def test_a_model_in_training_is_left_as_it_was(kind: type) -> None:
    model, prompts = make_lora(lora_dropout=0.5), make_prompts(4)
    expected = play(kind(model.eval(), NO_EOS, PAD), prompts, trained=[True, False] * 2)
    model.train()
    model.gradient_checkpointing_enable()
    model.get_base_model().model.norm.eval()
    modes = [m.training for m in model.modules()]
    model.config.use_cache = False
    frozen = next(p for n, p in model.named_parameters() if "lora_" in n).requires_grad_(False)
    assert play(kind(model, NO_EOS, PAD), prompts, trained=[True, False] * 2) == expected
    assert modes == [m.training for m in model.modules()] and not frozen.requires_grad
    assert not model.config.use_cache and model.is_gradient_checkpointing
    model(torch.tensor([prompts[0]]), labels=torch.tensor([prompts[0]])).loss.backward()


def test_unsupported_models_are_named_and_fall_back() -> None:
    sizes = {**SIZES, "num_key_value_heads": 2}
    sliding = Qwen2Config(**sizes, use_sliding_window=True, sliding_window=8, max_window_layers=1)
    yarn = Qwen2Config(
        **sizes,
        rope_parameters={"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 64},
    )
    reasons = {
        "sliding window": AutoModelForCausalLM.from_config(sliding),
        "MistralForCausalLM": AutoModelForCausalLM.from_config(MistralConfig(**sizes, sliding_window=8)),
        "GemmaForCausalLM": AutoModelForCausalLM.from_config(GemmaConfig(**sizes, head_dim=16)),
        "yarn": AutoModelForCausalLM.from_config(yarn),
        "float16": make_model().half(),
        "outside the projections": make_lora(target_modules=["q_proj", "lm_head"]),
        "variant of LoRA": make_lora(use_dora=True),
        "in full": make_lora(modules_to_save=["lm_head"]),
    }
    for word, model in reasons.items():
        assert word in supports(model)
        with pytest.raises(ValueError, match=word):
            make_generate(model, NO_EOS, PAD, kind="fast")
        generate, sentence = make_generate(model, NO_EOS, PAD)
        assert isinstance(generate, HFGenerate) and word in sentence
    prompts = make_prompts(3)
    model = reasons["MistralForCausalLM"].eval()
    assert play(make_generate(model, NO_EOS, PAD)[0], prompts) == [reference(model, p) for p in prompts]


def test_make_generate_says_what_it_chose() -> None:
    model = make_model()
    fast, sentence = make_generate(model, NO_EOS, PAD)
    assert isinstance(fast, FastGenerate) and "fast" in sentence and "Qwen2ForCausalLM" in sentence
    plain, sentence = make_generate(model, NO_EOS, PAD, kind="generate")
    assert isinstance(plain, HFGenerate) and "asked" in sentence
    with pytest.raises(ValueError, match="quick"):
        make_generate(model, NO_EOS, PAD, kind="quick")


def test_bad_calls_and_dead_models_are_refused() -> None:
    model = make_model()
    fast = FastGenerate(model, NO_EOS, PAD)
    for uniforms in (np.full((1, 3), 1.0), np.full((1, 3), -0.1), np.zeros((2, 3)), np.zeros((1, 4))):
        with pytest.raises(ValueError):
            fast([[1]], streams=[0], trained=[True], uniforms=uniforms, max_new_tokens=3, temperature=1.0)
    model.model.norm.weight.data[0] = torch.nan
    with pytest.raises(FloatingPointError):
        play(fast, [[1, 2]])
    model.model.norm.weight.data[0] = 1.0
    assert play(fast, [[1, 2]]) == [reference(model, [1, 2])]


def test_stats_count() -> None:
    model, prompts = make_model(), make_prompts(4)
    for kind in (FastGenerate, HFGenerate):
        generate = kind(model, NO_EOS, PAD)
        play(generate, prompts, steps=7)
        s = generate.stats
        assert (s.decode_steps, s.tokens, s.prefill_tokens) == (
            6,
            28,
            sum(map(len, prompts)),
        ) and s.seconds > 0
