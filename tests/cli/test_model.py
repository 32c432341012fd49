"""run, calibrate, merge and compare on a real model, SmolLM2-135M. Small sizes: this is about the command, not about quality."""
import csv
import hashlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import tempfile
import time
import unittest
from pathlib import Path

from cli import OSCAR, clean_environment, oscar
from page import embedded, plots

MODEL, SLIDING_MODEL, CALIBRATION, TEXT = (Path(os.environ[f"OSCAR_TEST_{name}"])
                                           for name in ("MODEL", "SLIDING_MODEL", "CALIBRATION", "TEXT"))
# 3 sequences, saved after each; small batches, so that Ctrl-C is heard soon.
SIZE = ["-c", "512", "-n", "1300", "-ub", "128", "--save-every", "1"]


class Model(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        cls.folder = Path(folder.name)
        cls.artifact = cls.folder / "whole.oscar.safetensors"
        cls.moments = cls.folder / "whole.moments.safetensors"
        done = cls.calibrate("-o", cls.artifact, "--format", "json")
        cls.calibrated = json.loads(done.stdout)

    @staticmethod
    def calibrate(*words, check=True):
        done = oscar("calibrate", "-m", MODEL, "-f", CALIBRATION, *SIZE, *words, timeout=600)
        if check and done.returncode != 0:
            raise AssertionError(done.stderr)
        return done

    def run_model(self, *words, mode="oscar", **keywords):
        stats = self.folder / "stats.json"
        stats.unlink(missing_ok=True)
        done = oscar("run", "-m", MODEL, "--oscar", self.artifact, "--mode", mode, "--stats-json", stats, *words, timeout=600, **keywords)
        self.assertEqual(done.returncode, 0, done.stderr)
        return done, json.loads(stats.read_text())

    def test_b5_calibration_reports_what_it_did(self):
        r = self.calibrated
        self.assertEqual((r["tokens"], len(r["heads"]), r["architecture"]), (1300, 30 * 3, "llama"))
        self.assertEqual([(s["name"], s["tokens"]) for s in r["sources"]], [(CALIBRATION.name, 1300)])
        self.assertTrue(all(0 < head["k_error"] < 1 and 0 < head["v_error"] < 1 for head in r["heads"]))
        self.assertTrue(any("1300 tokens are few" in warning for warning in r["warnings"]))
        inspected = json.loads(oscar("inspect", self.artifact, "-o", "json").stdout)
        self.assertTrue(inspected["sound"])
        self.assertEqual(inspected["digest"], r["digest"])
        moments = json.loads(oscar("inspect", self.moments, "-o", "json").stdout)
        self.assertEqual((moments["kind"], moments["tokens"]), ("moments", 1300))
        # The first tokens of a sequence are not counted: their keys and values are outliers of their own.
        self.assertTrue(all(1250 < row["tokens"] < 1300 for row in moments["rows"]), moments["rows"][0])

    def test_b5_too_few_tokens_are_refused(self):
        short = self.folder / "short.txt"
        short.write_text("Twelve tokens are not enough to know a model by.")
        done = oscar("calibrate", "-m", MODEL, "-f", short, "-o", self.folder / "short.oscar.safetensors")
        self.assertEqual(done.returncode, 1)
        self.assertIn("the floor is 1024", done.stderr)

    def test_b6_resumed_equals_uninterrupted(self):
        output, moments = self.folder / "resumed.oscar.safetensors", self.folder / "resumed.moments.safetensors"
        words = ["calibrate", "-m", MODEL, "-f", CALIBRATION, *SIZE, "-o", output]
        process = subprocess.Popen([OSCAR, *map(str, words)], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=clean_environment())
        deadline = time.monotonic() + 300
        while not moments.exists() and time.monotonic() < deadline and process.poll() is None:
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=120)
        self.assertEqual(process.returncode, 1, err)
        self.assertIn(f"--resume {moments}", err)
        self.assertFalse(output.exists())
        again = self.calibrate("-o", output, "--resume", moments, "--format", "json")
        resumed = json.loads(again.stdout)
        self.assertEqual(resumed["tokens"], 1300)
        self.assertLess(resumed["run_tokens"], 1000)
        self.assertEqual(resumed["heads"], self.calibrated["heads"])  # every error and threshold, bit for bit
        done = self.calibrate("-o", output, "--resume", moments, "--format", "json")
        self.assertIn("nothing is left to read", done.stderr)
        fitted = json.loads(done.stdout)
        self.assertEqual((fitted["run_tokens"], fitted["heads"]), (0, self.calibrated["heads"]))

    def test_b5_sequences_too_short_for_codes_are_refused(self):
        done = oscar("calibrate", "-m", MODEL, "-f", CALIBRATION, "-c", "256", "-n", "1100", "-o", self.folder / "short.oscar.safetensors",
                     timeout=600)
        self.assertEqual(done.returncode, 1)
        self.assertIn("-c 256 is too short", done.stderr)

    def test_b5_degenerate_text_is_warned_about_and_never_nan(self):
        text, output = self.folder / "again.txt", self.folder / "again.oscar.safetensors"
        text.write_text("Again and again. " * 4000)
        done = oscar("calibrate", "-m", MODEL, "-f", text, *SIZE, "-o", output, "--format", "json", timeout=600)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("different tokens", done.stderr)
        self.assertNotRegex(done.stdout.lower(), r"\bnan\b|\binf\b|null")
        self.assertTrue(json.loads(oscar("inspect", output, "-o", "json").stdout)["sound"])

    def test_merge_and_refit(self):
        done = oscar("calibrate", "-m", MODEL, "-f", TEXT, *SIZE, "-o", self.folder / "other.oscar.safetensors", timeout=600)
        self.assertEqual(done.returncode, 0, done.stderr)
        both = self.folder / "both.moments.safetensors"
        done = oscar("merge", self.moments, self.folder / "other.moments.safetensors", "-o", both)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("2600 tokens", done.stdout)
        output = self.folder / "layer.oscar.safetensors"
        done = oscar("calibrate", "--from-moments", both, "-o", output, "--codec", "int2", "--rotation", "layer", "--k-mean", "none",
                     "--clip-k", "0.9", "--format", "json")
        self.assertEqual(done.returncode, 0, done.stderr)
        fitted = json.loads(done.stdout)
        self.assertEqual((fitted["run_tokens"], fitted["recipe"]["rotation"], fitted["recipe"]["k_mean"]), (0, "layer", "none"))
        self.assertEqual({row["rotations"] for row in json.loads(oscar("inspect", output, "-o", "json").stdout)["rows"]}, {1})

    def test_report_shows_the_artifact(self):
        page = self.folder / "report.html"
        done = oscar("report", "--oscar", self.artifact, "-o", page)
        self.assertEqual(done.returncode, 0, done.stderr)
        text = page.read_text()
        self.assertIn(self.calibrated["digest"], text)
        self.assertIn(self.calibrated["sources"][0]["sha256"], text)
        (shown,) = json.loads(embedded(text))["artifacts"]
        self.assertEqual([(h["layer"], h["head"]) for h in shown["heads"]], [(layer, head) for layer in range(30) for head in range(3)])
        for rate, bits in enumerate((1.5, 2, 2.5, 3)):  # all heads of the model share what the rate gives
            digits = [int(d) for h in shown["heads"] for d in h["widths"][rate]]
            self.assertAlmostEqual(2 * sum(digits) / len(digits), bits, delta=0.01)
        self.assertTrue(all(len(h["spectrum"]) == 64 and min(h["spectrum"]) > 0 for h in shown["heads"]))
        noise = {}
        for head in self.calibrated["heads"]:
            sums = noise.setdefault(head["layer"], [0, 0, 0])
            for i, key in enumerate(("key_noise", "key_noise_int2", "output_energy")):
                sums[i] += head[key]
        for layer in shown["layers"]:
            ours, int2, output = noise[layer["layer"]]
            self.assertAlmostEqual(layer["noise"], (ours / output) ** 0.5, delta=1e-3 * layer["noise"])
            self.assertAlmostEqual(layer["int2"], (int2 / output) ** 0.5, delta=1e-3 * layer["int2"])
        if shutil.which("node") is None:
            return
        charts = plots(text)
        self.assertEqual(set(charts), {"error-0", "spectrum-0", "widths-0"})
        self.assertEqual(len(charts["spectrum-0"]["data"]["datasets"]), 90)
        drawn = {(run["y"], at): sets["label"] for sets in charts["widths-0"]["data"]["datasets"] for run in sets["data"] for at in range(*run["x"])}
        self.assertEqual(drawn, {(f"{h['layer']}.{h['head']}", at): f"{2 * int(d)} bits" for h in shown["heads"] for at, d in enumerate(h["widths"][1])})

    def test_the_card_says_how_to_make_the_same_bytes(self):
        card = oscar("card", self.artifact, "--base-model", "someone/SmolLM2").stdout
        sha256 = hashlib.sha256(self.artifact.read_bytes()).hexdigest()
        for fragment in ('license: "apache-2.0"', 'base_model: "someone/SmolLM2"', self.calibrated["model_fingerprint"], self.calibrated["digest"],
                         sha256, self.calibrated["sources"][0]["sha256"], self.calibrated["verdict"], "1300 tokens are few"):
            self.assertIn(fragment, card)
        sizes = re.findall(r"(?m)^\| spectral \| +([\d.]+) +\| +([\d.]+) \|", card)
        self.assertEqual(sizes, [("1.5", "1.625"), ("2", "2.125"), ("2.5", "2.625"), ("3", "3.125")])
        environment, *command = shlex.split(re.search(r"(?m)^SOURCE_DATE_EPOCH=.*$", card).group())
        again = self.folder / "again"
        again.mkdir()
        for file in (MODEL, CALIBRATION):
            (again / file.name).symlink_to(file)
        done = subprocess.run([OSCAR, *command[1:]], cwd=again, capture_output=True, text=True, timeout=600,
                              env=clean_environment(**dict([environment.split("=")])))
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(hashlib.sha256((again / self.artifact.name).read_bytes()).hexdigest(), sha256)

    def test_layer_rates_are_kept_in_the_artifact(self):
        output = self.folder / "rates.oscar.safetensors"
        done = oscar("calibrate", "--from-moments", self.moments, "-o", output, "--layer-bits", "3:3,1-2:k2.5", "--format", "json")
        self.assertEqual(done.returncode, 0, done.stderr)
        fitted = json.loads(done.stdout)
        self.assertEqual(fitted["recipe"]["layer_bits"], "1-2:k2.5,3:3")
        card = oscar("card", output).stdout
        self.assertIn("--layer-bits 3:3,1-2:k2.5", card)  # the command that reproduces it
        self.assertIn("(layers 1-2:k2.5,3:3: `--layer-bits`)", card)
        seen = json.loads(oscar("inspect", output, "-o", "json").stdout)
        self.assertEqual(seen["layer_bits"], "1-2:k2.5,3:3")
        self.assertAlmostEqual(seen["bits_per_element"], 2.125 + (1 + 2 * 0.25) / 30, delta=0.03)  # a rate is that of all layers together
        for rates, fragment in (("30:3", "names layer 30"), ("0:3,0:k2", "a second rate for K")):
            done = oscar("calibrate", "--from-moments", self.moments, "-o", self.folder / "never.safetensors", "--layer-bits", rates)
            self.assertEqual(done.returncode, 1)
            self.assertIn(fragment, done.stderr)

    def test_run_answers_from_the_coded_cache(self):
        document = self.folder / "document.txt"
        document.write_text(TEXT.read_text()[:2600])
        words = ["-f", document, "-p", "What is this text about? Answer in one sentence.", "-n", "4", "-c", "1024", "-ub", "64", "--sink", "16",
                 "--recent", "64"]
        done, coded = self.run_model(*words)
        self.assertGreater(len(done.stdout.strip()), 4)
        self.assertEqual(coded["generated_tokens"], len(coded["tokens"]))
        self.assertGreater(coded["prompt_tokens"], 500)
        self.assertGreater(coded["attention_served"], 0)
        self.assertEqual(coded["attention_bypassed"], 0)
        self.assertGreater(coded["bits_per_element"], 2.0)
        self.assertLess(coded["bits_per_element"], 3.0)
        _, exact = self.run_model(*words, mode="exact")
        done, plain = self.run_model(*words, mode="delegate")
        stock, alone = self.run_model(*words, mode="stock")
        self.assertEqual(stock.stdout, done.stdout)
        self.assertEqual(alone["tokens"], plain["tokens"])
        self.assertIsNone(alone["kv_bytes"])
        self.assertGreaterEqual(plain["kv_bytes"] * 1024, plain["kv_bytes_f16"] * plain["prompt_tokens"])
        self.assertLessEqual(plain["kv_bytes"], plain["kv_bytes_f16"])
        self.assertEqual(plain["kv_bytes_f16"], 1024 * 30 * 3 * 64 * 2 * 2)
        self.assertLess(coded["kv_bytes"], 0.65 * exact["kv_bytes"])

    def test_chat_keeps_its_context(self):
        done, stats = self.run_model("-cnv", "-n", "8", "-c", "512", stdin="My name is Ada.\nWhat is my name?\n\n")
        self.assertGreaterEqual(len(done.stdout.strip().splitlines()), 2, done.stdout)
        self.assertLessEqual(stats["generated_tokens"], 16)
        self.assertGreater(stats["generated_tokens"], 2)

    def test_run_refuses_a_prompt_that_does_not_fit(self):
        done = oscar("run", "-m", MODEL, "--oscar", self.artifact, "-f", TEXT, "-c", "256")
        self.assertEqual(done.returncode, 1)
        self.assertIn("the context has 256", done.stderr)

    def compare(self, *words):
        """Queries 352..574: windows of 64 + 256 leave coded rows to all of them."""
        done = oscar("compare", "-m", MODEL, "--oscar", self.artifact, "-f", TEXT, "-c", "576", "--chunks", "1", "--from", "352", *words, timeout=600)
        self.assertEqual(done.returncode, 0, done.stderr)
        return done

    def test_compare_a_mode_with_itself_is_zero(self):
        base, same = csv.DictReader(self.compare("--mode-b", "exact", "-o", "csv").stdout.splitlines())
        self.assertEqual((base["cache"], base["KL mean"]), ("exact", ""))
        self.assertLess(abs(float(same["KL max"])), 1e-9)
        self.assertEqual([float(same[key]) for key in ("same top %", "PPL ratio", "± ratio")], [100, 1, 0])
        self.assertEqual(same["PPL"], base["PPL"])

    def test_compare_variants_against_one_base(self):
        by_layer = "layer_bits=0:3,4-5:k3,k_bits=2"
        r = json.loads(self.compare("--variant", "codec=int2,k_mean=none", "--variant", "recent=450", "--variant", "k_bits=3,v_bits=1.5",
                                    "--variant", by_layer, "-o", "json").stdout)
        self.assertEqual([v["name"] for v in r["variants"]], ["oscar", "codec=int2,k_mean=none", "recent=450", "k_bits=3,v_bits=1.5", by_layer])
        self.assertEqual(r["positions"], 576 - 352 - 1)
        coded, plain, nearly_exact, other_rates, layers = r["variants"]
        for v in r["variants"]:
            self.assertGreater(v["kl_mean"], 0)
            self.assertTrue(v["kl_mean_ci"][0] <= v["kl_mean"] <= v["kl_mean_ci"][1])
            self.assertLessEqual(v["kl_median"], v["kl_p99"])
            self.assertLessEqual(v["kl_p99"], v["kl_max"])
            self.assertGreater(v["attention_served"], 0)
            self.assertEqual(v["attention_bypassed"], 0)
            self.assertAlmostEqual(v["ppl"] / r["base"]["ppl"], v["ppl_ratio"])
        self.assertNotEqual(coded["kl_mean"], plain["kl_mean"])
        self.assertLess(nearly_exact["kl_mean"], coded["kl_mean"])
        self.assertEqual(r["base"]["bits_per_element"], 16)
        self.assertAlmostEqual(coded["bits_per_element"], 2.125)
        self.assertAlmostEqual(other_rates["bits_per_element"], 2.25 + 0.125)
        self.assertAlmostEqual(layers["bits_per_element"], 2.125 + (1 + 2 * 0.5) / 30, delta=0.03)
        self.assertAlmostEqual(plain["bits_per_element"], 2.5)
        # Counted and reported: what the quantiser had to clamp, a few per cent by design.
        self.assertIsNone(r["base"]["saturated_share"])
        self.assertTrue(all(0.01 < v["saturated_share"] < 0.08 for v in (coded, nearly_exact, other_rates)), r)
        self.assertTrue(0 < plain["saturated_share"] < 0.2, plain)

    def test_compare_credits_the_right_cache(self):
        """A model with sliding-window layers has two caches per context; memory and bits are those of the coded one."""
        artifact = self.folder / "sliding.oscar.safetensors"
        # In a context that its window covers, a layer with one counts as one without, and would share the digits.
        done = oscar("calibrate", "-m", SLIDING_MODEL, "-f", CALIBRATION, "-c", "1024", "-n", "2048", "-o", artifact, timeout=600)
        self.assertEqual(done.returncode, 0, done.stderr)
        done = oscar("compare", "-m", SLIDING_MODEL, "--oscar", artifact, "-f", TEXT, "-c", "448", "--chunks", "1", "--from", "352",
                     "--variant", "codec=int2", "-o", "json", timeout=600)
        self.assertEqual(done.returncode, 0, done.stderr)
        r = json.loads(done.stdout)
        self.assertEqual(r["base"]["bits_per_element"], 16)
        self.assertEqual([v["bits_per_element"] for v in r["variants"]], [2 + 8 / 256, 2 + 32 / 256])
        for v in r["variants"]:
            self.assertEqual(v["kv_bytes_f16"], r["base"]["kv_bytes_f16"])
            self.assertEqual(v["attention_bypassed"], 0)
            self.assertGreater(v["kl_mean"], 0)

    def test_compare_simulated_rivals(self):
        names = ["codec=sim:q8_0", "codec=sim:kivi2-g32", "codec=sim:naive-int2"]
        r = json.loads(self.compare(*[word for name in names for word in ("--variant", name)], "-o", "json").stdout)
        eight, kivi, naive = r["variants"][1:]
        self.assertEqual([v["bits_per_element"] for v in (eight, kivi, naive)], [8.5, 3, 2.5])
        self.assertLess(eight["kl_mean"], kivi["kl_mean"])
        self.assertLess(kivi["kl_mean"], naive["kl_mean"])
        # Memory is what the rival would take, although its simulation takes more.
        self.assertLess(naive["kv_bytes"], kivi["kv_bytes"])
        self.assertEqual(eight["kv_bytes"] - kivi["kv_bytes"], 576 * 30 * 3 * 64 * 2 * (8.5 - 3) / 8)

    def test_unknown_rivals_are_refused_with_the_known_ones(self):
        done = oscar("compare", "-m", MODEL, "-f", TEXT, "--oscar", self.artifact, "--variant", "codec=sim:kivi9")
        self.assertNotEqual(done.returncode, 0)
        self.assertIn("sim:kivi9", done.stderr)
        self.assertIn("kivi2-g128", done.stderr)


if __name__ == "__main__":
    unittest.main(verbosity=2)
