// Several caches on one text, side by side: every context decodes the same tokens, and after each batch its logits are compared
// with those of the first. No logits are kept: at 4096 positions and 50k tokens they would take 800 MB a cache.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "session.h"
#include "settings.h"
#include "statistics.h"

namespace oscar::cli {

struct Contender {
  std::string name;
  Settings settings;
  std::string artifact;  // path; empty when its mode uses none
  std::unique_ptr<Context> context;
  std::vector<std::vector<Difference>> differences;  // from the base; [chunk][position]; empty for the base itself
  double seconds = 0;
  std::uint64_t served = 0, bypassed = 0;  // attention operations
};

// Checks all settings, and turns stock into what it has to be beside modes that need the plug-in. True: the plug-in is needed.
bool settle_modes(std::vector<Contender>& all);
// In the order of `all`, on which cache_report() relies.
void open_contexts(std::vector<Contender>& all, const Model& model, const HostOptions& host);

// Whole chunks of n_ctx tokens, each with its own BOS where the model wants one; at most `chunks` (-1: all). A text shorter
// than one chunk gives one short chunk; Error when even that leaves nothing after position `from`.
std::vector<std::vector<llama_token>> cut_text(const Model& model, const std::string& text, int n_ctx, int chunks, int from);

struct ChunkPass {
  int from = 0;  // first position judged
  int n_ubatch = 512;
  std::function<void(std::size_t)> decoded;  // number of tokens just decoded by one context
  // After all contexts decoded up to position `end` and were compared; may decode more, but must rewind to `end`.
  std::function<void(int end)> after_batch;
};
// One chunk through all contexts, from empty caches; all[0] is the base. Adds one entry to `differences` of each.
void run_chunk(const Model& model, const std::vector<Contender*>& all, const std::vector<llama_token>& chunk,
               const ChunkPass& pass);

}  // namespace oscar::cli
