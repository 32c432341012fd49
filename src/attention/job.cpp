// AttentionJob: cuts an operation into pieces and hands them out.
//
// Piece = (KV head or all of them, block of query tokens, split of the context). The cut depends on the operation only, never
// on threads. Splits interleave: where values lie in several bases that take turns from tile to tile, a split's tiles have one
// of them, and so have its sums. Splits exist when there are too few blocks to keep a machine busy (decode); their partial
// results wait in the job, and threads that find no piece left merge them in split order, KV head by KV head.
#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <memory>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "attention/block.h"
#include "oscar/attention/attention.h"
#include "oscar/base/error.h"
#include "oscar/base/wait.h"

namespace oscar {
namespace {

using namespace attention;

constexpr int kBlockRows = 128;  // query rows of a block: enough to share a decoded tile, small enough for L2
constexpr int kBlockTokens = 64;
// Up to so many rows, from so many cells on, a piece does all KV heads: their rows lie in the same cache lines.
constexpr int kSharedRows = 64;
constexpr std::int64_t kSharedCells = 1024;
// A split has at least kSplitCells cells, unless that left fewer than kLeastSplits of them: each costs sums of its own, about
// as much as a tile. kMaxSplits bounds scratch: splits grow with the context instead.
constexpr std::int64_t kSplitCells = 512;
constexpr std::int64_t kLeastSplits = 8;
constexpr std::int64_t kMaxSplits = 32;
constexpr std::int64_t kPieces = 64;  // no splitting beyond this many pieces

// OSCAR_ARITHMETIC=float decodes every code, for comparisons; else integer where the codec allows it.
bool integers_wanted() {
  const char* word = std::getenv("OSCAR_ARITHMETIC");
  const std::string_view wanted = (word == nullptr) ? "" : word;
  if (wanted.empty() || wanted == "integer") return true;
  if (wanted == "float") return false;
  fail("OSCAR_ARITHMETIC={} is unknown; choose integer or float", wanted);
}

void check(const AttentionArgs& a) {
  if (a.cache == nullptr) fail("attention: no cache is given");
  const auto layers = a.cache->layers();
  if (a.layer_index < 0 || static_cast<std::size_t>(a.layer_index) >= layers.size()) {
    fail("attention: layer index {} does not exist; the cache has {} layers", a.layer_index, layers.size());
  }
  if (a.first_cell < 0 || a.n_kv < 0 || a.n_kv > a.cache->n_cells() || a.first_cell > a.cache->n_cells() - a.n_kv) {
    fail("attention: cells {} .. {} do not exist; the cache has {}", a.first_cell, a.first_cell + a.n_kv - 1,
         a.cache->n_cells());
  }
  const int n_head_kv = layers[static_cast<std::size_t>(a.layer_index)].n_head_kv;
  if (a.n_head <= 0 || n_head_kv <= 0 || a.n_head % n_head_kv != 0) {
    fail("attention: {} query heads are not a multiple of {} KV heads", a.n_head, n_head_kv);
  }
  if (a.n_tokens < 0) fail("attention: {} query tokens", a.n_tokens);
  if (a.n_tokens > 0 && (a.positions == nullptr || a.q == nullptr || a.out == nullptr)) {
    fail("attention: positions, q and out are needed");
  }
}

}  // namespace

struct AttentionJob::Impl {
  const Kernels* kernels = &active_kernels();
  const bool integers = integers_wanted();
  Operation op;
  std::vector<std::unique_ptr<RopeTable>> tables;  // one per distinct set of angles met, kept for the next operations
  struct LayerMeans {
    std::weak_ptr<const Codec> codec;  // another may have its address later
    std::vector<HeadMean> heads;
  };
  std::unordered_map<const Codec*, LayerMeans> means;  // kept while the codec lives

  std::int64_t n_blocks = 0, block_tokens = 0;
  std::int64_t n_splits = 0, interleaved = 1, run_cells = 0;  // a run of so many cells is `interleaved` splits
  int piece_heads = 0;                                        // KV heads of a piece
  std::vector<HeadQueries> queries;                           // [n_head_kv] of an only block
  std::atomic<int> next_queries{0}, loaded_queries{0};
  std::atomic<std::int64_t> next{0}, next_merge{0};
  std::vector<std::atomic<std::int64_t>> unfinished;  // [n_blocks * n_head_kv / piece_heads] splits left
  std::vector<BlockState> partial;                    // [the same][n_splits][piece_heads], only if n_splits > 1

  struct Thread {
    BlockWorker worker;
    std::vector<BlockState> states;  // [piece_heads]
  };
  std::vector<std::unique_ptr<Thread>> threads;

  const RopeTable* rope_table(const Rope& rope) {
    for (const auto& table : tables) {
      if (table->same_angles(rope.theta())) return table.get();
    }
    tables.push_back(std::make_unique<RopeTable>(rope.theta()));
    return tables.back().get();
  }

  void describe(const AttentionArgs& args) {
    const LayerSpec& spec = args.cache->layers()[static_cast<std::size_t>(args.layer_index)];
    op.args = args;
    ++op.serial;
    op.kernels = kernels;
    op.k_codec = spec.k.get();
    op.v_codec = spec.v.get();
    op.n_head_kv = spec.n_head_kv;
    op.group = args.n_head / spec.n_head_kv;
    op.k_dim = spec.k_dim;
    op.v_dim = spec.v_dim;
    op.k_ld = round_up(spec.k_dim, kLane);
    op.v_ld = round_up(spec.v_dim, kPanel);
    op.integer =
        integers && op.k_codec != nullptr && op.k_codec->code_form(0) != nullptr && op.v_codec->code_form(0) != nullptr;
    op.bases = op.integer ? op.v_codec->code_form(0)->bases : 1;
    op.code_ld = op.integer ? 4 * value_lanes(spec.v_dim) : op.v_ld;
    op.means = (op.k_codec == nullptr) ? nullptr : means_of(spec);
  }

  const HeadMean* means_of(const LayerSpec& spec) {
    const auto known = means.find(spec.k.get());
    if (known != means.end() && known->second.codec.lock() == spec.k) return known->second.heads.data();
    std::erase_if(means, [](const auto& entry) { return entry.second.codec.expired(); });
    LayerMeans made{spec.k, {}};
    for (int h = 0; h < spec.n_head_kv; ++h) {
      const KeyMean mean = spec.k->key_mean(h);
      made.heads.emplace_back(mean, mean.pre_rope.empty() ? nullptr : rope_table(*mean.rope), spec.k_dim);
    }
    return means.insert_or_assign(spec.k.get(), std::move(made)).first->second.heads.data();
  }

  void cut() {
    const AttentionArgs& args = op.args;
    const std::int64_t most = std::clamp(kBlockRows / op.group, 1, kBlockTokens);
    n_blocks = (args.n_tokens + most - 1) / most;
    block_tokens = (n_blocks == 0) ? 0 : (args.n_tokens + n_blocks - 1) / n_blocks;
    const bool shared = n_blocks == 1 && block_tokens * op.group <= kSharedRows && args.n_kv >= kSharedCells;
    piece_heads = shared ? op.n_head_kv : 1;
    const std::int64_t groups = n_groups();
    const std::int64_t tiles = (args.n_kv + kTile - 1) / kTile;
    const std::int64_t wanted = std::max(args.n_kv / kSplitCells, std::min(tiles, kLeastSplits));
    n_splits = (groups == 0) ? 1 : std::max<std::int64_t>(std::min({wanted, kMaxSplits, kPieces / groups}), 1);
    interleaved = (n_splits < op.bases) ? 1 : op.bases;
    n_splits -= n_splits % interleaved;
    const std::int64_t runs = n_splits / interleaved;
    run_cells = std::max<std::int64_t>((tiles + runs - 1) / runs, 1) * kTile;

    if (static_cast<std::int64_t>(unfinished.size()) < groups) {
      unfinished = std::vector<std::atomic<std::int64_t>>(static_cast<std::size_t>(groups));
    }
    for (std::int64_t i = 0; i < groups; ++i)
      unfinished[static_cast<std::size_t>(i)].store(n_splits, std::memory_order_relaxed);
    if (n_splits > 1 && static_cast<std::int64_t>(partial.size()) < groups * n_splits * piece_heads) {
      partial.resize(static_cast<std::size_t>(groups * n_splits * piece_heads));
    }
    // A shorter context may have no coded row: then queries for those, which cost most, are not needed.
    const bool share_queries = n_blocks == 1 && args.n_kv > kSplitCells;
    if (share_queries && queries.size() < static_cast<std::size_t>(op.n_head_kv)) {
      queries.resize(static_cast<std::size_t>(op.n_head_kv));
    }
    op.queries = share_queries ? queries.data() : nullptr;
    next_queries.store(0, std::memory_order_relaxed);
    loaded_queries.store(0, std::memory_order_relaxed);
    next.store(0, std::memory_order_relaxed);
    next_merge.store(0, std::memory_order_relaxed);
  }

  TokenBlock token_block(std::int64_t block) const {
    const std::int64_t first = block * block_tokens;
    return make_token_block(op.args, first, static_cast<int>(std::min(block_tokens, op.args.n_tokens - first)));
  }

  // Each KV head's by the thread that comes first. Pieces wait for all: those that are missing are being loaded.
  void load_queries() {
    for (;;) {
      const int h = next_queries.fetch_add(1, std::memory_order_relaxed);
      if (h >= op.n_head_kv) break;
      HeadQueries& head = op.queries[h];
      head.load(op, h, token_block(0));
      if (op.k_codec != nullptr) head.load_code(op);
      loaded_queries.fetch_add(1, std::memory_order_release);
    }
    wait_until([&] { return loaded_queries.load(std::memory_order_acquire) == op.n_head_kv; });
  }

  void run_piece(std::int64_t piece, Thread& thread) {
    const std::int64_t head_groups = op.n_head_kv / piece_heads;
    const std::int64_t split = piece % n_splits;
    const std::int64_t head_group = piece / n_splits % head_groups;
    // Later tokens see more: their blocks go first, so that no long piece starts last.
    const std::int64_t block = n_blocks - 1 - piece / n_splits / head_groups;
    const int first_head = static_cast<int>(head_group) * piece_heads;
    const TokenBlock tokens = token_block(block);
    if (tokens.count <= 0) return;
    const std::int64_t begin = split / interleaved * run_cells;
    const std::int64_t end = std::min(begin + run_cells, op.args.n_kv);
    const auto group = static_cast<std::size_t>(block * head_groups + head_group);
    const auto heads = static_cast<std::size_t>(piece_heads);
    if (thread.states.size() < heads) thread.states.resize(heads);
    BlockState* first = (n_splits > 1) ? &partial[group * static_cast<std::size_t>(n_splits) * heads] : thread.states.data();
    thread.worker.run(op, first_head, piece_heads, tokens, begin + split % interleaved * kTile, end, interleaved * kTile,
                      first + split * piece_heads);
    if (n_splits == 1) {
      for (int h = 0; h < piece_heads; ++h) {
        for (int r = 0; r < tokens.count * op.group; ++r) thread.worker.finish(op, first_head + h, tokens, r, first + h, 1, 1);
      }
    } else {
      unfinished[group].fetch_sub(1, std::memory_order_release);
    }
  }

  // Merges the splits of one query row, in split order. Threads that found no piece left come here: the pieces that it waits
  // for are running.
  void merge(std::int64_t task, Thread& thread) {
    const auto r = static_cast<int>(task % block_rows());
    const std::int64_t h = task / block_rows() % piece_heads;
    const auto group = static_cast<std::size_t>(task / block_rows() / piece_heads);
    wait_until([&] { return unfinished[group].load(std::memory_order_acquire) == 0; });
    const std::int64_t head_groups = op.n_head_kv / piece_heads;
    const TokenBlock tokens = token_block(static_cast<std::int64_t>(group) / head_groups);
    if (r >= tokens.count * op.group) return;  // the last block may be smaller
    const std::int64_t head = static_cast<std::int64_t>(group) % head_groups * piece_heads + h;
    const BlockState* first = &partial[group * static_cast<std::size_t>(n_splits * piece_heads)] + h;
    thread.worker.finish(op, static_cast<int>(head), tokens, r, first, n_splits, piece_heads);
  }

  [[nodiscard]] std::int64_t block_rows() const { return block_tokens * op.group; }
  [[nodiscard]] std::int64_t n_groups() const { return (n_blocks == 0) ? 0 : n_blocks * op.n_head_kv / piece_heads; }

  void run(Thread& thread) {
    if (op.queries != nullptr) load_queries();
    for (;;) {
      const std::int64_t piece = next.fetch_add(1, std::memory_order_relaxed);
      if (piece >= n_groups() * n_splits) break;
      run_piece(piece, thread);
    }
    if (n_splits == 1) return;
    for (;;) {
      const std::int64_t task = next_merge.fetch_add(1, std::memory_order_relaxed);
      if (task >= n_groups() * piece_heads * block_rows()) return;
      merge(task, thread);
    }
  }
};

AttentionJob::AttentionJob() : impl_(std::make_unique<Impl>()) {}
AttentionJob::~AttentionJob() = default;

void AttentionJob::prepare(const AttentionArgs& args, int n_threads) {
  check(args);
  Impl& impl = *impl_;
  impl.describe(args);
  impl.cut();
  while (static_cast<int>(impl.threads.size()) < n_threads) impl.threads.push_back(std::make_unique<Impl::Thread>());
}

void AttentionJob::run(int thread) {
  Impl& impl = *impl_;
  std::unique_ptr<Impl::Thread> guest;  // more threads than announced
  Impl::Thread* own = nullptr;
  if (thread >= 0 && static_cast<std::size_t>(thread) < impl.threads.size()) {
    own = impl.threads[static_cast<std::size_t>(thread)].get();
  } else {
    guest = std::make_unique<Impl::Thread>();
    own = guest.get();
  }
  impl.run(*own);
}

}  // namespace oscar
