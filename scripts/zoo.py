#!/usr/bin/env python3
"""The artifacts of the models of pins.json and their cards, made again: 32768 tokens of the calibration text, a fixed date, so that the
same machine gives the same bytes. Writes build/zoo/MODEL.oscar.safetensors and MODEL.md, and says whether the published card in
docs/zoo has the same digest.

usage: zoo.py [--publish] [MODEL...]     after scripts/setup and scripts/build (`make zoo MODEL=...` runs all three);
                                         --publish writes the cards to docs/zoo too
"""
import re
import sys

from common import CACHE, MODELS, PINS, ROOT, Failure, main, run, say, write_atomically
from demo import OSCAR, STRICT

TOKENS = 32768
# The artifacts carry a date; this one stands for the release of the texts and models in pins.json.
EPOCH = 1795910400  # 2026-11-29


def digest_of(card):
    """The SHA-256 of the artifact that a card describes."""
    return re.search(r"(?m)^\| SHA-256 +\| ([0-9a-f]{64}) +\|$", card).group(1)


def made(model):
    """The model's artifact and its card, in build/zoo."""
    artifact = ROOT / "build" / "zoo" / f"{model}.oscar.safetensors"
    artifact.parent.mkdir(parents=True, exist_ok=True)
    say(f"calibrating {model} on {TOKENS} tokens")
    run([OSCAR, "calibrate", "-m", CACHE / "models" / f"{model}.gguf", "-f", CACHE / "texts" / "calibration.txt", "-n", TOKENS, "-o", artifact],
        env={**STRICT, "SOURCE_DATE_EPOCH": str(EPOCH)})
    card = artifact.with_name(f"{model}.md")
    pins = PINS["models"][model]
    run([OSCAR, "card", artifact, "-o", card, "--base-model", pins["hub"], "--licence", pins["hub_licence"]])
    return artifact, card.read_text()


def run_main():
    words = [word for word in sys.argv[1:] if word != "--publish"]
    for model in words:
        if model not in MODELS:
            raise Failure(f"there is no model '{model}'; the models are {', '.join(MODELS)}")
    for model in words or MODELS:
        artifact, card = made(model)
        published = ROOT / "docs" / "zoo" / f"{model}.md"
        if "--publish" in sys.argv:
            write_atomically(published, card.encode())
        if not published.exists():
            verdict = "no card is published"
        elif digest_of(published.read_text()) == digest_of(card):
            verdict = "the same bytes as the published card says"
        else:
            verdict = "other bytes than the published card says: another version, processor or llama.cpp"
        print(f"{artifact.relative_to(ROOT)}: SHA-256 {digest_of(card)}, {verdict}", flush=True)
    return 0


if __name__ == "__main__":
    main(run_main)
