// describe_model(): geometry and fingerprint, on made-up files and on the four real models.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>

#include "io/gguf_builder.h"
#include "oscar/io/gguf.h"

namespace oscar {
namespace {

using test::error_of;
using test::GgufBuilder;
using test::Scratch;
using test::small_llama;
using testing::AllOf;
using testing::HasSubstr;

GgufModel model_of(const GgufBuilder& builder) {
  const Scratch scratch;
  return describe_model(Gguf(scratch.write("model.gguf", builder.bytes())));
}

GgufBuilder base(const std::string& arch, std::uint32_t layers, std::uint32_t width) {
  GgufBuilder builder;
  builder.text("general.architecture", arch).u32(arch + ".block_count", layers).u32(arch + ".embedding_length", width);
  return builder;
}

TEST(GgufModel, Geometry) {
  const GgufModel model = model_of(small_llama());
  EXPECT_EQ(model.architecture, "llama");
  EXPECT_EQ(model.name, "small");
  EXPECT_EQ(model.n_layer, 2);
  EXPECT_EQ(model.n_ctx_train, 512);
  EXPECT_EQ(model.n_embd, 64);
  ASSERT_EQ(model.layers.size(), 2U);
  EXPECT_EQ(model.layers[1], (LayerShape{1, 4, 2, 16, 16, false, {}}));
  EXPECT_EQ(model.fingerprint.size(), 64U);
}

TEST(GgufModel, A6HeadCountsAndExplicitHeadSize) {
  const auto errors = [](const GgufBuilder& builder) { return error_of([&] { model_of(builder); }); };
  EXPECT_THAT(errors(base("llama", 1, 64).u32("llama.attention.head_count", 0)), HasSubstr("head_count' of"));
  EXPECT_THAT(errors(base("llama", 1, 64)), HasSubstr("no 'llama.attention.head_count'"));
  EXPECT_THAT(errors(base("llama", 1, 64).u32("llama.attention.head_count", 4).u32("llama.attention.head_count_kv", 0)),
              HasSubstr("is 0"));
  EXPECT_THAT(errors(base("llama", 1, 64).u32("llama.attention.head_count", 4).u32("llama.attention.head_count_kv", 3)),
              HasSubstr("cannot be shared"));
  EXPECT_THAT(errors(base("llama", 1, 64).u32("llama.attention.head_count", 3)), HasSubstr("does not divide"));
  EXPECT_THAT(errors(base("llama", 1, 64).u32("llama.attention.head_count", 4).u32("llama.attention.key_length", 0)),
              HasSubstr("is 0"));
  EXPECT_THAT(errors(base("llama", 0, 64).u32("llama.attention.head_count", 4)), HasSubstr("block_count"));
  EXPECT_THAT(errors(base("llama", 0xFFFFFFFF, 64).u32("llama.attention.head_count", 4)), HasSubstr("block_count"));
  EXPECT_THAT(errors(GgufBuilder().u32("x", 1)), HasSubstr("general.architecture"));
  // Qwen3: 1024 / 16 would be 64, the file says 128.
  GgufBuilder qwen3 = base("qwen3", 2, 1024);
  qwen3.u32("qwen3.attention.head_count", 16).u32("qwen3.attention.head_count_kv", 8);
  qwen3.u32("qwen3.attention.key_length", 128).u32("qwen3.attention.value_length", 96);
  EXPECT_EQ(model_of(qwen3).layers.at(0), (LayerShape{0, 16, 8, 128, 96, false, {}}));
}

TEST(GgufModel, PerLayerHeadCountsOfHybridModels) {
  GgufBuilder builder = base("lfm2", 3, 64);
  builder.u32("lfm2.attention.head_count", 4).u32s("lfm2.attention.head_count_kv", {0, 2, 0});
  const GgufModel model = model_of(builder);
  ASSERT_EQ(model.layers.size(), 1U);
  EXPECT_EQ(model.layers[0], (LayerShape{1, 4, 2, 16, 16, false, {}}));
  EXPECT_EQ(model.n_layer, 3);
  GgufBuilder wrong = base("lfm2", 3, 64);
  wrong.u32("lfm2.attention.head_count", 4).u32s("lfm2.attention.head_count_kv", {2, 2});
  EXPECT_THAT(error_of([&] { model_of(wrong); }), HasSubstr("2 entries for 3 layers"));
  GgufBuilder none = base("lfm2", 2, 64);
  none.u32("lfm2.attention.head_count", 4).u32s("lfm2.attention.head_count_kv", {0, 0});
  EXPECT_THAT(error_of([&] { model_of(none); }), HasSubstr("no layer with attention"));
}

std::set<int> full_layers(const GgufModel& model) {
  std::set<int> full;
  for (const LayerShape& layer : model.layers) {
    if (!layer.sliding_window) full.insert(layer.layer);
  }
  return full;
}

TEST(GgufModel, SlidingWindowLayers) {
  const auto windowed = [](const std::string& arch) {
    GgufBuilder builder = base(arch, 8, 64);
    builder.u32(arch + ".attention.head_count", 4).u32(arch + ".attention.sliding_window", 512);
    return builder;
  };
  EXPECT_EQ(full_layers(model_of(windowed("gemma3"))), (std::set<int>{5}));
  EXPECT_EQ(full_layers(model_of(windowed("gemma3").u32("gemma3.attention.sliding_window_pattern", 4))), (std::set<int>{3, 7}));
  EXPECT_EQ(full_layers(model_of(windowed("other").flags("other.attention.sliding_window_pattern", {1, 1, 0, 1, 1, 0, 1, 1}))),
            (std::set<int>{2, 5}));
  EXPECT_EQ(full_layers(model_of(windowed("other"))).size(), 8U) << "without a pattern only the host knows";
  GgufBuilder off = base("gemma3", 8, 64);
  off.u32("gemma3.attention.head_count", 4).u32("gemma3.attention.sliding_window", 0);
  EXPECT_EQ(full_layers(model_of(off)).size(), 8U);
}

TEST(GgufModel, FingerprintFollowsWeightsNotQuantisation) {
  const std::string reference = model_of(small_llama()).fingerprint;
  const auto variant = [](float norm, std::uint32_t type, const std::string& weights, float base_frequency,
                          std::uint32_t heads_type) {
    GgufBuilder builder;
    builder.text("general.architecture", "llama").text("general.name", "another name").u32("llama.block_count", 2);
    builder.u32("general.file_type", 17).u32("llama.embedding_length", 64).u32("llama.context_length", 512);
    heads_type == 32 ? builder.u32("llama.attention.head_count", 4) : builder.u64("llama.attention.head_count", 4);
    builder.u32("llama.attention.head_count_kv", 2).f32("llama.rope.freq_base", base_frequency);
    builder.tensor("blk.0.attn_q.weight", {32, 2}, type, weights);
    builder.floats("blk.1.attn_norm.weight", {4, 5}).floats("blk.0.attn_norm.weight", {1, 2, norm});
    return model_of(builder).fingerprint;
  };
  EXPECT_EQ(variant(3, 8, std::string(68, '\x22'), 10000, 32), reference) << "other quantisation, order and name";
  EXPECT_EQ(variant(3, 1, std::string(128, '\x22'), 10000, 64), reference) << "F16 weights, wider integers";
  EXPECT_NE(variant(3.0000002F, 8, std::string(68, '\x22'), 10000, 32), reference) << "a norm changed: a fine-tune";
  EXPECT_NE(variant(3, 8, std::string(68, '\x22'), 500000, 32), reference) << "another RoPE";
}

struct RealModel {
  const char *name, *architecture;
  int layers, n_head, n_head_kv, dim;
  std::set<int> sliding;
};

// Where the test driver puts the models: OSCAR_TEST_MODEL_DIR, or "models" in OSCAR's cache folder.
std::filesystem::path model_folder() {
  if (const char* folder = std::getenv("OSCAR_TEST_MODEL_DIR")) return folder;
  if (const char* cache = std::getenv("OSCAR_CACHE_DIR")) return std::filesystem::path(cache) / "models";
  const char* home = std::getenv("HOME");
  return std::filesystem::path(home == nullptr ? "." : home) / ".cache" / "oscar" / "models";
}

class RealModels : public testing::TestWithParam<RealModel> {};

TEST_P(RealModels, AreDescribedAsPublished) {
  const RealModel& expected = GetParam();
  const GgufModel model = describe_model(Gguf(model_folder() / (std::string(expected.name) + ".gguf")));
  EXPECT_EQ(model.architecture, expected.architecture);
  ASSERT_EQ(model.layers.size(), static_cast<std::size_t>(expected.layers));
  for (const LayerShape& layer : model.layers) {
    EXPECT_EQ(layer.n_head, expected.n_head);
    EXPECT_EQ(layer.n_head_kv, expected.n_head_kv);
    EXPECT_EQ(layer.k_dim, expected.dim);
    EXPECT_EQ(layer.v_dim, expected.dim);
    EXPECT_EQ(layer.sliding_window, expected.sliding.contains(layer.layer)) << layer.layer;
  }
}

// Listed where the models are, at the latest after `make test` fetched them: a gigabyte is no unit test's to ask for.
std::vector<RealModel> real_models() {
  if (!std::filesystem::exists(model_folder())) return {};
  return {{"smollm2", "llama", 30, 9, 3, 64, {}},
          {"qwen0.5b", "qwen2", 24, 14, 2, 64, {}},
          {"qwen1.5b", "qwen2", 28, 12, 2, 128, {}},
          {"gemma270m", "gemma3", 18, 4, 1, 256, {0, 1, 2, 3, 4, 6, 7, 8, 9, 10, 12, 13, 14, 15, 16}}};
}

std::string model_name(const testing::TestParamInfo<RealModel>& model) {
  std::string name = model.param.name;
  name.erase(std::remove(name.begin(), name.end(), '.'), name.end());
  return name;
}

INSTANTIATE_TEST_SUITE_P(Gguf, RealModels, testing::ValuesIn(real_models()), model_name);
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(RealModels);

}  // namespace
}  // namespace oscar
