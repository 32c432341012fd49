// AttentionJob against attention_reference: shapes, masks, tiers, threads, instruction sets.
#include <gtest/gtest.h>

#include <cstring>

#include "oscar/base/error.h"
#include "world.h"

namespace oscar {
namespace {

using test::CpuPath;
using test::Mean;
using test::Queries;
using test::Shape;
using test::World;
using test::worst_row_error;

constexpr double kTolerance = 2e-5;
// Integer arithmetic: queries and weights of 8 bits. Measured on these worlds: up to .038, the worst of some hundred rows.
constexpr double kIntegerTolerance = 5e-2;

// The last n_tokens positions of a sequence of n rows, written last as one batch.
std::vector<std::int32_t> last_positions(std::int32_t n, std::int32_t n_tokens) {
  std::vector<std::int32_t> positions;
  for (std::int32_t t = 0; t < n_tokens; ++t) positions.push_back(std::max(0, n - n_tokens + t));
  return positions;
}

void fill(World& world, std::int64_t first_cell, std::int32_t n, std::int32_t n_tokens) {
  const std::int32_t before = std::max(0, n - n_tokens);
  world.append(first_cell, 0, before, 16);
  world.append(first_cell, before, n, n_tokens);
}

void expect_close(Queries& queries, const Shape& shape, const std::string& what) {
  const std::vector<float> want = queries.reference();
  for (const std::string_view path : cpu_paths()) {
    const CpuPath forced(path);
    if (shape.spectral) {
      EXPECT_LE(worst_row_error(queries.job(), want, shape.v_dim), kIntegerTolerance) << what << ", integer, " << path;
    }
    const test::Environment exact("OSCAR_ARITHMETIC", "float");
    EXPECT_LE(worst_row_error(queries.job(), want, shape.v_dim), kTolerance) << what << ", " << path;
  }
}

Shape spectral_shape() {
  Shape shape;
  shape.spectral = true;
  return shape;
}

TEST(AttentionJob, LengthsAroundTileBoundaries) {
  for (const std::int32_t n : {1, 2, 63, 64, 65, 127, 319, 320, 321, 1000}) {
    for (const std::int32_t n_tokens : {1, 2, 33, 70}) {
      for (const Shape& shape : {Shape(), spectral_shape()}) {
        World world(shape, n + 13);
        fill(world, 5, n, n_tokens);
        Queries queries(world, last_positions(n, n_tokens), 5, n);
        expect_close(queries, shape, "n " + std::to_string(n) + ", tokens " + std::to_string(n_tokens));
        EXPECT_EQ(world.cache().counters().window_misses, 0U);
      }
    }
  }
}

// D8
TEST(AttentionJob, D8HeadGroupsAndSizes) {
  struct Case {
    int n_head_kv, group, k_dim, v_dim, n_rot;
    RopePairing pairing;
  };
  for (const Case& c : {Case{3, 1, 64, 64, 0, RopePairing::neox}, Case{1, 3, 80, 80, 32, RopePairing::neox},
                        Case{2, 5, 96, 96, 0, RopePairing::norm}, Case{2, 7, 128, 128, 0, RopePairing::neox},
                        Case{1, 16, 128, 64, 64, RopePairing::norm}, Case{1, 32, 64, 64, 0, RopePairing::neox},
                        Case{1, 6, 192, 128, 64, RopePairing::norm}, Case{1, 4, 256, 256, 0, RopePairing::neox},
                        Case{1, 2, 112, 112, 0, RopePairing::neox}, Case{4, 3, 36, 20, 12, RopePairing::norm}}) {
    for (const std::int32_t n_tokens : {1, 3, 40}) {
      Shape shape;
      shape.n_head_kv = c.n_head_kv;
      shape.group = c.group;
      shape.k_dim = c.k_dim;
      shape.v_dim = c.v_dim;
      shape.n_rot = c.n_rot;
      shape.pairing = c.pairing;
      for (const bool spectral : {false, true}) {
        shape.spectral = spectral;
        if (spectral && (c.k_dim % 16 != 0 || c.v_dim % 16 != 0)) continue;
        World world(shape, 200);
        fill(world, 0, 150, n_tokens);
        Queries queries(world, last_positions(150, n_tokens), 0, 150, 1);
        expect_close(queries, shape,
                     "group " + std::to_string(c.group) + ", k_dim " + std::to_string(c.k_dim) + ", v_dim " +
                         std::to_string(c.v_dim) + ", tokens " + std::to_string(n_tokens));
      }
    }
  }
}

TEST(AttentionJob, EveryKindOfMean) {
  for (const Mean mean : {Mean::none, Mean::fixed, Mean::rope}) {
    for (const bool spectral : {false, true}) {
      Shape shape;
      shape.mean = mean;
      shape.spectral = spectral;
      World world(shape, 400);
      fill(world, 0, 333, 20);
      Queries queries(world, last_positions(333, 20), 0, 333);
      expect_close(queries, shape, "mean " + std::to_string(static_cast<int>(mean)));
    }
  }
}

// The other side of kIntegerTolerance: integers must really have been used.
TEST(AttentionJob, IntegerArithmeticDiffersFromFloat) {
  const Shape shape = spectral_shape();
  World world(shape, 400);
  fill(world, 0, 333, 20);
  Queries queries(world, last_positions(333, 20), 0, 333);
  const std::vector<float> integer = queries.job();
  const test::Environment exact("OSCAR_ARITHMETIC", "float");
  EXPECT_GT(worst_row_error(integer, queries.job(), shape.v_dim), 5e-4);
}

TEST(AttentionJob, AnUnknownArithmeticIsRefused) {
  const test::Environment wrong("OSCAR_ARITHMETIC", "bfloat");
  EXPECT_THROW(AttentionJob(), Error);
}

TEST(AttentionJob, ExactModeKeepsEveryRow) {
  Shape shape;
  shape.coded = false;
  World world(shape, 400);
  fill(world, 0, 333, 20);
  ASSERT_TRUE(world.cache().has_exact(150));
  Queries queries(world, last_positions(333, 20), 0, 333);
  expect_close(queries, shape, "exact");
}

// The other side of the bounds above: coded rows must really have been read, and only where they should be.
TEST(AttentionJob, CodedAndExactResultsDiffer) {
  Shape shape;
  Shape exact = shape;
  exact.windows = {8, 100000, 0};
  World coded_world(shape, 400, 7);
  World exact_world(exact, 400, 7);
  fill(coded_world, 0, 333, 1);
  fill(exact_world, 0, 333, 1);
  Queries coded(coded_world, {332}, 0, 333);
  Queries full(exact_world, {332}, 0, 333);
  const double difference = worst_row_error(coded.job(), full.job(), shape.v_dim);
  EXPECT_GT(difference, 0.02);
  EXPECT_LT(difference, 3.0);

  Queries young(coded_world, {39}, 0, 40);  // all of it inside the window: the last 40 and 8 sinks
  Queries young_full(exact_world, {39}, 0, 40);
  EXPECT_TRUE(coded_world.cache().has_exact(5));
  EXPECT_FALSE(coded_world.cache().has_exact(20)) << "position 20 left the window of the newest token long ago";
  const double misses = worst_row_error(young.job(), young_full.job(), shape.v_dim);
  EXPECT_GT(misses, 1e-3) << "rows whose exact copy is gone are read from the code";
  // 40 - 8 rows wanted exact, none of them there any more.
  EXPECT_EQ(coded_world.cache().counters().window_misses, 32U);
}

TEST(AttentionJob, AWindowMissIsCountedOncePerCellAndQuery) {
  Shape shape;
  shape.n_head_kv = 3;
  World world(shape, 400);
  world.append(0, 0, 300, 1);
  // Rolled back further than `rollback` allows: positions 160 .. 199 are wanted exact by a query at 199.
  for (const int layer : {0, 1}) {
    Queries queries(world, {199, 199}, 0, 200, layer);
    expect_close(queries, shape, "misses");
  }
  const auto paths = static_cast<std::uint64_t>(cpu_paths().size());
  EXPECT_EQ(world.cache().counters().window_misses, 2U * 40U * paths);
}

// One block of queries reads the same rows exact and coded, depending on the query.
TEST(AttentionJob, WindowBoundaryInsideABlock) {
  for (Shape shape : {Shape(), spectral_shape()}) {
    shape.windows = {3, 10, 200};
    World world(shape, 300);
    world.append(0, 0, 150, 1);
    std::vector<std::int32_t> positions;
    for (std::int32_t p = 149; p >= 0; p -= 4) positions.push_back(p);
    Queries queries(world, positions, 0, 150);
    expect_close(queries, shape, "boundary");
    EXPECT_EQ(world.cache().counters().window_misses, 0U);
  }
}

TEST(AttentionJob, BitIdenticalForAnyNumberOfThreads) {
  for (const std::int32_t n_tokens : {1, 2, 33, 70}) {
    for (const Shape& shape : {Shape(), spectral_shape()}) {
      World world(shape, 1400);
      fill(world, 0, 1301, n_tokens);
      Queries queries(world, last_positions(1301, n_tokens), 0, 1301);
      const std::vector<float> want = queries.reference();
      for (const std::string_view path : cpu_paths()) {
        const CpuPath forced(path);
        const std::vector<float> one = queries.job(1);
        EXPECT_LE(worst_row_error(one, want, shape.v_dim), shape.spectral ? kIntegerTolerance : kTolerance) << n_tokens;
        for (const int threads : {2, 5}) {
          for (int repeat = 0; repeat < 2; ++repeat)
            EXPECT_EQ(queries.job(threads), one) << threads << " threads, " << n_tokens << " tokens";
        }
      }
    }
  }
}

TEST(AttentionJob, MoreThreadsThanAnnounced) {
  const Shape shape;
  World world(shape, 700);
  fill(world, 0, 650, 1);
  Queries queries(world, {649}, 0, 650);
  std::vector<float> out(static_cast<std::size_t>(queries.args.out_token_stride));
  AttentionArgs args = queries.args;
  args.out = out.data();
  AttentionJob job;
  job.prepare(args, 0);
  std::thread other([&job] { job.run(7); });
  job.run(3);
  other.join();
  const std::vector<float> want = queries.job(1);
  for (int d = 0; d < shape.v_dim; ++d) EXPECT_EQ(out[static_cast<std::size_t>(d)], want[static_cast<std::size_t>(d)]);
}

// A host keeps one job for all operations: nothing of a larger or differently shaped one may shine through.
TEST(AttentionJob, OneJobServesDifferentShapes) {
  AttentionJob job;
  std::vector<std::unique_ptr<World>> worlds;
  for (const int dim : {128, 36, 64, 100, 64}) {
    Shape shape;
    shape.k_dim = dim;
    shape.v_dim = 164 - dim;
    shape.mean = (worlds.size() % 2 == 0) ? Mean::rope : Mean::none;
    shape.group = static_cast<int>(worlds.size()) + 1;
    worlds.push_back(std::make_unique<World>(shape, 700));
    World& world = *worlds.back();
    const std::int32_t n_tokens = 70 - 15 * shape.group;
    fill(world, 0, 650, n_tokens);
    Queries queries(world, last_positions(650, n_tokens), 0, 650);
    EXPECT_EQ(queries.job(job, 2), queries.job(1)) << dim;
  }
}

// Means belong to a codec: not to the address of one that is gone, nor to the codec of the last operation.
TEST(AttentionJob, OneJobServesCodecsThatComeAndGo) {
  AttentionJob job;
  const Shape shape;
  World lasting(shape, 600);
  fill(lasting, 0, 550, 1);
  for (unsigned seed = 2; seed < 8; ++seed) {
    World world(shape, 600, seed);
    fill(world, 0, 550, 1);
    for (World* of : {&world, &lasting}) {
      for (const int layer : {0, 1, 0}) {
        Queries queries(*of, {549}, 0, 550, layer);
        EXPECT_EQ(queries.job(job, 2), queries.job(1)) << seed;
      }
    }
  }
}

TEST(AttentionJob, SinksSoftcapAndSlopes) {
  for (int kind = 1; kind < 8; ++kind) {
    const Shape shape;
    World world(shape, 300);
    fill(world, 0, 222, 9);
    Queries queries(world, last_positions(222, 9), 0, 222);
    if ((kind & 1) != 0) queries.set_sinks({-3.0F, 0.0F, 4.0F, 30.0F, -100.0F, 1.0F});
    if ((kind & 2) != 0) queries.args.softcap = 4.0F;
    if ((kind & 4) != 0) {
      queries.set_slopes({0.5F, 0.25F, 0.125F, 0.0625F, 0.0F, 1.0F});
      queries.hide_all();
      for (int t = 0; t < 9; ++t) {
        for (int j = 0; j <= 213 + t; ++j) queries.show(t, j, static_cast<float>(j - 213 - t));
      }
    }
    expect_close(queries, shape, "kind " + std::to_string(kind));
  }
}

// D5, D14: two sequences share a stream cell by cell, with holes; every query sees its own.
class TwoSequences : public ::testing::TestWithParam<bool> {};
INSTANTIATE_TEST_SUITE_P(Codecs, TwoSequences, ::testing::Bool());

TEST_P(TwoSequences, D5D14MaskWithHoles) {
  Shape shape;
  shape.spectral = GetParam();
  World world(shape, 700);
  std::vector<std::int64_t> cells;
  std::vector<std::int32_t> owner, position;
  std::int32_t next[2] = {0, 3000};  // the second starts late: its first 3000 positions were removed
  for (std::int64_t cell = 20; cell < 620; ++cell) {
    if (cell % 7 == 3 || (cell > 300 && cell < 400)) continue;  // holes
    const int seq = (cell / 5 % 2 == 0 || cell % 11 == 0) ? 0 : 1;
    world.write({cell}, {next[seq]}, seq);
    cells.push_back(cell);
    owner.push_back(seq);
    position.push_back(next[seq]++);
  }
  const std::vector<std::int32_t> positions = {next[0] - 1, next[1] - 1, next[0] - 30, next[1] - 30, next[0] - 1};
  Queries queries(world, positions, 20, 600);
  queries.hide_all();
  for (std::size_t i = 0; i < cells.size(); ++i) {
    for (int t = 0; t < 4; ++t) {
      if (owner[i] == t % 2 && position[i] <= positions[static_cast<std::size_t>(t)]) queries.show(t, cells[i] - 20);
    }
  }  // token 4 sees nothing
  expect_close(queries, shape, "two sequences");
  const std::vector<float> out = queries.job(2);
  for (std::size_t i = out.size() / 5 * 4; i < out.size(); ++i) EXPECT_EQ(out[i], 0.0F);
  EXPECT_NE(out[0], 0.0F);
}

TEST(AttentionJob, FullyMaskedTokensAreZeroEvenWithSinks) {
  const Shape shape;
  World world(shape, 100);
  fill(world, 0, 80, 40);
  Queries queries(world, last_positions(80, 40), 0, 80);
  queries.hide_all();
  queries.set_sinks(std::vector<float>(6, 0.5F));
  queries.show(3, 60);
  const std::vector<float> out = queries.job();
  const std::size_t token = 6U * static_cast<std::size_t>(shape.v_dim);
  for (std::size_t i = 0; i < out.size(); ++i) EXPECT_EQ(out[i] != 0.0F, i / token == 3) << i;
  expect_close(queries, shape, "masked");

  Queries nothing(world, {5, 6}, 0, 0);  // no columns at all
  EXPECT_EQ(nothing.job(2), std::vector<float>(2 * token, 0.0F));
}

// D6: what a masked cell holds does not matter.
TEST(AttentionJob, D6MaskedCellsMayHoldNaN) {
  Shape shape;
  shape.windows = {4, 30, 4};
  World clean(shape, 300, 5);
  World dirty(shape, 300, 5);
  for (World* world : {&clean, &dirty}) fill(*world, 0, 200, 3);
  const std::vector<std::int64_t> poisoned = {0, 1, 63, 64, 120, 190, 199};
  for (const std::int64_t cell : poisoned) {
    for (const bool is_k : {true, false}) {
      // All bits set: scales and offsets of a code are NaN, and so are values of an exact row.
      const std::span<const std::uint8_t> code = dirty.cache().code(0, is_k, cell);
      std::memset(const_cast<std::uint8_t*>(code.data()), 0xFF, code.size());
      const std::span<const std::uint16_t> row = dirty.cache().exact(0, is_k, cell);
      std::fill_n(const_cast<std::uint16_t*>(row.data()), row.size(), std::uint16_t{0xFFFF});
    }
  }
  // The poison works: a query that sees it is lost.
  Queries seeing(dirty, {199}, 0, 200);
  EXPECT_TRUE(std::isnan(seeing.job()[0]));
  for (const std::int32_t n_tokens : {1, 3, 30}) {
    Queries a(clean, last_positions(200, n_tokens), 0, 200);
    Queries b(dirty, last_positions(200, n_tokens), 0, 200);
    b.args.q = a.args.q;
    for (Queries* queries : {&a, &b}) {
      queries->hide_all();
      for (int t = 0; t < n_tokens; ++t) {
        for (std::int64_t j = 0; j <= 200 - n_tokens + t; ++j) {
          if (std::find(poisoned.begin(), poisoned.end(), j) == poisoned.end()) queries->show(t, j);
        }
      }
    }
    for (const std::string_view path : cpu_paths()) {
      const CpuPath forced(path);
      const std::vector<float> out = a.job();
      EXPECT_EQ(b.job(), out) << n_tokens << " tokens, " << path;
      EXPECT_LE(worst_row_error(out, b.reference(), shape.v_dim), kTolerance);
    }
  }
}

TEST(AttentionJob, ANaNThatIsSeenIsNotHidden) {
  Shape shape;
  shape.windows = {4, 30, 4};
  World world(shape, 200);
  fill(world, 0, 150, 1);
  for (const std::int64_t cell : {2, 60, 149}) {
    const std::span<const std::uint8_t> code = world.cache().code(0, true, cell);
    std::memset(const_cast<std::uint8_t*>(code.data()), 0xFF, code.size());
    const std::span<const std::uint16_t> row = world.cache().exact(0, true, cell);
    std::fill_n(const_cast<std::uint16_t*>(row.data()), row.size(), std::uint16_t{0xFFFF});
    for (const bool alone : {true, false}) {
      Queries queries(world, {149, 149}, 0, 150);
      queries.hide_all();
      queries.show(0, cell);
      for (const std::int64_t other : {5, 70, 80}) {
        if (!alone) queries.show(0, other);
        queries.show(1, other);
      }
      for (const std::string_view path : cpu_paths()) {
        const CpuPath forced(path);
        const std::vector<float> out = queries.job();
        for (std::size_t i = 0; i < out.size(); ++i) EXPECT_EQ(std::isnan(out[i]), i < out.size() / 2) << cell << " " << path;
      }
    }
  }
}

TEST(AttentionJob, EmptyCellsAreSkippedEvenIfTheMaskShowsThem) {
  const Shape shape;
  World world(shape, 200);
  fill(world, 0, 100, 2);
  world.cache().seq_rm(0, 30, 60);
  ASSERT_EQ(world.cache().position(40), -1);
  Queries shown(world, {98, 99}, 0, 130);
  shown.hide_all();
  for (int t = 0; t < 2; ++t) {
    for (int j = 0; j < 130; ++j) {
      if (j <= 98 + t || j >= 100) shown.show(t, j);  // the hole and cells never written, too
    }
  }
  expect_close(shown, shape, "empty cells");
  Queries causal(world, {98, 99}, 0, 130);
  causal.args.q = shown.args.q;
  EXPECT_EQ(causal.job(), shown.job());
}

// Rows from a stock program's state: 16 bit for ever, position unknown.
TEST(AttentionJob, ImportedRowsWithoutACode) {
  const Shape shape;
  World world(shape, 300);
  fill(world, 0, 200, 1);
  for (std::int64_t cell = 200; cell < 220; ++cell) {
    for (int layer = 0; layer < 2; ++layer) {
      for (const bool is_k : {true, false}) {
        const std::vector<float> row = is_k ? world.key_row(7) : world.value_row();
        std::vector<std::uint16_t> half;
        for (const float x : row) half.push_back(float_to_half(x));
        world.cache().import_row(layer, is_k, cell, half);
      }
    }
  }
  ASSERT_EQ(world.cache().position(210), -1);
  ASSERT_TRUE(world.cache().has_exact(210));
  ASSERT_FALSE(world.cache().has_code(210));
  Queries queries(world, {199}, 0, 240);
  queries.hide_all();
  for (int j = 0; j < 220; ++j) queries.show(0, j);
  expect_close(queries, shape, "imported");
  const std::vector<float> with = queries.job();
  Queries causal(world, {199}, 0, 240);
  causal.args.q = queries.args.q;
  EXPECT_GT(worst_row_error(causal.job(), with, shape.v_dim), 1e-3) << "without a mask, rows of unknown position are not seen";
}

TEST(AttentionJob, LargePositions) {
  for (const Shape& shape : {Shape(), spectral_shape()}) {
    World world(shape, 200);
    world.append(-1000000, 1000000, 1000150, 10);
    std::vector<std::int32_t> positions;
    for (std::int32_t p = 1000130; p < 1000150; ++p) positions.push_back(p);
    Queries queries(world, positions, 0, 150);
    expect_close(queries, shape, "positions around a million");
  }
}

TEST(AttentionJob, RefusesWhatDoesNotFit) {
  const Shape shape;
  World world(shape, 100);
  world.append(0, 0, 10, 1);
  Queries queries(world, {9}, 0, 10);
  std::vector<float> out(1000);
  queries.args.out = out.data();
  AttentionJob job;
  const auto refused = [&](auto change) {
    AttentionArgs args = queries.args;
    change(args);
    EXPECT_THROW(job.prepare(args, 1), Error);
  };
  EXPECT_NO_THROW(job.prepare(queries.args, 1));
  refused([](AttentionArgs& a) { a.cache = nullptr; });
  refused([](AttentionArgs& a) { a.layer_index = 2; });
  refused([](AttentionArgs& a) { a.n_head = 5; });
  refused([](AttentionArgs& a) { a.n_kv = 101; });
  refused([](AttentionArgs& a) { a.first_cell = 91; });
  refused([](AttentionArgs& a) { a.first_cell = -1; });
  refused([](AttentionArgs& a) { a.q = nullptr; });
}

}  // namespace
}  // namespace oscar
