"""The fast generator on a GPU: is it right, and how fast is it?

    python tests/gpu_decode.py [MODEL_DIR] [--data DIR] [--out result.json] [--report benchmark.json]

Without a directory: random weights in the shape of Qwen2.5-1.5B. With one, and with --data, 300 chats of the
untrained pair are played through the fast generator and through transformers' `generate`: the scores must agree
within their intervals; and the defaults must run in the memory of a card of 24 GB. Every line says ok, FAIL or a
number; a failure does not stop what follows. `--quick` leaves the large model out; on a CPU the small checks run
without kernels.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

sys.path.insert(0, str(Path(__file__).parent.parent))
from decode import FastGenerate, HFGenerate, make_generate
from ops import Run, Spec, TorchOps, TritonOps, Where, pick

VOCAB, PAD, NO_EOS = 61, 0, [10_000]
BANDWIDTH = 4.3e12  # bytes a second that an H200 reads
SIZES = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": 512, "initializer_range": 0.25,
}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
CONFIGS: dict[str, Callable[[], object]] = {
    "qwen2 gqa tied": lambda: Qwen2Config(**SIZES, num_key_value_heads=2, tie_word_embeddings=True),
    "qwen2 mha untied": lambda: Qwen2Config(**SIZES, num_key_value_heads=4, tie_word_embeddings=False),
    "llama mqa untied": lambda: LlamaConfig(**SIZES, num_key_value_heads=1, tie_word_embeddings=False),
    "llama3 biased tied": lambda: LlamaConfig(
        **SIZES, num_key_value_heads=2, tie_word_embeddings=True, attention_bias=True, mlp_bias=True,
        rope_parameters=LLAMA3,
    ),
    "qwen3 gqa tied": lambda: Qwen3Config(**SIZES, num_key_value_heads=2, head_dim=32, tie_word_embeddings=True),
}
LARGE = {
    "vocab_size": 151936, "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28,
    "num_attention_heads": 12, "num_key_value_heads": 2, "max_position_embeddings": 32768,
    "tie_word_embeddings": True, "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
}
RESULTS: dict[str, object] = {}


def make_model(name: str = "qwen2 gqa tied", seed: int = 0) -> nn.Module:
    """A random model; biases and norms are random too, which transformers leaves at 0 and 1."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(CONFIGS[name](), dtype=torch.float32)
    for key, p in model.named_parameters():
        if key.endswith("bias") or "norm" in key:
            p.data.add_(0.3 * torch.randn_like(p))
    return model.eval()


def make_prompts(rows: int, seed: int = 0, low: int = 1, high: int = 40, vocab: int = VOCAB) -> list[list[int]]:
    """Random token ids, low to high - 1 of them."""
    rng = np.random.default_rng(seed)
    return [rng.integers(1, vocab, rng.integers(low, high)).tolist() for _ in range(rows)]


def play(generate, prompts, *, steps=12, temperature=0.0, trained=True, streams=None, seed=0):
    """A call with defaults."""
    rows = len(prompts)
    flags = trained if isinstance(trained, list) else [trained] * rows
    return generate(
        prompts, streams=streams or list(range(rows)), trained=flags, max_new_tokens=steps, temperature=temperature,
        uniforms=np.random.default_rng(seed).random((rows, steps)),
    )


def chi_square_z(counts: np.ndarray, p: np.ndarray) -> float:
    """Standardised chi-square of counts against probabilities, rare outcomes pooled."""
    expected, rare = counts.sum() * p, counts.sum() * p < 5
    a = np.append(counts[~rare], counts[rare].sum())
    b = np.append(expected[~rare], max(expected[rare].sum(), 1e-9))
    free = len(b) - 1
    return float((((a - b) ** 2 / b).sum() - free) / np.sqrt(2 * free))


@torch.inference_mode()
def next_logits(generate: FastGenerate, prompts: list[list[int]], trained: bool, fed: int = 0) -> Tensor:
    """Logits [rows, V] after each prompt, the last `fed` tokens of which go through decode steps."""
    n, device = len(prompts), generate.device
    generate.release()
    generate._reserve(n, max(map(len, prompts)))
    slots = list(range(n, 0, -1))
    logits = generate._prefill(trained, [p[: len(p) - fed] for p in prompts], slots, [0] * n)
    for step in range(fed, 0, -1):
        pos = torch.tensor([len(p) - step for p in prompts], device=device)
        tokens = torch.tensor([p[-step] for p in prompts], device=device)
        at = Where(torch.tensor(slots, device=device), pos, True, int(pos.max()) + 1)
        x, delta = generate._layers(trained, tokens, at, lambda q, cache, at=at: generate.ops.attend(q, cache, at))
        logits = generate._logits(x, delta)
    generate.release()
    return logits


# --- Reporting ------------------------------------------------------------------------------------


def note(name: str, value: object) -> None:
    RESULTS[name] = value
    print(f"{name}: {value}", flush=True)


@contextmanager
def check(name: str) -> Iterator[None]:
    """Report the block as ok or FAIL, with its seconds, and go on."""
    began = time.perf_counter()
    try:
        yield
        verdict = "ok"
    except Exception:
        traceback.print_exc(limit=6)
        verdict = f"FAIL {sys.exc_info()[1]!r}"[:300]
    note(f"{name} [{time.perf_counter() - began:.1f} s]", verdict)


def same(a: list[list[int]], b: list[list[int]], allowed: int = 0) -> None:
    """Rows equal but for `allowed`: where two computations round differently, a draw on the edge may fall apart."""
    wrong = [i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y]
    if wrong:
        note(f"  rows of {len(a)} that differ", wrong)
    assert len(wrong) <= allowed, f"rows {wrong[:8]} differ, e.g. {a[wrong[0]]} against {b[wrong[0]]}"


# --- Small models in float32: exact agreement -----------------------------------------------------


def check_small(device: torch.device) -> None:
    for name in CONFIGS:
        with check(f"float32 {name}: kernels, plain torch and transformers agree"):
            model = make_model(name).to(device)
            prompts = make_prompts(37, low=4, high=150)
            plain = FastGenerate(model, [5, 9, 11], PAD, kernels=False, graphs=False)
            fast, theirs = FastGenerate(model, [5, 9, 11], PAD), HFGenerate(model, [5, 9, 11], PAD)
            for fed in (0, 3):
                a, b = (next_logits(g, prompts, True, fed) for g in (fast, plain))
                note(f"  largest logit difference, {fed} tokens decoded", float((a - b).abs().max()))
                assert (a - b).abs().max() < 2e-3
            for temperature in (0.0, 0.9):
                messages = play(fast, prompts, steps=60, temperature=temperature)
                same(messages, play(theirs, prompts, steps=60, temperature=temperature), allowed=1)
                same(messages, play(plain, prompts, steps=60, temperature=temperature), allowed=1)
                assert len({len(m) for m in messages}) > 8  # many stops: packing took place
    with check("packing went through smaller buckets"):
        sizes = sorted(size for _, size in fast.graphs) if fast.captured else []
        note("  buckets captured", sizes)
        assert not fast.captured or len(sizes) >= 3
    with check("three turns reuse the prefix, both weight sets, equal to transformers"):
        check_turns(device)
    with check("same uniforms, same tokens; other batches, same tokens"):
        first = play(fast, prompts, steps=40, temperature=0.9, streams=list(range(100, 137)))
        fast.release()
        same(first, play(fast, prompts, steps=40, temperature=0.9))
        twelve = 12 * sum(layer.nbytes for layer in fast.cache) / (fast.slots + 1) / 1e9
        small = FastGenerate(model, [5, 9, 11], PAD, cache_gb=twelve)
        same(first, play(small, prompts, steps=40, temperature=0.9), allowed=1)
        note("  slots of the small cache", small.slots)
        assert small.slots < 20
    with check("sampled frequencies fit the probabilities"):
        with torch.no_grad():
            p = (model(torch.tensor([[3, 4, 5]], device=device)).logits[0, -1].double() / 0.7).softmax(-1)
        drawn = play(fast, [[3, 4, 5]] * 4000, steps=1, temperature=0.7)
        z = chi_square_z(np.bincount([d[0] for d in drawn], minlength=VOCAB), p.cpu().numpy())
        note("  chi-square, standardised", round(z, 2))
        assert z < 4


def check_turns(device: torch.device) -> None:
    """Turns on streams of a LoRA model, with a refresh between two of them."""
    model = get_peft_model(make_model(), LoraConfig(r=4, lora_alpha=8, target_modules="all-linear")).to(device)
    prompts, flags = make_prompts(21, low=30, high=80), [i % 3 > 0 for i in range(21)]
    fast, theirs = FastGenerate(model, NO_EOS, PAD), HFGenerate(model, NO_EOS, PAD)
    for turn in range(4):
        if turn in (0, 2):
            for key, p in model.named_parameters():
                if "lora_B" in key:
                    p.data.normal_(std=0.1)
            fast.refresh()
        before = fast.stats.reused_tokens
        messages = play(fast, prompts, steps=20, trained=flags)
        same(messages, play(theirs, prompts, steps=20, trained=flags), allowed=1)
        reused = fast.stats.reused_tokens - before
        assert reused == (0 if turn in (0, 2) else sum(len(p) - 4 for p in prompts)), reused
        prompts = [p + m + [2, 3, turn + 4] for p, m in zip(prompts, messages, strict=True)]


# --- Operations at the size of the large model ----------------------------------------------------


def check_operations(device: torch.device) -> None:
    """Each kernel against plain torch in float32 on the same inputs."""
    spec = Spec(heads=12, kv_heads=2, head_dim=128, eps=1e-6, scale=128**-0.5)
    kernels, plain = TritonOps(spec), TorchOps(spec)
    generator = torch.Generator(device).manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, generator=generator)

    for dtype, bound in ((torch.float32, 2e-5), (torch.bfloat16, 2e-2)):
        for rows in (5, 300):
            cache = random(2, rows + 1, 2, 1024, 128).to(dtype)
            other = cache.float().clone()
            for ops, c in ((kernels, cache), (plain, other)):
                ops.bind(c, torch.outer(torch.arange(1024.0), 0.5 ** torch.arange(64.0)).to(device), 1.0)
            slot = torch.randperm(rows, device=device, generator=generator) + 1
            pos = torch.randint(0, 1024, (rows,), device=device, generator=generator)
            pos[:4] = torch.tensor([0, 1023, 63, 64])
            at = Where(slot, pos, True, 1024)
            plain.prepare(at)
            qkv, x, delta = random(rows, 16 * 128).to(dtype), random(rows, 1536).to(dtype), random(rows, 1536).to(dtype)
            weight, gate_up = random(1536).to(dtype), random(rows, 17920).to(dtype)
            layer = type("Norms", (), {"q_norm": random(128).to(dtype), "k_norm": random(128).to(dtype)})
            wide = type("Norms", (), {"q_norm": layer.q_norm.float(), "k_norm": layer.k_norm.float()})
            error = {}
            a, b = kernels.rotate_store(qkv, layer, cache, at), plain.rotate_store(qkv.float(), wide, other, at)
            error["rotate"], error["store"] = a - b, cache.float() - other
            error["attend"] = kernels.attend(a, cache, at) - plain.attend(a.float(), cache.float(), at)
            a, b = kernels.add_norm(x.clone(), delta, weight), plain.add_norm(x.float(), delta.float(), weight.float())
            error["add"], error["norm"] = a[0] - b[0], a[1] - b[1]
            error["silu"] = kernels.silu_mul(gate_up) - plain.silu_mul(gate_up.float())
            sizes = {k: float(f"{e.float().abs().max():.2g}") for k, e in error.items()}
            note(f"  {dtype} {rows} rows: largest differences", sizes)
            assert max(sizes.values()) < bound * 4, sizes  # of values up to about 4
    check_draws(device, kernels)


def check_draws(device: torch.device, kernels: TritonOps) -> None:
    """The sampling kernel over 151,936 tokens against the float64 inverse CDF on the same logits and uniforms."""
    rows, width = 2048, 151936
    logits = (2.0 * torch.randn(width, device=device)).repeat(rows, 1).to(torch.bfloat16)
    u = torch.rand(rows + 1, 1, device=device)
    for temperature in (0.9, 0.0):
        integers = {"dtype": torch.long, "device": device}
        inverse = torch.full((1,), 1 / temperature if temperature else 0.0, device=device)
        run = Run(u, torch.zeros(rows + 1, 1, **integers), torch.zeros(5, rows, **integers),
                  torch.tensor([7], **integers), torch.zeros(width, **integers), inverse, temperature)
        run.state[2] = torch.arange(rows, device=device)
        kernels.advance(logits, run.state, run)
        expected = torch.cat([pick(part, v, temperature) for part, v in zip(logits.split(256), u[:-1, 0].split(256),
                                                                            strict=True)])
        share = float((run.out[:rows, 0] == expected).double().mean())
        note(f"  draws equal to the float64 inverse CDF at temperature {temperature}", share)
        assert share > (0.99 if temperature else 0.9999)
        distance = (run.out[:rows, 0] - expected).abs().max()
        assert distance < 50, f"a draw is {distance} tokens away"


# --- The large model: agreement in bfloat16, then time --------------------------------------------


def large_model(directory: str | None, device: torch.device) -> nn.Module:
    """The model with a random LoRA adapter."""
    if directory:
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16).to(device)
    else:
        with torch.device(device):
            model = AutoModelForCausalLM.from_config(Qwen2Config(**LARGE), dtype=torch.bfloat16)
    model = get_peft_model(model.eval(), LoraConfig(r=32, lora_alpha=64, target_modules="all-linear"))
    for key, p in model.named_parameters():
        if "lora_B" in key:
            p.data.normal_(std=0.002)
    return model


@torch.no_grad()
def check_large(model: nn.Module, fast: FastGenerate, vocab: int) -> None:
    """Log-probabilities against plain forward passes in bfloat16 and in float32 (the truth)."""
    prompts = make_prompts(12, low=150, high=300, vocab=vocab)
    exact = copy.deepcopy(model).float()
    worst = {"ours to float32": 0.0, "theirs to float32": 0.0}
    for trained in (True, False):
        if not trained:
            model.disable_adapter_layers()
            exact.disable_adapter_layers()
        rows = [torch.tensor([p], device=fast.device) for p in prompts]
        truth, theirs = (torch.cat([m(r).logits[:, -1].float() for r in rows]).log_softmax(-1) for m in (exact, model))
        for fed in (0, 16):
            ours = next_logits(fast, prompts, trained, fed).float().log_softmax(-1)
            name = f"  log-prob errors, trained={trained}, {fed} tokens decoded"
            pairs = {"ours to float32": (ours, truth), "theirs to float32": (theirs, truth), "ours to theirs":
                     (ours, theirs)}
            sizes = {k: [round(float((a - b).abs().max()), 4), round(float((a - b).abs().mean()), 5)]
                     for k, (a, b) in pairs.items()}
            note(name + " [max, mean]", sizes)
            assert sizes["ours to float32"][1] < 2 * sizes["theirs to float32"][1] + 1e-3
            worst = {k: max(size, sizes[k][1]) for k, size in worst.items()}
    note("  mean error of a log-prob against float32, the fast path", worst["ours to float32"])
    note("  mean error of a log-prob against float32, a plain bfloat16 forward", worst["theirs to float32"])
    model.enable_adapter_layers()


def check_replay(model: nn.Module, fast: FastGenerate, vocab: int) -> None:
    """Captured and eager steps are the same computation, so they must agree to the last bit."""
    prompts = make_prompts(8, low=100, high=200, vocab=vocab)
    eager = FastGenerate(model, NO_EOS, PAD, graphs=False)
    for temperature in (0.0, 0.9):
        same(play(fast, prompts, steps=64, temperature=temperature),
             play(eager, prompts, steps=64, temperature=temperature))
        fast.refresh()
        eager.refresh()


def timed_call(fast: FastGenerate, prompts: list[list[int]], steps: int, first: int, trained: bool) -> dict[str, float]:
    """Seconds before the first decode step and the median ms of a step, from the times between two looks."""
    torch.cuda.synchronize()
    times, pack = [time.perf_counter()], fast._pack

    def timed_pack(*args: object, **options: object) -> int:
        size = pack(*args, **options)
        torch.cuda.synchronize()
        times.append(time.perf_counter())
        return size

    fast._pack = timed_pack
    play(fast, prompts, steps=steps, temperature=0.9, streams=range(first, first + len(prompts)), trained=trained)
    torch.cuda.synchronize()
    del fast._pack
    bursts = [1000 * (b - a) / fast.look for a, b in pairwise(times[1:])]
    return {"prefill_s": round(times[1] - times[0], 3), "step_ms": round(statistics.median(bursts), 3),
            "first_burst_s": round(times[2] - times[1], 3), "call_s": round(time.perf_counter() - times[0], 3)}


def time_large(fast: FastGenerate, vocab: int, weight_bytes: int) -> None:
    for rows in (32, 128, 600):
        with check(f"time, {rows} rows at about 900 tokens"):
            prompts = make_prompts(rows, low=840, high=900, vocab=vocab)
            torch.cuda.reset_peak_memory_stats()
            cold = timed_call(fast, prompts, 81, 0, True)
            again = timed_call(fast, prompts, 81, 0, True)
            warm = timed_call(fast, prompts, 81, 10_000, True)
            other = timed_call(fast, prompts, 81, 10_000, False)
            for name, value in (("cold", cold), ("warm, prefix reused", again), ("warm", warm), ("untrained", other)):
                note(f"  {rows} rows, {name}", value)
            note(f"  {rows} rows, capture and compile, s", round(cold["first_burst_s"] - warm["first_burst_s"], 3))
            bound = 1000 * weight_bytes / BANDWIDTH
            note(f"  {rows} rows, ms a step (bound by the weights {bound:.2f}, share {bound / warm['step_ms']:.2f})",
                 warm["step_ms"])
            note(f"  {rows} rows, peak memory GB, cache GB",
                 [round(torch.cuda.max_memory_allocated() / 1e9, 1),
                  round(sum(layer.nbytes for layer in fast.cache) / 1e9, 1)])
            profile_step(fast, rows)
        fast.release()


@torch.inference_mode()
def profile_step(fast: FastGenerate, rows: int) -> None:
    """Where a captured step spends its time: microseconds by kernel."""
    graph = fast.graphs[True, fast._bucket(rows)]
    fast.run.state[1:3].zero_()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(5):
            graph.replay()
        torch.cuda.synchronize()
    table = sorted(profiler.key_averages(), key=lambda e: -e.device_time_total)[:14]
    print("  (all rows at position 0: attention is at its least)")
    for e in table:
        print(f"    {e.device_time_total / 5:8.1f} us {e.count // 5:5d} x {e.key[:90]}")


def time_theirs(model: nn.Module, vocab: int) -> None:
    prompts = make_prompts(32, low=840, high=900, vocab=vocab)
    theirs = HFGenerate(model, NO_EOS, PAD)
    ours = RESULTS.get("  32 rows, warm", {}).get("step_ms", float("nan"))
    for trained in (False, True):
        seconds = []
        for steps in (2, 2, 26):
            torch.cuda.synchronize()
            began = time.perf_counter()
            play(theirs, prompts, steps=steps, temperature=0.9, trained=trained)
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - began)
        step = 1000 * (seconds[2] - seconds[1]) / 24
        note(f"  transformers generate, 32 rows, trained={trained}, ms a step", round(step, 2))
        note("    times ours", round(step / ours, 1))


def check_score(directory: str, data: str) -> None:
    """The untrained pair's score on the same chats, same uniforms, through both generators."""
    import runs
    from data import load_data
    from recipe import Config, Plan, chat_json, grade_chat, play_chats
    from report import score_text

    config = Config(model=directory, data=data)
    problems = load_data(config).heldout[:150]
    model, tokenizer, template = runs.load_model(config, "cuda", False)
    plans = [Plan(problem, (0, 8, problem.row, chat), (False, False)) for problem in problems for chat in (0, 1)]
    messages, shares = [], []
    for kind in ("fast", "generate"):
        began = time.perf_counter()
        generate = make_generate(model, sorted(template.eos_ids), tokenizer.pad_token_id, kind)[0]
        graded = [grade_chat(chat) for chat in play_chats(plans, generate, template, config)]
        messages.append([turn.text for g in graded for turn in g.chat.turns])
        shares.append(np.array([g.reward for g in graded]).reshape(-1, 2).mean(1))  # by problem
        note(f"  untrained score, {kind}", score_text([chat_json(g) for g in graded]))
        note("    seconds", round(time.perf_counter() - began, 1))
        del generate
    same = np.mean([a == b for a, b in zip(*messages, strict=True)])
    difference = shares[0] - shares[1]
    half = 1.97 * difference.std(ddof=1) / len(difference) ** 0.5
    note("  the same messages, word for word", round(float(same), 3))
    note("  fast - generate, paired by problem", f"{difference.mean():+.3f} ± {half:.3f}")
    assert abs(difference.mean()) <= half, "the scores differ by more than their interval"


def check_small_card(directory: str, data: str) -> None:
    """Two ada steps and an evaluation at the caps with the defaults, in the memory of a card of 24 GB."""
    import bench
    from data import load_data
    from options import configure, parser

    whole = torch.cuda.get_device_properties(0).total_memory
    words = ["--model", directory, "--data", data, "--out", tempfile.mkdtemp()]
    config, options = configure(parser().parse_args(words))
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(23.5e9 / whole)  # what a card of 24 GB has for tensors
    torch.cuda.reset_peak_memory_stats()
    try:
        measured = bench.Bench(config, options, load_data(config))
        with bench.arms_of_the_worst_case():
            trainer = measured.trainer("ada", endless=True, steps=2, model=measured.model)
            trainer.train()
        note("  peak GB of two ada steps", round(torch.cuda.max_memory_allocated() / 1e9, 1))
        trainer.generator.refresh()
        measured.evaluation(trainer, "at the caps, 24 GB")
        note("  token budget, GB for keys and values afterwards",
             [trainer.token_budget, round(trainer.generator.cache_bytes / 1e9, 1)])
        assert len(trainer.history) == 2 and trainer.token_budget >= 1920
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--data", help="folder with train.jsonl and test.jsonl: compare scores too")
    parser.add_argument("--out")
    parser.add_argument("--report", type=Path, help="a benchmark report, to which what came out is added")
    parser.add_argument("--score-only", action="store_true", help="the scores alone")
    parser.add_argument("--quick", action="store_true", help="the small checks only")
    args = parser.parse_args()
    began = time.perf_counter()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    note("torch", torch.__version__)
    note("device", torch.cuda.get_device_name() if device.type == "cuda" else "cpu")
    note("date", time.strftime("%Y-%m-%d"))
    if args.model and args.data:
        with check("the untrained score through both generators"):
            check_score(args.model, args.data)
        torch.cuda.empty_cache()
        with check("the defaults on a card of 24 GB"):
            check_small_card(args.model, args.data)
    if args.score_only:
        return finish(began, args.out, args.report)
    if device.type == "cuda":
        with check("operations at full size"), torch.inference_mode():
            check_operations(device)
    check_small(device)
    if device.type == "cuda" and not args.quick:
        large(args.model, device)
    finish(began, args.out, args.report)


def finish(began: float, out: str | None, report: Path | None) -> None:
    note("seconds in all", round(time.perf_counter() - began, 1))
    failed = [k for k, v in RESULTS.items() if str(v).startswith("FAIL")]
    note("failed", failed)
    if out:
        Path(out).write_text(json.dumps(RESULTS, indent=1, default=str) + "\n")
    if report:
        whole = json.loads(report.read_text())
        whole["checks"] = [*whole.get("checks", []), in_short(RESULTS)]
        report.write_text(json.dumps(whole, indent=1) + "\n")
    sys.exit(bool(failed))


def in_short(results: dict[str, object]) -> dict[str, object]:
    """What the benchmark report keeps: where and when, how many checks passed, and how the scores compare."""
    flags = [word for word in sys.argv[1:] if word in ("--quick", "--score-only")]
    kept = ("score,", "same mess", "paired", "two ada steps", "token budget", "mean error")
    found = {name.strip(): value for name, value in results.items() if any(part in name for part in kept)}
    return {
        "command": " ".join(["python tests/gpu_decode.py", *flags]),
        **{name: results[name] for name in ("device", "torch", "date")},
        "passed": sum(value == "ok" for value in results.values()),
        "failed": results["failed"],
        "found": found,
    }


def large(directory: str | None, device: torch.device) -> None:
    with check("the large model loads"):
        model = large_model(directory, device)
        fast, vocab = FastGenerate(model, NO_EOS, PAD), model.config.vocab_size
        weight_bytes = sum(p.nbytes for n, p in model.get_base_model().named_parameters() if "lora_" not in n)
        note("  weights GB, all allocated GB", [weight_bytes / 1e9, torch.cuda.memory_allocated() / 1e9])
        torch.cuda.synchronize()
        began = time.perf_counter()
        fast.refresh()
        torch.cuda.synchronize()
        note("  refresh s", round(time.perf_counter() - began, 3))
    with check("bfloat16 log-probs against plain forward passes"):
        check_large(model, fast, vocab)
    torch.cuda.empty_cache()
    with check("captured steps equal eager steps"):
        check_replay(model, fast, vocab)
    time_large(fast, vocab, weight_bytes)
    with check("time, transformers"):
        time_theirs(model, vocab)


if __name__ == "__main__":
    main()
