// The reference on pages against the reference on the two-tier cache: the same rows, stored once as cells and once as pages.
#include "oscar/paged/decode_reference.h"

#include <limits>

#include "int2_layer.h"
#include "oscar/attention/attention.h"
#include "oscar/base/half.h"
#include "spectral_layer.h"

namespace oscar::paged {
namespace {

using test::size_of;

constexpr int heads = 2;
constexpr int dim = 64;

// A layer of either codec.
struct Layer {
  LayerSpec spec;
  DecodeProblem problem;  // its tables
};

void agree_with_the_cache(const Layer& layer, int queries, float soft_cap) {
  const int group = 3;
  const int capacity = 500;
  const int sink = 16;
  const int recent = 40;
  const PageLayout& layout = key_tables(layer.problem).layout;
  std::mt19937 rng(4);
  std::normal_distribution<float> normal;
  const int ring = ring_blocks(recent + queries - 1);
  const int columns = sink / kBlockTokens + ring;
  const int page_columns = (capacity + kPageTokens - 1) / kPageTokens;
  for (const std::int32_t n : {1, 15, 16, 17, 56, 57, 58, 64, 65, 121, 200, 500}) {
    if (n < queries) continue;
    KvCache cache(capacity, {sink, recent, queries - 1}, {layer.spec});
    std::vector<std::int64_t> page_table(size_of(page_columns), -1);
    std::vector<std::int32_t> block_table(size_of(columns), -1);
    std::vector<std::uint8_t> pages(size_of(page_columns + 1) * layout.page_bytes, 0xFF);
    std::vector<std::uint16_t> blocks(size_of((columns + 1) * heads) * exact_head_values(dim), 0x7E00);
    for (int i = 0; i * kPageTokens < n; ++i) page_table[size_of(i)] = page_columns - i;  // backwards, and page 0 unused
    for (std::int32_t t = 0; t < n; ++t) {
      std::vector<float> k(size_of(heads * dim));
      std::vector<float> v(size_of(heads * dim));
      for (float& x : k) x = normal(rng);
      for (float& x : v) x = normal(rng);
      const std::vector<std::int64_t> cell = {t};
      const std::vector<std::int32_t> position = {t};
      const std::vector<SeqId> sequence = {0};
      cache.place(cell, position, sequence);
      cache.write_k(0, t, k);
      cache.write_v(0, t, v);
      std::uint8_t* page = pages.data() + static_cast<std::size_t>(page_table[size_of(t / kPageTokens)]) * layout.page_bytes;
      layout.store_rows(cache.code(0, true, t), cache.code(0, false, t), t, {page, layout.page_bytes});
      const int column = block_column(t, sink, ring);
      block_table[size_of(column)] = columns - column;
      for (int h = 0; h < heads; ++h) {
        std::uint16_t* head = blocks.data() + size_of((columns - column) * heads + h) * exact_head_values(dim);
        for (int d = 0; d < dim; ++d) {
          const std::uint32_t at = exact_index(dim, t % kBlockTokens, d);
          head[at] = cache.exact(0, true, t)[size_of(h * dim + d)];
          head[size_of(kBlockTokens * dim) + at] = cache.exact(0, false, t)[size_of(h * dim + d)];
        }
      }
    }

    const int n_head = heads * group;
    std::vector<std::uint16_t> q(size_of(queries * n_head * dim));
    std::vector<float> q_float(q.size());
    std::vector<float> sinks(size_of(n_head));
    for (std::size_t i = 0; i < q.size(); ++i) {
      q[i] = float_to_half(normal(rng));
      q_float[i] = half_to_float(q[i]);
    }
    for (float& s : sinks) s = normal(rng);
    std::vector<float> want(q.size());
    AttentionArgs args;
    args.cache = &cache;
    args.n_kv = capacity;
    args.n_head = n_head;
    args.n_tokens = queries;
    std::vector<std::int32_t> positions;
    for (int query = 0; query < queries; ++query) positions.push_back(seen_by(n, query, queries) - 1);
    args.positions = positions.data();
    args.q = q_float.data();
    args.q_head_stride = args.out_head_stride = dim;
    args.q_token_stride = args.out_token_stride = n_head * dim;
    args.softcap = soft_cap;
    args.out = want.data();
    args.scale = 0.125F;
    args.sinks = sinks.data();
    attention_reference(args);

    DecodeProblem problem = layer.problem;
    problem.batch = 1;
    problem.group = group;
    problem.sink = sink;
    problem.recent = recent;
    problem.queries = queries;
    problem.scale = 0.125F;
    problem.soft_cap = soft_cap;
    problem.q = q.data();
    problem.lengths = &n;
    problem.pages = pages.data();
    problem.page_table = page_table.data();
    problem.page_columns = page_columns;
    problem.blocks = blocks.data();
    problem.block_table = block_table.data();
    problem.ring = ring;
    problem.sinks = sinks.data();
    double difference = 0;
    double norm = 0;
    for (int r = 0; r < queries * n_head; ++r) {
      const DecodeRow row = decode_reference(problem, 0, r % n_head, r / n_head);
      for (int d = 0; d < dim; ++d) {
        const double w = want[size_of(r * dim + d)];
        difference += std::pow(row.out[size_of(d)] - w, 2);
        norm += w * w;
      }
    }
    // The cache's reference decodes rows to binary32 and back through T^-1; both sides of the bound say that it really was
    // compared.
    const double error = std::sqrt(difference / norm);
    EXPECT_LT(error, 2e-5) << n << " tokens";
    EXPECT_GT(error, 1e-9) << n << " tokens";
  }
}

LayerSpec layer_spec(const Rope& rope, std::unique_ptr<Codec> k, std::unique_ptr<Codec> v) {
  LayerSpec spec;
  spec.n_head_kv = heads;
  spec.k_dim = spec.v_dim = dim;
  spec.rope = rope;
  spec.k = std::move(k);
  spec.v = std::move(v);
  return spec;
}
void agree_with_the_cache(int queries, float soft_cap) {
  const test::SpectralLayer config = test::spectral_layer(heads, dim, 21);
  const SpectralTables tables = spectral_tables(config.keys, config.values);
  Layer layer;
  layer.spec = layer_spec(config.keys.rope, make_spectral_key_codec(config.keys), make_spectral_value_codec(config.values));
  layer.problem.tables = &tables;
  agree_with_the_cache(layer, queries, soft_cap);
}

TEST(DecodeReference, AgreesWithTheCacheOnTheSameRows) { agree_with_the_cache(1, 0.0F); }
TEST(DecodeReference, OfSeveralQueriesAgreesWithTheCache) { agree_with_the_cache(3, 0.0F); }
TEST(DecodeReference, WithSoftCapAgreesWithTheCache) { agree_with_the_cache(2, 1.5F); }

TEST(DecodeReference, OfInt2AgreesWithTheCache) {
  for (const test::Int2Means means : {test::Int2Means::none, test::Int2Means::constant, test::Int2Means::pre_rope}) {
    const test::Int2Layer config = test::int2_layer(heads, dim, 5, means);
    const Int2Tables tables = int2_tables(config.keys, config.values);
    Layer layer;
    layer.spec =
        layer_spec(test::rope_of(RopePairing::neox, dim, dim), make_int2_codec(config.keys), make_int2_codec(config.values));
    layer.problem.int2_tables = &tables;
    agree_with_the_cache(layer, 2, 0.0F);
  }
}

TEST(DecodeReference, NothingVisibleGivesZeros) {
  const test::SpectralLayer config = test::spectral_layer(1, 64, 2);
  const SpectralTables tables = spectral_tables(config.keys, config.values);
  const std::vector<std::uint16_t> q(64, 0x3C00);
  const std::int32_t n = 0;
  DecodeProblem problem;
  problem.tables = &tables;
  problem.batch = 1;
  problem.q = q.data();
  problem.lengths = &n;
  const DecodeRow row = decode_reference(problem, 0, 0);
  EXPECT_EQ(row.out, std::vector<double>(64, 0.0));
  EXPECT_EQ(row.lse, -std::numeric_limits<double>::infinity());
}

}  // namespace
}  // namespace oscar::paged
