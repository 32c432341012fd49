"""eval on a real model, SmolLM2-135M. Small sizes: this is about the command, not about quality."""
import csv
import json
import os
import signal
import subprocess
import tempfile
import time
import unittest
from pathlib import Path

from cli import OSCAR, clean_environment, oscar

MODEL, CALIBRATION, TEXT = (Path(os.environ[f"OSCAR_TEST_{name}"]) for name in ("MODEL", "CALIBRATION", "TEXT"))
# Positions 576..1150 are judged; one document of 30 questions; one continuation behind position 1024.
SIZE = {"-c": 1152, "--sequences": 1, "--documents": 1}
METHODS = ["--methods", "spectral-2,oscar-repaired"]
PLAIN = ["--methods", "spectral-2", "--tasks", "kl,retrieval", "-o", "json"]  # in a cache of its own: measured without continuations


class Eval(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        cls.folder = Path(folder.name)
        cls.artifact = cls.folder / "model.oscar.safetensors"
        done = oscar("calibrate", "-m", MODEL, "-f", CALIBRATION, "-c", "1024", "-n", "3072", "-o", cls.artifact,
                     "--moments", cls.folder / "moments.safetensors", timeout=600)
        if done.returncode != 0:
            raise AssertionError(done.stderr)
        cls.done = cls.evaluate(*METHODS, "-o", "json")
        cls.result = json.loads(cls.done.stdout)

    @classmethod
    def words(cls, *words):
        size = [word for flag, value in SIZE.items() if flag not in words for word in (flag, value)]
        return ["eval", "-m", MODEL, "--oscar", cls.artifact, "-f", TEXT, *size, *words]

    @classmethod
    def evaluate(cls, *words, cache="cache", check=True):
        done = oscar(*cls.words(*words), timeout=900, OSCAR_CACHE_DIR=str(cls.folder / cache))
        if check and done.returncode != 0:
            raise AssertionError(done.stderr)
        return done

    def rows(self, part, **wanted):
        return [row for row in self.result[part] if all(row[key] == value for key, value in wanted.items())]

    def test_rows(self):
        r = self.result
        self.assertEqual([row["method"] for row in r["rows"]], ["noise-floor", "spectral-2", "oscar-repaired"])
        for row in r["rows"]:
            # 127 positions from 1024 on are no sample of their own: one range, one row.
            self.assertEqual((row["depth"], row["positions"], row["sequences"], row["context"]), ("all", 575, 1, 1152))
            self.assertTrue(0 <= row["kl_mean_ci"][0] <= row["kl_mean"] <= row["kl_mean_ci"][1])
            self.assertTrue(row["kl_p50"] <= row["kl_p99"] <= row["kl_max"])
            self.assertTrue(row["same_top_ci"][0] <= row["same_top"] <= row["same_top_ci"][1])
            self.assertTrue(row["ppl_ratio_ci"][0] <= row["ppl_ratio"] <= row["ppl_ratio_ci"][1])
        floor, spectral, int2 = r["rows"]
        self.assertTrue(0 < floor["kl_mean"] < 0.5 * spectral["kl_mean"] < 0.5 * int2["kl_mean"])
        self.assertEqual([row["k_bits"] for row in r["rows"]], [16, 2, 2])
        self.assertEqual(floor["bits_per_element"], 16)
        self.assertTrue(2 <= spectral["bits_per_element"] < int2["bits_per_element"] < 3)
        self.assertIn("blocks", r["confidence"])

    def test_what_was_used_is_named(self):
        (text,) = self.result["texts"]
        self.assertEqual((text["name"], text["sequences"], text["tokens"]), (TEXT.name, 1, 1152))
        self.assertEqual(len(text["sha256"]), 64)
        self.assertEqual(self.result["artifact"]["digest"], json.loads(oscar("inspect", self.artifact, "-o", "json").stdout)["digest"])

    def test_retrieval(self):
        # 10 questions of a kind are no sample, 30 are.
        self.assertEqual([(row["method"], row["kind"], row["questions"]) for row in self.result["retrieval"]],
                         [(method, "all", 30) for method in ("exact", "noise-floor", "spectral-2", "oscar-repaired")])
        exact, floor, spectral, _ = self.result["retrieval"]
        self.assertGreater(exact["accuracy_ci"][0], exact["chance"])  # usable even on this model
        self.assertEqual(exact["same_choice"], 1)
        self.assertGreaterEqual(floor["same_choice"], 0.9)
        self.assertGreater(spectral["same_choice"], 0.6)

    def test_tools(self):
        words = ["-c", "2560", "--tasks", "tools", "--chats", "1", "--methods", "spectral-2"]
        rows = json.loads(self.evaluate(*words, "-o", "json").stdout)["tools"]
        self.assertEqual([(row["method"], row["requests"], row["answers"]) for row in rows],
                         [(method, 20, 20) for method in ("exact", "noise-floor", "spectral-2")])
        exact, floor, spectral = rows
        self.assertGreater(exact["function_accuracy_ci"][0], exact["function_chance"])  # usable even on this model
        self.assertGreater(exact["argument_probability"], 1.5 * exact["argument_chance"])
        self.assertGreater(exact["json_valid"], 0.5)
        self.assertEqual([exact[key] for key in ("same_function", "same_argument", "same_answer")], [1, 1, 1])
        for row in rows:
            self.assertTrue(row["call_right"] <= row["call_valid"] <= row["json_valid"])
            self.assertTrue(row["json_valid_ci"][0] <= row["json_valid"] <= row["json_valid_ci"][1])
        self.assertGreaterEqual(floor["same_function"], 0.9)
        self.assertGreaterEqual(spectral["same_function"], 0.7)
        again = self.evaluate(*words, "-o", "csv")
        self.assertIn("3 of 3 measurements are there", again.stderr)
        table = list(csv.DictReader(again.stdout.splitlines()))
        self.assertEqual([float(row["json_valid"]) for row in table], [row["json_valid"] for row in rows])
        self.assertIn("answer is JSON %", self.evaluate(*words).stdout)
        quick = self.evaluate(*words, "--no-floor", "--quick")
        self.assertIn("no answers", quick.stdout)
        self.assertTrue(any("task tools needs a context of 2560 tokens" in note for note in self.result["notes"]))

    def test_one_continuation_is_no_claim(self):
        self.assertEqual(self.result["continuations"], [])
        self.assertTrue(any("1 greedy continuations are too few" in note for note in self.result["notes"]))

    def test_everything_is_there_the_second_time(self):
        again = self.evaluate(*METHODS, "-o", "json")
        self.assertEqual(again.stdout, self.done.stdout)
        self.assertIn("7 of 7 measurements are there", again.stderr)
        table = list(csv.DictReader(self.evaluate(*METHODS, "-o", "csv").stdout.splitlines()))
        self.assertEqual([float(row["kl_mean"]) for row in table], [row["kl_mean"] for row in self.result["rows"]])
        text = self.evaluate(*METHODS).stdout
        for fragment in ("| noise-floor", "| spectral-2", "facts found", "smaller figures mean nothing"):
            self.assertIn(fragment, text)

    def test_rows_say_what_was_measured(self):
        settings = [row["settings"] for row in self.result["rows"]]
        self.assertEqual([s["mode"] for s in settings], ["exact", "oscar", "oscar"])
        self.assertEqual([(s["sink"], s["recent"], s["codec"]) for s in settings[1:]], [(64, 256, "spectral"), (64, 256, "int2")])
        self.assertEqual(settings[1]["artifact_digest"], self.result["artifact"]["digest"])

    def test_the_floor_can_be_left_out(self):
        rows = json.loads(self.evaluate(*METHODS, "--no-floor", "-o", "json").stdout)["rows"]
        self.assertEqual(rows, [row for row in self.result["rows"] if row["method"] != "noise-floor"])
        self.assertNotIn("noise-floor", self.evaluate(*METHODS, "--no-floor").stdout)

    def test_an_interrupted_evaluation_goes_on_and_damaged_results_are_measured_again(self):
        cache = self.folder / "plain"
        process = subprocess.Popen([OSCAR, *map(str, self.words(*PLAIN))], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
                                   env=clean_environment(OSCAR_CACHE_DIR=str(cache)))
        deadline = time.monotonic() + 600
        while not list(cache.glob("eval/*.json")) and time.monotonic() < deadline and process.poll() is None:
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=120)
        self.assertEqual(process.returncode, 1, err)
        self.assertIn("the same command goes on", err)
        resumed = self.evaluate(*PLAIN, cache="plain")
        self.assertRegex(resumed.stderr, r"[1-4] of 5 measurements are there")
        # The same from two runs, bit for bit, although the other went back behind continuations between its batches.
        result = json.loads(resumed.stdout)
        self.assertEqual(result["rows"], self.rows("rows", method="noise-floor") + self.rows("rows", method="spectral-2"))
        self.assertEqual(result["retrieval"], [row for row in self.result["retrieval"] if row["method"] != "oscar-repaired"])

        stored = {file: json.loads(file.read_text()) for file in sorted(cache.glob("eval/*.json"))}
        damaged = [file for file, content in stored.items() if "kl" in content["value"]]
        for file, value in zip(damaged, ({**stored[damaged[0]]["value"], "kl": stored[damaged[0]]["value"]["kl"][:5]}, None), strict=True):
            file.write_text(json.dumps({**stored[file], "value": value}))
        again = self.evaluate(*PLAIN, cache="plain")
        self.assertIn("3 of 5 measurements are there", again.stderr)
        self.assertEqual(again.stdout, resumed.stdout)

    def test_parts_of_several_processes_are_the_whole(self):
        words = ["-c", "640", "--sequences", "2", "--tasks", "kl", "--methods", "spectral-2", "--no-floor", "-o", "json"]
        command = [OSCAR, *map(str, self.words(*words))]
        cache = self.folder / "parts"
        parts = [subprocess.Popen([*command, "--part", f"{i}/2"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                                  env=clean_environment(OSCAR_CACHE_DIR=str(cache))) for i in (1, 2)]
        for i, process in enumerate(parts, 1):
            out, err = process.communicate(timeout=900)
            self.assertEqual((process.returncode, out), (0, ""), err)
            self.assertIn(f"part {i}/2 is kept", err)
        self.assertEqual(len(list(cache.glob("eval/*"))), 2)  # spectral-2 of each sequence
        whole = self.evaluate(*words, cache="parts")
        self.assertIn("2 of 2 measurements are there", whole.stderr)
        self.assertEqual(whole.stdout, self.evaluate(*words).stdout)

    def refused(self, *words, fragment):
        done = self.evaluate(*words, check=False)
        self.assertEqual((done.returncode, done.stdout), (1, ""), done.stderr)
        self.assertIn(fragment, done.stderr)

    def test_refusals(self):
        self.refused("-c", "1024", fragment="511 positions are too few for a claim")
        self.refused("-f", CALIBRATION, fragment="is the text that")
        self.refused("--methods", "spectral-9", fragment="there is no method spectral-9")
        self.refused("--methods", "spectral-2,spectral-2", fragment="asked for twice")
        self.refused("--variant", "k_bits=7", fragment="k_bits is 7")
        self.refused("--tasks", "speed", fragment="there is no task")
        self.refused("--rollback", "8", fragment="--rollback 8 is too small")
        self.refused("--sequences", "1000", fragment="use a longer text")
        self.refused("-c", "512", "--tasks", "retrieval", fragment="use a larger -c")
        self.refused("-c", "1024", "--tasks", "tools", fragment="use a larger -c")
        self.refused("--variant", "layer_bits=40:3", fragment="names layer 40")
        self.refused("--from", "300", fragment="positions before 320 (sink + recent) read 16-bit rows only")
        self.refused("-c", "300", "--tasks", "kl", fragment="use a larger -c")
        self.refused("--variant", "recent=1000", fragment="recent=1000: positions before 1064")
        self.refused("--variant", "mode=stock", fragment="oscar compare --mode-b stock")
        self.refused("--sequences", "1001", fragment="more than the 1000")
        for part in ("0/4", "5/4", "2", "1/0", "1/4x"):
            self.refused("--part", part, fragment=f"--part {part} makes no sense")


if __name__ == "__main__":
    unittest.main(verbosity=2)
