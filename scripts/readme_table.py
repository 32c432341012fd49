#!/usr/bin/env python3
"""Prints the table of README.md of models as people run them: the 16-bit cache with its noise floor, OSCAR, and the published codec with
and without mean removal.

usage: readme_table.py [MODEL...]      after `make test` (all models) or `make demo MODEL=...`
"""
import json
import sys

from common import CACHE, MODELS, PINS, ROOT, Failure, main, say, write_atomically
from demo import calibrated, compared
from eval import FULL_CALIBRATION_TOKENS

HEAD = ("| model | cache | bits/element coded (all) | KV memory, 4096 tokens | KL mean | KL 99 % | same top token |\n"
        "|---|---|---|---|---|---|---|")
# `compare` puts the artifact's own codec first. The noise floor: the exact cache with the lowest bit of every query flipped.
CONTENDERS = {"**OSCAR**": None, "16 bit, noise floor": "mode=exact,perturb_q=1", "published codec, RoPE-mean removed": "codec=int2",
              "published codec": "codec=int2,k_mean=none"}


def rows(model):
    gguf = CACHE / "models" / f"{model}.gguf"
    artifact = calibrated(model, gguf, FULL_CALIBRATION_TOKENS)
    result = compared(gguf, artifact, *(word for variant in CONTENDERS.values() if variant for word in ("--variant", variant)))
    write_atomically(ROOT / "build" / f"readme-{model}.json", json.dumps(result, indent=1).encode())
    title = PINS["models"][model]["title"]
    for name, variant in zip(CONTENDERS, result["variants"], strict=True):
        half = (variant["kl_mean_ci"][1] - variant["kl_mean_ci"][0]) / 2
        yield (f"| {title} | {name} | {variant['bits_per_element']:.2f} ({variant['bits_per_element_all']:.2f}) | {variant['kv_bytes'] / (1 << 20):.1f} MiB "
               f"| {variant['kl_mean']:.3f} ± {half:.4f} | {variant['kl_p99']:.2f} | {100 * variant['same_top']:.1f} % |")
        title = ""


def run_main():
    for model in sys.argv[1:]:
        if model not in MODELS:
            raise Failure(f"there is no model '{model}'; the models are {', '.join(MODELS)}")
    print(HEAD)
    for model in sys.argv[1:] or MODELS:
        say(f"measuring {model}")
        for row in rows(model):
            print(row, flush=True)
    return 0


if __name__ == "__main__":
    main(run_main)
