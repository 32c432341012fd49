#!/usr/bin/env python3
"""Prints a table: KL of our codecs and of published OSCAR from the exact cache, on F16 weights, 4 sequences of 8192 tokens.

usage: quality_table.py [MODEL...]     measures (`make eval FULL=1 MODEL=...` each, see scripts/eval.py) and prints
       quality_table.py FILE.json...   prints what `oscar eval -o json` measured before, build/eval-*-f16.json
"""
import json
import sys
from pathlib import Path

from common import MODELS, PINS, Failure, main

NAMES = {"spectral-2": "**OSCAR, 2 bits**", "spectral-3": "**OSCAR, 3 bits**", "oscar-repaired": "published codec, RoPE-mean removed",
         "oscar-published": "published OSCAR", "noise-floor": "noise floor"}


def nats(kl):
    """Noise floors are a thousandth of what the codecs cost."""
    return f"{kl:.4f}" if kl >= 0.0001 else f"{kl:.7f}"


def rows(result):
    stem = result["model"].removesuffix(".gguf")
    model = stem.removesuffix("-f16")
    title = PINS["models"][model]["title"] if model in MODELS else stem
    if model != stem:
        title = title.rsplit(" ", 1)[0] + " F16"
    for row in result["rows"]:
        if row["depth"] != "all" or row["method"] not in NAMES:
            continue
        half = (row["kl_mean_ci"][1] - row["kl_mean_ci"][0]) / 2
        yield (f"| {title} | {NAMES[row['method']]} | {row['bits_per_element']:.2f} | {nats(row['kl_mean'])} ± {nats(half)} "
               f"| {row['kl_p99'] / row['kl_mean']:.1f}x | {100 * row['same_top']:.1f} % | {row['ppl_ratio']:.4f} | {row['sequences']} x {row['context']} |")
        title = ""


def run_main():
    words = sys.argv[1:] or MODELS
    results = []
    for word in words:
        if word in MODELS:
            from eval import evaluate
            _, word = evaluate(word, "full")
        if not Path(word).exists():
            raise Failure(f"{word} is neither a file nor a model; the models are {', '.join(MODELS)}")
        try:
            results.append(json.loads(Path(word).read_text()))
        except ValueError:
            raise Failure(f"{word} is not what oscar eval -o json writes") from None
    print("| model | cache | bits | KL mean | KL 99 % | same top token | perplexity | sequences |\n|---|---|---|---|---|---|---|---|")
    for result in results:
        for row in rows(result):
            print(row)
    return 0


if __name__ == "__main__":
    main(run_main)
