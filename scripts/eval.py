#!/usr/bin/env python3
"""What each way to store the cache costs in quality on a model, with the noise floor; one table, also in build/eval-MODEL.json.

usage: eval.py [MODEL] [OPTION...]      after scripts/setup and scripts/build (`make eval MODEL=... QUICK=1` runs all three);
                                        options go to `oscar eval`, such as --quick
"""
import subprocess
import sys

from common import CACHE, MODELS, ROOT, Failure, main, say, write_atomically
from demo import OSCAR, STRICT, calibrated


def run_main():
    model = sys.argv[1] if len(sys.argv) > 1 else "smollm2"
    if model not in MODELS:
        raise Failure(f"there is no model '{model}'; the models are {', '.join(MODELS)}")
    gguf = CACHE / "models" / f"{model}.gguf"
    command = [OSCAR, "eval", "-m", gguf, "-f", CACHE / "texts" / "essays.txt", "--oscar", calibrated(model, gguf), *sys.argv[2:]]

    def result(form):
        done = subprocess.run([*map(str, command), "-o", form], stdout=subprocess.PIPE, env=STRICT)
        if done.returncode != 0:
            raise Failure(f"oscar eval failed with status {done.returncode}, see above")
        return done.stdout

    say("measuring; what is finished is kept, so an interrupted run goes on when it is started again")
    target = ROOT / "build" / f"eval-{model}.json"
    write_atomically(target, result("json"))
    print(result("md").decode())  # out of what was kept
    say(f"done; the numbers are in {target.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    main(run_main)
