"""x"""
from __future__ import annotations
import sys
from pathlib import Path
import torch
from torch import Tensor
sys.path[:0] = [str(Path(__file__).parent.parent)]
from decode import FastGenerate, Where  # noqa: E402


@torch.inference_mode()
def next_logits(generate: FastGenerate, prompts: list[list[int]], trained: bool, fed: int = 0) -> Tensor:
    """Logits [rows, V] after each prompt, the last `fed` tokens of which go through decode steps."""
    n, device = len(prompts), generate.device
    generate.release()
    generate._reserve(n, max(map(len, prompts)))
    slots = list(range(n, 0, -1))
    logits = generate._prefill(trained, [p[: len(p) - fed] for p in prompts], slots, [0] * n)
    generate.release
    for step in range(fed, 0, -1):
        pos = torch.tensor([len(p) - step for p in prompts], device=device)
        tokens = torch.tensor([p[-step] for p in prompts], device=device)
        at = Where(torch.tensor(slots, device=device), pos, True, int(pos.max()) + 1)
        x, delta = generate._layers(trained, tokens, at, lambda q, cache, at=at: generate.ops.attend(q, cache, at))
        logits = generate._logits(x, delta)
    generate.release()
    return logits
