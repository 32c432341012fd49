#!/usr/bin/env python3
"""What each way to store the cache costs in quality on a model, with the noise floor; one table, also in build/.

usage: eval.py [MODEL] [quick|full|fresh|long] [OPTION...]   after scripts/setup and scripts/build; options go to `oscar eval`

(nothing)  every method, 2 sequences of 4096 tokens, one document, one chat               build/eval-MODEL.json
quick      our codecs and published OSCAR, 1 sequence of 4096 tokens, most tasks          build/eval-MODEL.json
full       our codecs and published OSCAR, 4 sequences of 8192 tokens, half prose and half code, on an F16 re-encoding of the
           same weights, so that 8-bit activations do not hide what is measured; calibrated on 32768 tokens, not on 8192
                                                                                          build/eval-MODEL-f16.json
fresh      the same for our codecs, on other texts, on which nothing was ever chosen      build/eval-MODEL-f16-fresh.json
long       2 bits on one sequence of 32768 tokens of essays, otherwise as full            build/eval-MODEL-f16-long.json
"""
import os
import subprocess
import sys

import llama
from common import CACHE, MODELS, ROOT, Failure, main, run, say, write_atomically
from demo import OSCAR, STRICT, calibrated

FULL_CALIBRATION_TOKENS = 32768  # what `oscar calibrate` takes by default
FOUR_OF_8192 = ["--ctx-size", 8192, "--sequences", 4, "--tasks", "kl"]
SIZES = {"": ["--all", "--sequences", 2, "--documents", 1, "--chats", 1],
         "quick": ["--quick"],
         "full": FOUR_OF_8192,
         "fresh": [*FOUR_OF_8192, "--methods", "spectral-2,spectral-3", "--no-floor"],
         "long": ["--ctx-size", 32768, "--sequences", 1, "--tasks", "kl", "--methods", "spectral-2", "--no-floor"]}
ON_F16 = ("full", "fresh", "long")


def f16(model):
    """models/MODEL-f16.gguf: the same weights, re-encoded by llama.cpp's own program."""
    source = CACHE / "models" / f"{model}.gguf"
    target = CACHE / "models" / f"{model}-f16.gguf"
    if not target.exists():
        build = llama.build_llama("0.25.3", ["llama-quantize"])
        say(f"re-encoding {model} as F16")
        partial = target.with_name(f"partial{os.getpid()}-{target.name}")
        run([build / "bin" / "llama-quantize", "--allow-requantize", source, partial, "f16"], log=CACHE / "models" / f"{target.name}.log")
        partial.replace(target)
    return target


def artifact_of(model, size):
    gguf = CACHE / "models" / f"{model}.gguf"
    return calibrated(model, gguf, FULL_CALIBRATION_TOKENS) if size in ON_F16 else calibrated(model, gguf)


def evaluate(model, size="", options=()):
    """Runs `oscar eval`; returns its table and the path of its JSON."""
    artifact = artifact_of(model, size)
    judged = f16(model) if size in ON_F16 else CACHE / "models" / f"{model}.gguf"
    texts = {"fresh": ("fresh-prose", "fresh-code"), "long": ("essays",)}.get(size, ("essays", "code"))
    command = [OSCAR, "eval", "-m", judged, *(word for name in texts for word in ("-f", CACHE / "texts" / f"{name}.txt")),
               "--oscar", artifact, *SIZES[size], *options]

    def result(form):
        done = subprocess.run([*map(str, command), "-o", form], stdout=subprocess.PIPE, env=STRICT)
        if done.returncode != 0:
            raise Failure(f"oscar eval failed with status {done.returncode}, see above")
        return done.stdout

    say("measuring; what is finished is kept, so an interrupted run goes on when it is started again")
    target = ROOT / "build" / f"eval-{judged.stem}{'-' + size if size in ('fresh', 'long') else ''}.json"
    write_atomically(target, result("json"))
    return result("md").decode(), target  # the table comes out of what was kept


def run_main():
    words = sys.argv[1:]
    model = words.pop(0) if words else "smollm2"
    if model not in MODELS:
        raise Failure(f"there is no model '{model}'; the models are {', '.join(MODELS)}")
    size = words.pop(0) if words and words[0] in SIZES else ""
    table, target = evaluate(model, size, words)
    print(table)
    page = target.with_suffix(".html")
    run([OSCAR, "report", target, "--oscar", artifact_of(model, size), "-o", page], stdout=sys.stderr)
    say(f"done; the numbers are in {target.relative_to(ROOT)}, their plots in {page.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    main(run_main)
