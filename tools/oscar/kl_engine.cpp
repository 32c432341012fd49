#include "kl_engine.h"

#include <algorithm>
#include <exception>
#include <mutex>
#include <thread>

#include "oscar/base/error.h"

namespace oscar::cli {
namespace {

void compare_rows(const Context& base, const Context& other, int n_vocab, const std::vector<llama_token>& targets,
                  std::vector<Difference>& out) {
  const std::size_t n = targets.size(), at = out.size();
  out.resize(at + n);
  const std::size_t n_threads = std::clamp<std::size_t>(std::thread::hardware_concurrency(), 1, 64);
  std::exception_ptr error;
  std::mutex mutex;
  std::vector<std::thread> threads;
  for (std::size_t thread = 0; thread < n_threads; ++thread) {
    threads.emplace_back([&, thread] {
      try {
        for (std::size_t i = thread; i < n; i += n_threads) {
          const auto size = static_cast<std::size_t>(n_vocab);
          out[at + i] =
              difference({base.logits(static_cast<int>(i)), size}, {other.logits(static_cast<int>(i)), size}, targets[i]);
        }
      } catch (...) {
        const std::lock_guard lock(mutex);
        error = std::current_exception();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  if (error) std::rethrow_exception(error);
}

}  // namespace

bool settle_modes(std::vector<Contender>& all) {
  const bool plugin = std::any_of(all.begin(), all.end(),
                                  [](const Contender& c) { return c.settings.mode != "stock" && c.settings.mode != "off"; });
  for (Contender& c : all) {
    check(c.settings);
    // One process, one plug-in: beside other modes, stock is the hooks that only forward, bit-identical to llama.cpp.
    if (c.settings.mode == "off") c.settings.mode = "stock";
    if (plugin && c.settings.mode == "stock") c.settings.mode = "delegate";
  }
  return plugin;
}

void open_contexts(std::vector<Contender>& all, const Model& model, const HostOptions& host) {
  for (Contender& c : all) {
    if (Plugin::loaded()) Plugin::configure(plugin_json(c.settings, c.artifact));
    c.context = std::make_unique<Context>(model, host);
  }
}

std::vector<std::vector<llama_token>> cut_text(const Model& model, const std::string& text, int n_ctx, int chunks, int from) {
  std::vector<llama_token> tokens = model.tokenize(text, false, false);
  const llama_vocab* vocab = model.vocab();
  const bool bos = llama_vocab_get_add_bos(vocab);
  const std::size_t length = static_cast<std::size_t>(n_ctx) - (bos ? 1 : 0);
  std::vector<std::vector<llama_token>> out;
  for (std::size_t begin = 0; begin < tokens.size() && (chunks < 0 || out.size() < static_cast<std::size_t>(chunks));
       begin += length) {
    const std::size_t end = std::min(tokens.size(), begin + length);
    if (end - begin < length && !out.empty()) break;  // a short rest would weigh shallow positions more
    std::vector<llama_token> chunk;
    if (bos) chunk.push_back(llama_vocab_bos(vocab));
    chunk.insert(chunk.end(), tokens.begin() + static_cast<std::ptrdiff_t>(begin),
                 tokens.begin() + static_cast<std::ptrdiff_t>(end));
    out.push_back(std::move(chunk));
  }
  if (out.empty() || static_cast<int>(out[0].size()) < from + 2) {
    fail("the text has {} tokens, but positions are judged from {} on: use a longer text or a smaller --from", tokens.size(),
         from);
  }
  return out;
}

void run_chunk(const Model& model, const std::vector<Contender*>& all, const std::vector<llama_token>& chunk,
               const ChunkPass& pass) {
  for (Contender* c : all) {
    c->context->clear();
    c->differences.emplace_back();
  }
  const int n = static_cast<int>(chunk.size());
  for (int begin = 0; begin < n; begin += pass.n_ubatch) {
    const int end = std::min(n, begin + pass.n_ubatch);
    const std::vector<llama_token> part(chunk.begin() + begin, chunk.begin() + end);
    // Row i of the logits predicts the token after position max(from, begin) + i; the last position has none.
    std::vector<llama_token> targets;
    for (int t = std::max(pass.from, begin); t < end && t + 1 < n; ++t)
      targets.push_back(chunk[static_cast<std::size_t>(t) + 1]);
    for (Contender* c : all) {
      if (interrupted()) fail("interrupted");
      const nlohmann::json before = Plugin::stats();
      c->seconds += c->context->decode(part, begin, pass.from);
      const nlohmann::json after = Plugin::stats();
      c->served += served_operations(after) - served_operations(before);
      c->bypassed += counter(after, "attention_bypassed") - counter(before, "attention_bypassed");
      if (c != all[0]) compare_rows(*all[0]->context, *c->context, model.n_vocab(), targets, c->differences.back());
      if (pass.decoded) pass.decoded(part.size());
    }
    if (pass.after_batch) pass.after_batch(end);
  }
}

}  // namespace oscar::cli
