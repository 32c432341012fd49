#!/usr/bin/env python3
"""Prints the measured table of README.md: each model with the 16-bit cache, OSCAR's spectral codec, and int2 with and without mean removal.

usage: readme_table.py [MODEL...]      after `make test` (all models) or `make demo MODEL=...`
"""
import json
import sys
import tempfile

from common import CACHE, MODELS, PINS, ROOT, main, say
from demo import answer, calibrated, compared, document

HEAD = ("| model | cache | bits/element coded (all) | KV memory, 4096 tokens | KL mean | KL 99 % | same top token | read t/s | write t/s |\n"
        "|---|---|---|---|---|---|---|---|---|")
CONTENDERS = {"spectral": "OSCAR", "codec=int2": "published codec, RoPE-mean removed", "codec=int2,k_mean=none": "published codec"}


def memory(contender):
    return f"{contender['kv_bytes'] / (1 << 20):.1f} MiB"


def rows(model):
    gguf = CACHE / "models" / f"{model}.gguf"
    artifact = calibrated(model, gguf)
    others = [word for name in list(CONTENDERS)[1:] for word in ("--variant", name)]
    comparison = compared(gguf, artifact, *others)
    body, question = document(model)
    with tempfile.TemporaryDirectory() as folder:
        plain = answer(gguf, artifact, body, question, "delegate", folder, stdout=sys.stderr)
        coded = answer(gguf, artifact, body, question, "oscar", folder, stdout=sys.stderr)
    (ROOT / "build" / f"readme-{model}.json").write_text(json.dumps({"compare": comparison, "f16": plain, "oscar": coded}, indent=1))
    base = comparison["variants"][0]["kv_bytes_f16"]
    yield f"| {PINS['models'][model]['title']} | 16 bit | 16 (16) | {base / (1 << 20):.1f} MiB | 0 | 0 | 100 % | {plain['pp']:.0f} | {plain['tg']:.0f} |"
    for number, (name, variant) in enumerate(zip(CONTENDERS.values(), comparison["variants"], strict=True)):
        speed = f"{coded['pp']:.0f} | {coded['tg']:.0f}" if number == 0 else " | "
        half = (variant["kl_mean_ci"][1] - variant["kl_mean_ci"][0]) / 2
        yield (f"| | {name} | {variant['bits_per_element']:.2f} ({variant['bits_per_element_all']:.2f}) | {memory(variant)} "
               f"| {variant['kl_mean']:.3f} ± {half:.3f} | {variant['kl_p99']:.2f} | {100 * variant['same_top']:.1f} % | {speed} |")


def run_main():
    print(HEAD)
    for model in sys.argv[1:] or MODELS:
        say(f"measuring {model}")
        for row in rows(model):
            print(row, flush=True)
    return 0


if __name__ == "__main__":
    main(run_main)
