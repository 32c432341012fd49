#!/usr/bin/env python3
"""Resident memory of llama-server with a large context, idle and filled, stock and with the plug-in.

usage: memory.py MODEL [TOKENS]      prints a Markdown table (needs the environment of stock.py)
"""
import sys
from collections import namedtuple

from stock import Server, prose

MIB = 1 << 20
Measured = namedtuple("Measured", "idle filled tokens server")


def measure(mode, model, n_ctx, tokens):
    """Idle after warm-up, then with about `tokens` tokens in one slot."""
    with Server("-c", n_ctx, "-np", 1, "-cram", 0, mode=mode, model=model) as server:
        idle = server.resident_bytes()
        answer = server.complete(prose(0, int(tokens * 4.2)), n_predict=2)
        filled = server.resident_bytes()
    return Measured(idle, filled, answer["timings"]["prompt_n"], server)


if __name__ == "__main__":
    model, tokens = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 8000
    print("| llama-server -c 32768 -np 1 | idle MiB | filled MiB | tokens |\n|---|---|---|---|")
    for mode in ("stock", "oscar"):
        result = measure(mode, model, 32768, tokens)
        print(f"| {mode} | {result.idle / MIB:.0f} | {result.filled / MIB:.0f} | {result.tokens} |", flush=True)
