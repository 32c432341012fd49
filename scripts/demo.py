#!/usr/bin/env python3
"""The main job, start to end: calibrate a model, put a long document into the context, answer a question from the 2-bit cache
and from the 16-bit one, measure how far they are apart; one table, also in build/demo.json.

usage: demo.py [MODEL]      after scripts/setup and scripts/build (`make demo MODEL=...` runs all three)
"""
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from common import CACHE, MODELS, PINS, ROOT, Failure, main, run, say

OSCAR = ROOT / "build" / "release" / "bin" / "oscar"
CALIBRATION_TOKENS = 8192
CONTEXT = 4608
# About 4000 tokens: the beginning of an essay about the author's own work.
DOCUMENT_CHARACTERS = 17000
DOCUMENT_START = "Before college the two main things I worked on"
# Answered more than once between the 16-bit windows, that is, in coded rows.
QUESTION = "Which computer did the author write his first programs for? Answer in one or two sentences."
ANSWER_TOKENS = 96
# An attention operation that escapes OSCAR ends the command; settings of the caller's shell would change the figures.
STRICT = {name: value for name, value in os.environ.items() if name == "OSCAR_CACHE_DIR" or not name.startswith("OSCAR_")}
STRICT["OSCAR_STRICT"] = "1"


def oscar(*words, **options):
    """Runs an `oscar` command with the terminal as its output."""
    run([OSCAR, *words], env=STRICT, **options)


def document(model):
    """The document, and the question that follows it: for an instruction-tuned model a turn, for a base model a continuation."""
    text = (CACHE / "texts" / "essays.txt").read_text()
    start = text.index(DOCUMENT_START)
    body = text[start : start + DOCUMENT_CHARACTERS].rsplit(".", 1)[0] + "."
    return body, QUESTION if PINS["models"][model]["chat"] else f"Question: {QUESTION}\nAnswer:"


def artifact_versions():
    """Between releases of the tool, artifacts still gain content that new code needs, and the fit improves."""
    header = (ROOT / "include" / "oscar" / "artifact" / "artifact.h").read_text()
    return [int(re.search(rf"{name} = (\d+);", header).group(1)) for name in ("kArtifactVersion", "kFitRevision")]


def calibrated(model, gguf, tokens=CALIBRATION_TOKENS):
    """The artifact, made once for a model, text, size, version of the tool, of the file format and of the fit."""
    version = subprocess.run([OSCAR, "--version"], capture_output=True, text=True, check=True).stdout.strip()
    key = json.dumps([PINS["models"][model]["sha256"], PINS["texts"]["calibration"]["sha256"], tokens, version, artifact_versions()])
    artifact = CACHE / "artifacts" / f"{model}-{hashlib.sha256(key.encode()).hexdigest()[:12]}.oscar.safetensors"
    if artifact.exists():
        say(f"calibration of {model} is there: {artifact}")
        return artifact
    say(f"calibrating {model} on {tokens} tokens of technical prose and code")
    artifact.parent.mkdir(parents=True, exist_ok=True)
    partial = artifact.with_name("partial-" + artifact.name)
    with tempfile.TemporaryDirectory() as folder:
        oscar("calibrate", "-m", gguf, "-f", CACHE / "texts" / "calibration.txt", "--tokens", tokens, "-o", partial,
              "--moments", Path(folder) / "moments.safetensors", stdout=sys.stderr)
    partial.replace(artifact)
    return artifact


def answer(gguf, artifact, body, question, mode, folder, **options):
    """Streams an answer; returns what `oscar run` measured."""
    stats = Path(folder) / f"{mode}.json"
    (Path(folder) / "document.txt").write_text(body)
    oscar("run", "-m", gguf, "-f", Path(folder) / "document.txt", "-p", question, "-n", ANSWER_TOKENS, "-c", CONTEXT, "--mode", mode,
          "--oscar", artifact, "--stats-json", stats, **options)
    return json.loads(stats.read_text())


def compared(gguf, artifact, *more):
    """What `oscar compare` says about 4096 tokens of evaluation text: exact rows against coded ones."""
    line = [OSCAR, "compare", "-m", gguf, "-f", CACHE / "texts" / "essays.txt", "-c", 4096, "--chunks", 1, "--from", 1024,
            "--oscar", artifact, "-o", "json", *more]
    done = subprocess.run([str(word) for word in line], stdout=subprocess.PIPE, text=True, env=STRICT)
    if done.returncode != 0:
        raise Failure(f"oscar compare failed with status {done.returncode}, see above")
    return json.loads(done.stdout)


def report(model, coded, plain, comparison):
    (variant,) = comparison["variants"]
    return {
        "model": model,
        "n_ctx": coded["n_ctx"],
        "tokens": coded["prompt_tokens"] + coded["generated_tokens"],
        "kv_bytes_f16": plain["kv_bytes"],
        "kv_bytes_oscar": coded["kv_bytes"],
        "bits_per_element": coded["bits_per_element"],
        "bits_per_element_all": coded["bits_per_element_all"],
        "kl_mean": variant["kl_mean"],
        "kl_p99": variant["kl_p99"],
        "same_top": variant["same_top"],
        "positions": comparison["positions"],
        "tg_f16": plain["tg"],
        "tg_oscar": coded["tg"],
        "pp_f16": plain["pp"],
        "pp_oscar": coded["pp"],
        "attention_intercepted": coded["attention_served"] + variant["attention_served"],
        "attention_bypassed": coded["attention_bypassed"] + variant["attention_bypassed"],
    }


def table(r):
    mib = 1 / (1 << 20)
    rows = [
        ("", "16 bit", "OSCAR 2 bit"),
        ("KV cache in memory", f"{r['kv_bytes_f16'] * mib:.1f} MiB", f"{r['kv_bytes_oscar'] * mib:.1f} MiB"),
        ("bits per element, coded rows", "16", f"{r['bits_per_element']:.2f}"),
        ("bits per element, with the 16-bit windows", "16", f"{r['bits_per_element_all']:.2f}"),
        ("KL divergence, mean (nats)", "0", f"{r['kl_mean']:.4f}"),
        ("KL divergence, 99 %", "0", f"{r['kl_p99']:.4f}"),
        ("same most likely token", "100 %", f"{100 * r['same_top']:.1f} %"),
        ("reading the document", f"{r['pp_f16']:.1f} t/s", f"{r['pp_oscar']:.1f} t/s"),
        ("answering", f"{r['tg_f16']:.1f} t/s", f"{r['tg_oscar']:.1f} t/s"),
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    lines = [f"  {row[0]:<{widths[0]}}  {row[1]:>{widths[1]}}  {row[2]:>{widths[2]}}" for row in rows]
    lines.insert(1, "  " + "-" * (sum(widths) + 4))
    title = f"{PINS['models'][r['model']]['title']}, {r['tokens']} tokens in a context of {r['n_ctx']}"
    foot = (f"KL and same token: {r['positions']} positions from 1024 on, text not calibrated on. "
            f"Attention operations served {r['attention_intercepted']}, bypassed {r['attention_bypassed']}.")
    return "\n".join([title, *lines, foot])


def run_main():
    model = sys.argv[1] if len(sys.argv) > 1 else "smollm2"
    if model not in MODELS:
        raise Failure(f"there is no model '{model}'; the models are {', '.join(MODELS)}")
    gguf = CACHE / "models" / f"{model}.gguf"
    artifact = calibrated(model, gguf)
    body, question = document(model)
    with tempfile.TemporaryDirectory() as folder:
        say(f"2-bit cache: reading a document of {len(body)} characters, then: {question}")
        coded = answer(gguf, artifact, body, question, "oscar", folder)
        say("16-bit cache: the same")
        plain = answer(gguf, artifact, body, question, "delegate", folder)
    say("comparing the two caches on evaluation text, position by position")
    result = report(model, coded, plain, compared(gguf, artifact))
    target = ROOT / "build" / "demo.json"
    target.write_text(json.dumps(result, indent=1) + "\n")
    print("\n" + table(result))
    say(f"done; the numbers are in {target.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    main(run_main)
