// The capture class on made-up events: what real models cannot be asked to produce.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <filesystem>
#include <limits>
#include <thread>
#include <vector>

#include "../../hosts/llama/capture.h"
#include "llama/harness.h"
#include "method/same_importance.h"
#include "oscar/base/half.h"

namespace oscar::testing {
namespace {

using llama::Capture;
using llama::CaptureEvent;
using llama::TensorView;

// One layer's operands for a batch of `n` tokens, laid out as llama.cpp does: Q token-major, cache rows scattered.
struct Batch {
  static constexpr int kHeads = 6, kHeadsKv = 3, kDim = 8;
  std::vector<float> q, out;
  std::vector<std::uint16_t> k_cache, v_cache;
  std::vector<std::int64_t> cells;
  std::vector<std::int32_t> positions;

  Batch(const std::vector<std::int32_t>& at, std::uint64_t seed) : positions(at) {
    std::uint64_t state = seed;
    const auto draw = [&state] {
      state = state * 6364136223846793005ULL + 1442695040888963407ULL;
      return static_cast<float>(static_cast<double>(state >> 40) / 8388608.0 - 1.0);
    };
    const std::size_t n = at.size();
    for (std::size_t i = 0; i < n * kHeads * kDim; ++i) {
      q.push_back(draw());
      out.push_back(draw());
    }
    for (std::size_t i = 0; i < 2 * n * kHeadsKv * kDim; ++i) {
      k_cache.push_back(float_to_half(draw()));
      v_cache.push_back(float_to_half(draw()));
    }
    for (std::size_t i = 0; i < n; ++i)
      cells.push_back(static_cast<std::int64_t>(2 * n - 1 - 2 * i));  // every second cell, backwards
  }

  [[nodiscard]] CaptureEvent event(int layer, std::int64_t last_visible = -1) const {
    const auto n = static_cast<std::int64_t>(positions.size());
    CaptureEvent e;
    e.layer = layer;
    e.n_head = kHeads;
    e.n_head_kv = kHeadsKv;
    e.k_dim = e.v_dim = kDim;
    e.n_tokens = n;
    e.q = {q.data(), {kDim, n, kHeads, 1}, {4, 4 * kDim * kHeads, 4 * kDim, 4 * kDim * kHeads * static_cast<std::size_t>(n)}};
    e.out = {
        out.data(), {kDim, kHeads, n, 1}, {4, 4 * kDim, 4 * kDim * kHeads, 4 * kDim * kHeads * static_cast<std::size_t>(n)}};
    e.k_cache = k_cache.data();
    e.v_cache = v_cache.data();
    e.cells = cells;
    e.positions = positions;
    e.rope.pairing = RopePairing::neox;
    e.rope.n_rot = kDim;
    e.last_visible = last_visible < 0 ? positions.back() + 1 : last_visible;
    return e;
  }
};

std::vector<std::int32_t> range(int begin, int end) {
  std::vector<std::int32_t> list;
  for (int i = begin; i < end; ++i) list.push_back(i);
  return list;
}

ModelMoments description() {
  ModelMoments m;
  m.model_fingerprint = "f";
  m.architecture = "a";
  m.model_name = "n";
  m.n_layer = 2;
  m.sources = {{"s", std::string(64, '0'), 1000}};
  return m;
}

void feed(Capture& capture, const CaptureEvent& event, int threads) {
  std::vector<std::thread> pool;
  for (int t = 0; t < threads; ++t)
    pool.emplace_back([&capture, &event, t, threads] { capture.on_attention(event, t, threads); });
  for (std::thread& thread : pool) thread.join();
}

ModelMoments saved(Capture& capture, const Scratch& scratch) {
  capture.save(scratch.file("moments"));
  return load_moments(scratch.file("moments"));
}

TEST(CaptureBlocks, B6AnyThreadCountAndCutGiveTheSameBytes) {
  const Scratch scratch;
  const Batch whole(range(0, 300), 1);
  std::optional<ModelMoments> base;
  for (const int threads : {1, 2, 3, 7, 64}) {
    Capture capture(description(), std::nullopt, {.pilot_tokens = 100});
    feed(capture, whole.event(0), threads);
    const ModelMoments moments = saved(capture, scratch);
    if (!base) base = moments;
    for (std::size_t h = 0; h < 3; ++h) {
      EXPECT_EQ(moments.layers[0][h].tokens, 296);
      EXPECT_EQ(moments.layers[0][h].q_moment, base->layers[0][h].q_moment);
      EXPECT_EQ(moments.layers[0][h].o_moment, base->layers[0][h].o_moment);
      EXPECT_EQ(moments.layers[0][h].sst_moment, base->layers[0][h].sst_moment);
      EXPECT_EQ(moments.layers[0][h].k_pre_sum, base->layers[0][h].k_pre_sum);
    }
  }
  // The same rows one token at a time.
  Capture capture(description(), std::nullopt, {.pilot_tokens = 100});
  for (std::size_t t = 0; t < 300; ++t) {
    CaptureEvent one = whole.event(0);
    one.n_tokens = 1;
    one.q.data = whole.q.data() + t * Batch::kHeads * Batch::kDim;
    one.out.data = whole.out.data() + t * Batch::kHeads * Batch::kDim;
    one.cells = one.cells.subspan(t, 1);
    one.positions = one.positions.subspan(t, 1);
    one.last_visible = static_cast<std::int64_t>(t) + 1;
    feed(capture, one, 2);
  }
  const ModelMoments moments = saved(capture, scratch);
  for (std::size_t h = 0; h < 3; ++h) {
    EXPECT_EQ(moments.layers[0][h].q_moment, base->layers[0][h].q_moment);
    EXPECT_EQ(moments.layers[0][h].sst_moment, base->layers[0][h].sst_moment);
  }
}

std::shared_ptr<const std::vector<float>> output_metric() {
  std::vector<float> values;
  for (int h = 0; h < Batch::kHeads; ++h) {
    for (int i = 0; i < Batch::kDim * Batch::kDim; ++i)
      values.push_back(i % (Batch::kDim + 1) == 0 ? static_cast<float>(1 + h) : 0.125F);
  }
  return std::make_shared<const std::vector<float>>(std::move(values));
}

// What the collector is told of an event: blocks that end at multiples of 64 tokens, and everything that shapes the logits.
TEST(CaptureBlocks, ImportanceIsTheCollectorsOfTheSameRows) {
  const Scratch scratch;
  const Batch batch(range(0, 400), 9);
  const std::vector<float> sinks(Batch::kHeads, 0.5F);
  CaptureEvent event = batch.event(0);
  event.scale = 0.7F;
  event.softcap = 2.0F;
  event.sinks = sinks.data();
  LayerShape shape;
  shape.n_head = Batch::kHeads;
  shape.n_head_kv = Batch::kHeadsKv;
  shape.k_dim = shape.v_dim = Batch::kDim;
  shape.rope = event.rope;
  for (const bool with_metric : {false, true}) {
    const auto metric = with_metric ? output_metric() : nullptr;
    ImportanceCollector expected(shape, {}, metric);
    for (std::int64_t first = 0; first < 400; first += 64) {
      ImportanceCollector::Block block;
      block.first = first;
      block.n = std::min<std::int64_t>(64, 400 - first);
      block.q = batch.q.data() + first * Batch::kHeads * Batch::kDim;
      block.o = batch.out.data() + first * Batch::kHeads * Batch::kDim;
      block.q_token = block.o_token = Batch::kHeads * Batch::kDim;
      block.q_head = block.o_head = Batch::kDim;
      block.k = batch.k_cache.data();
      block.v = batch.v_cache.data();
      block.cells = batch.cells.data();
      block.scale = 0.7F;
      block.softcap = 2.0F;
      block.sinks = sinks.data();
      expected.add(block, 0, Batch::kHeads);
    }
    expected.end_sequence();
    EXPECT_EQ(expected.heads()[0].tokens, 400 - 320);
    EXPECT_GT(expected.heads()[0].pair_weight, 0.0);
    for (const int threads : {1, 2, 5}) {
      Capture capture(description(), std::nullopt);
      if (metric) capture.set_output_metric(0, *metric);
      feed(capture, event, threads);
      const ModelMoments moments = saved(capture, scratch);
      for (std::size_t h = 0; h < 3; ++h) test::expect_identical(moments.layers[0][h].importance, expected.heads()[h]);
    }
  }
}

TEST(CaptureBlocks, ImportanceNeedsOneSequenceAfterTheOther) {
  const Scratch scratch;
  const Batch first(range(0, 350), 10);
  const Batch second(range(0, 340), 11);
  const Batch gap(range(500, 520), 12);
  Capture capture(description(), std::nullopt);
  capture.begin_sequence();
  feed(capture, first.event(0), 2);
  capture.begin_sequence();
  feed(capture, second.event(0), 2);
  ModelMoments moments = saved(capture, scratch);
  EXPECT_EQ(moments.layers[0][0].importance.tokens, 350 + 340 - 2 * 320);
  ::testing::internal::CaptureStderr();
  feed(capture, gap.event(0, 520), 2);
  moments = saved(capture, scratch);
  const std::string said = ::testing::internal::GetCapturedStderr();
  EXPECT_NE(said.find("only codec int2 can be fitted: tokens do not come as one sequence"), std::string::npos) << said;
  EXPECT_TRUE(moments.layers[0][0].importance.empty());  // half of the text would pass for all of it
  EXPECT_EQ(moments.layers[0][0].tokens, 350 + 340 + 20 - 2 * 4);

  CaptureEvent alibi = first.event(0);
  alibi.max_bias = 8.0F;
  Capture biased(description(), std::nullopt);
  ::testing::internal::CaptureStderr();
  feed(biased, alibi, 2);
  EXPECT_NE(::testing::internal::GetCapturedStderr().find("ALiBi"), std::string::npos);
  EXPECT_TRUE(saved(biased, scratch).layers[0][0].importance.empty());
}

TEST(CaptureBlocks, RowsAreReadThroughTheirStridesAndCells) {
  const Scratch scratch;
  const Batch batch(range(4, 10), 2);
  Capture capture(description(), std::nullopt);
  feed(capture, batch.event(0), 2);
  const ModelMoments moments = saved(capture, scratch);
  for (int h = 0; h < Batch::kHeadsKv; ++h) {
    VectorD k_sum = VectorD::Zero(Batch::kDim);
    double q_trace = 0;
    for (std::size_t t = 0; t < 6; ++t) {
      for (int d = 0; d < Batch::kDim; ++d) {
        k_sum[d] += static_cast<double>(
            half_to_float(batch.k_cache[static_cast<std::size_t>((batch.cells[t] * Batch::kHeadsKv + h) * Batch::kDim + d)]));
        for (int g = 0; g < 2; ++g) {
          const double q = static_cast<double>(
              batch.q[(t * Batch::kHeads + static_cast<std::size_t>(2 * h + g)) * Batch::kDim + static_cast<std::size_t>(d)]);
          q_trace += q * q;
        }
      }
    }
    const HeadMoments& head = moments.layers[0][static_cast<std::size_t>(h)];
    EXPECT_LT((head.k_sum - k_sum).norm(), 1e-12);
    EXPECT_NEAR(head.q_moment.trace(), q_trace, 1e-12 * q_trace);
  }
}

// B1: one NaN spoils one block of one layer; everything else is as without it.
TEST(CaptureBlocks, B1NanBlockIsLeftOutAndNamed) {
  const Scratch scratch;
  Batch batch(range(0, 192), 3);
  Capture sound(description(), std::nullopt);
  feed(sound, batch.event(0), 2);
  const Batch other(range(0, 192), 4);
  feed(sound, other.event(1), 2);
  EXPECT_EQ(sound.rejected(), 0U);
  EXPECT_EQ(sound.blocks(), 6U);

  batch.out[100 * Batch::kHeads * Batch::kDim + 7] =
      std::numeric_limits<float>::quiet_NaN();  // token 100: the second block of 64
  Capture spoiled(description(), std::nullopt);
  ::testing::internal::CaptureStderr();
  feed(spoiled, batch.event(0), 2);
  feed(spoiled, other.event(1), 2);
  const ModelMoments rest = saved(spoiled, scratch);
  const std::string errors = ::testing::internal::GetCapturedStderr();
  EXPECT_NE(errors.find("positions 64..127 of layer 0"), std::string::npos) << errors;
  EXPECT_NE(errors.find("1 of 6 blocks"), std::string::npos) << errors;
  EXPECT_EQ(spoiled.rejected(), 1U);
  const ModelMoments all = saved(sound, scratch);
  EXPECT_EQ(all.layers[0][0].tokens, 188);
  EXPECT_EQ(rest.layers[0][0].tokens, 188 - 64);
  EXPECT_EQ(rest.layers[1][0].k_moment, all.layers[1][0].k_moment);
  EXPECT_TRUE(rest.layers[0][0].o_moment.allFinite());
}

TEST(CaptureBlocks, WindowThatShowsLateDropsTheLayer) {
  const Scratch scratch;
  const Batch batch(range(0, 64), 5);
  const Batch later(range(64, 128), 6);
  Capture capture(description(), std::nullopt);
  for (const int layer : {0, 1}) feed(capture, batch.event(layer), 2);
  capture.save(scratch.file("early"));
  feed(capture, later.event(0), 2);
  feed(capture, later.event(1, 100), 2);  // 100 cells seen at position 127
  const ModelMoments moments = saved(capture, scratch);
  EXPECT_FALSE(moments.shapes[0].sliding_window);
  EXPECT_EQ(moments.layers[0][0].tokens, 124);
  EXPECT_TRUE(moments.shapes[1].sliding_window);
  EXPECT_TRUE(moments.layers[1].empty());
}

// Tokens of two sequences in one batch: two runs of positions, warm-up excluded in each.
TEST(CaptureBlocks, SequencesInOneBatch) {
  const Scratch scratch;
  std::vector<std::int32_t> positions = range(0, 40);
  for (const std::int32_t p : range(0, 50)) positions.push_back(p);
  const Batch batch(positions, 7);
  Capture capture(description(), std::nullopt);
  feed(capture, batch.event(0), 2);
  EXPECT_EQ(capture.blocks(), 2U);
  EXPECT_EQ(saved(capture, scratch).layers[0][0].tokens, 40 + 50 - 2 * 4);
}

TEST(CaptureBlocks, ChangedRopeIsRefused) {
  const Scratch scratch;
  const Batch batch(range(0, 64), 8);
  Capture capture(description(), std::nullopt);
  feed(capture, batch.event(0), 1);
  CaptureEvent changed = batch.event(0);
  changed.rope.base = 500.0F;
  feed(capture, changed, 2);
  EXPECT_THROW(capture.save(scratch.file("moments")), std::exception);
  EXPECT_FALSE(std::filesystem::exists(scratch.file("moments")));
}

}  // namespace
}  // namespace oscar::testing
