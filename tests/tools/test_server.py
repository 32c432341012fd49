"""Stock llama-server with the plug-in, spoken to over HTTP."""
import concurrent.futures
import http.client
import json
import tempfile
import unittest
from pathlib import Path

from stock import Server, assert_served, looks_like_text, prose

# About 500 tokens each: more than sink + recent, so that every answer reads coded rows.
PROMPTS = [prose(start, 2200) for start in (1000, 60000, 140000, 300000)]


def answers_of(server, prompts, **more):
    with concurrent.futures.ThreadPoolExecutor(len(prompts)) as pool:
        return list(pool.map(lambda prompt: server.complete(prompt, **more), prompts))


def chat_stream(server, question):
    """One streamed answer of /v1/chat/completions: the pieces in the order they came, and the end marker."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=240)
    body = {"messages": [{"role": "user", "content": question}], "stream": True, "max_tokens": 48, "temperature": 0}
    connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    pieces, ended = [], False
    for line in response:
        if not line.startswith(b"data: "):
            continue
        data = line[6:].strip()
        if data == b"[DONE]":
            ended = True
            break
        for choice in json.loads(data)["choices"]:
            pieces.append(choice["delta"].get("content") or "")
    connection.close()
    return response.status, pieces, ended


class ServerTest(unittest.TestCase):
    def test_four_unified_slots(self):
        with Server("-c", 8192) as server:
            self.assertEqual(len(server.get("/slots")[1]), 4)
            for answer in answers_of(server, PROMPTS):
                self.assertTrue(looks_like_text(answer["content"]), answer["content"])
                self.assertGreater(answer["timings"]["prompt_n"], 400)

            # Prefix reuse: the same beginning is not computed again.
            longer = server.complete(PROMPTS[0] + " In one word, this is about")
            self.assertLess(longer["timings"]["prompt_n"], 100)
            self.assertTrue(looks_like_text(longer["content"]), longer["content"])

            status, pieces, ended = chat_stream(server, "Here is a text.\n" + PROMPTS[1] + "\nWhat is it about?")
            self.assertEqual(status, 200)
            self.assertTrue(ended)
            self.assertGreater(len(pieces), 5)
            self.assertTrue(looks_like_text("".join(pieces)), pieces)
        assert_served(self, server)

    def test_four_streams_and_slot_files(self):
        with tempfile.TemporaryDirectory() as folder, Server("-c", 8192, "-np", 4, "--slot-save-path", folder) as server:
            for answer in answers_of(server, PROMPTS):
                self.assertTrue(looks_like_text(answer["content"]), answer["content"])

            # Twice the same request: the second one computes one token on the stored rows. After saving, erasing and restoring
            # the slot it does exactly that again, on the same rows bit for bit.
            server.complete(PROMPTS[0], id_slot=1)
            stored = server.complete(PROMPTS[0], id_slot=1)
            self.assertEqual(stored["timings"]["prompt_n"], 1)
            saved = server.post("/slots/1?action=save", filename="slot.bin")
            self.assertGreater(saved["n_saved"], 400)
            server.post("/slots/1?action=erase")
            restored = server.post("/slots/1?action=restore", filename="slot.bin")
            self.assertEqual(restored["n_restored"], saved["n_saved"])
            again = server.complete(PROMPTS[0], id_slot=1)
            self.assertEqual(again["timings"]["prompt_n"], 1)
            self.assertEqual(again["content"], stored["content"])

            # A damaged file is refused to whoever asked for it; the server and its other clients go on.
            slot = Path(folder) / "slot.bin"
            damaged = bytearray(slot.read_bytes())
            for at in range(len(damaged) // 2, len(damaged), 300):  # some of it in coded rows
                damaged[at] ^= 0x10
            slot.write_bytes(damaged)
            status, answer = server.request("POST", "/slots/1?action=restore", {"filename": "slot.bin"})
            self.assertEqual(status, 400, answer)
            fresh = server.complete(PROMPTS[0], id_slot=1)
            self.assertGreater(fresh["timings"]["prompt_n"], 400)
            self.assertTrue(looks_like_text(fresh["content"]), fresh["content"])
        assert_served(self, server)
        self.assertGreater(sum(cache["imported_rows"] for cache in server.stats["caches"]), 0)

    def test_cache_reuse_shifts_rows(self):
        start, middle, end = prose(20000, 900), prose(80000, 900), prose(200000, 2400)
        with Server("-c", 4096, "-np", 1, "--cache-reuse", 32, "-cram", 0) as server:
            first = server.complete(f"{start}\n\n{middle}\n\n{end}")
            # The middle is gone, so what followed it moves to smaller positions instead of being computed again.
            second = server.complete(f"{start}\n\n{end}")
            self.assertLess(second["timings"]["prompt_n"], first["timings"]["prompt_n"] // 3)
            self.assertTrue(looks_like_text(second["content"]), second["content"])
        assert_served(self, server)
        self.assertGreater(server.stats["shifts"], 0)

    def test_context_shift(self):
        with Server("-c", 768, "-np", 1, "--context-shift", "-cram", 0) as server:
            answer = server.complete(prose(100000, 3000), n_predict=140, ignore_eos=True)
            self.assertEqual(answer["tokens_predicted"], 140)
            self.assertTrue(looks_like_text(answer["content"]), answer["content"])
        assert_served(self, server)
        self.assertGreater(server.stats["shifts"], 0)


if __name__ == "__main__":
    unittest.main(verbosity=2)
