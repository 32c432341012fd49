#!/usr/bin/env python3
"""How fast attention and a model are with the 2-bit cache, beside stock llama.cpp's caches; one table, also in build/bench.json.

usage: bench.py [MODEL] [quick] [OPTION...]   after scripts/setup and scripts/build (`make bench [MODEL=...] [QUICK=1]` runs all
                                              three); options go to `oscar bench`
"""
import sys

from common import CACHE, MODELS, ROOT, Failure, main, run, say
from demo import OSCAR, calibrated


def run_main():
    words = sys.argv[1:]
    model = words.pop(0) if words else "smollm2"
    if model not in MODELS:
        raise Failure(f"there is no model '{model}'; the models are {', '.join(MODELS)}")
    if words and words[0] == "quick":
        words[0] = "--quick"
    gguf = CACHE / "models" / f"{model}.gguf"
    artifact = calibrated(model, gguf)
    target = ROOT / "build" / "bench.json"
    say("measuring; keep the machine quiet")
    run([OSCAR, "bench", "--kernel", "-m", gguf, "--oscar", artifact, "--json", target, *words])
    say(f"done; the numbers are in {target.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    main(run_main)
