#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "method/synthetic_layer.h"
#include "oscar/base/error.h"
#include "oscar/io/safetensors.h"

namespace oscar {
namespace {

using test::Activations;
using test::collect;
using test::layer_shape;

class TemporaryFile {
 public:
  explicit TemporaryFile(const std::string& name)
      : path_(std::filesystem::temp_directory_path() / fmt::format("oscar-{}-{}", getpid(), name)) {}
  ~TemporaryFile() {
    std::error_code ignored;
    std::filesystem::remove(path_, ignored);
  }
  TemporaryFile(const TemporaryFile&) = delete;
  TemporaryFile& operator=(const TemporaryFile&) = delete;
  [[nodiscard]] std::string path() const { return path_.string(); }

 private:
  std::filesystem::path path_;
};

ModelMoments model_of(const Activations& a, std::int64_t begin, std::int64_t n, const std::string& source) {
  MomentCollector collector(a.shape, {});
  collector.add(a.block(begin, n), 0, a.shape.n_head_kv);
  collector.finish();
  LayerShape window = a.shape;
  window.layer = 2;
  window.sliding_window = true;
  ModelMoments m;
  m.model_fingerprint = "abc";
  m.architecture = "llama";
  m.model_name = "test";
  m.n_layer = 3;
  m.sources = {{source, "00ff", n}};
  m.shapes = {a.shape, window};
  m.layers = {{collector.heads().begin(), collector.heads().end()}, {}};
  m.date = "2026-01-02";
  m.tool_version = "0.1.0";
  return m;
}

void expect_equal(const ModelMoments& a, const ModelMoments& b) {
  EXPECT_EQ(a.model_fingerprint, b.model_fingerprint);
  EXPECT_EQ(a.architecture, b.architecture);
  EXPECT_EQ(a.model_name, b.model_name);
  EXPECT_EQ(a.n_layer, b.n_layer);
  EXPECT_EQ(a.date, b.date);
  EXPECT_EQ(a.tool_version, b.tool_version);
  EXPECT_EQ(a.shapes, b.shapes);
  ASSERT_EQ(a.sources.size(), b.sources.size());
  for (std::size_t i = 0; i < a.sources.size(); ++i) {
    EXPECT_EQ(a.sources[i].name, b.sources[i].name);
    EXPECT_EQ(a.sources[i].sha256, b.sources[i].sha256);
    EXPECT_EQ(a.sources[i].tokens, b.sources[i].tokens);
  }
  ASSERT_EQ(a.layers.size(), b.layers.size());
  for (std::size_t i = 0; i < a.layers.size(); ++i) {
    ASSERT_EQ(a.layers[i].size(), b.layers[i].size());
    for (std::size_t h = 0; h < a.layers[i].size(); ++h) {
      const HeadMoments& x = a.layers[i][h];
      const HeadMoments& y = b.layers[i][h];
      EXPECT_EQ(x.q_moment, y.q_moment);
      EXPECT_EQ(x.k_moment, y.k_moment);
      EXPECT_EQ(x.v_moment, y.v_moment);
      EXPECT_EQ(x.o_moment, y.o_moment);
      EXPECT_EQ(x.sst_moment, y.sst_moment);
      EXPECT_EQ(x.k_sum, y.k_sum);
      EXPECT_EQ(x.k_pre_sum, y.k_pre_sum);
      EXPECT_EQ(x.v_sum, y.v_sum);
      EXPECT_EQ(x.sst_weight, y.sst_weight);
      EXPECT_EQ(x.tokens, y.tokens);
      EXPECT_EQ(x.queries, y.queries);
      EXPECT_EQ(x.k_samples, y.k_samples);
      EXPECT_EQ(x.v_samples, y.v_samples);
      EXPECT_EQ(x.sample_positions, y.sample_positions);
    }
  }
}

Activations activations() {
  LayerShape shape = layer_shape(1, 4, 2, 16);
  shape.v_dim = 8;
  shape.rope.freq_factors.assign(8, 1.5F);
  Activations a(shape, 600, 4);
  a.fill_normal(1);
  return a;
}

TEST(MomentsFile, RoundTripIsExact) {
  const TemporaryFile file("moments.safetensors");
  const Activations a = activations();
  const ModelMoments saved = model_of(a, 0, 600, "book");
  save_moments(saved, file.path());
  expect_equal(load_moments(file.path()), saved);
}

TEST(MomentsFile, BrokenFilesAreRefused) {
  const TemporaryFile file("moments-broken.safetensors");
  save_moments(model_of(activations(), 0, 600, "book"), file.path());
  SafeTensors good = read_safetensors(file.path());
  const auto refused = [&](auto change, const std::string& word) {
    SafeTensors broken = good;
    change(broken);
    write_safetensors(broken, file.path());
    try {
      load_moments(file.path());
      ADD_FAILURE() << "accepted, expected a complaint about " << word;
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find(word), std::string::npos) << error.what();
    }
  };
  refused([](SafeTensors& f) { f.tensors.erase("layers.1.v_sum"); }, "layers.1.v_sum");
  refused([](SafeTensors& f) { f.tensors["layers.1.q_moment"].shape = {2, 256}; }, "layers.1.q_moment");
  refused([](SafeTensors& f) { f.tensors["layers.9.extra"] = f.tensors["layers.1.v_sum"]; }, "tensors");
  refused([](SafeTensors& f) { std::fill_n(f.tensors["layers.1.k_sum"].bytes.begin(), 8, std::byte{0xFF}); }, "NaN");
  refused([](SafeTensors& f) { f.metadata.clear(); }, "not a moments file");
  refused([](SafeTensors& f) { f.metadata["oscar"] = "{\"format\": \"oscar-artifact\"}"; }, "oscar-artifact");
  const auto edited = [&](const std::string& from, const std::string& to) {
    return [from, to](SafeTensors& f) {
      std::string& text = f.metadata["oscar"];
      text.replace(text.find(from), from.size(), to);
    };
  };
  refused(edited("\"format_version\":1", "\"format_version\":2"), "version 2");
  refused(edited("\"n_head_kv\":2", "\"n_head_kv\":2000000000"), "impossible geometry");
  refused(edited("\"queries\":1200", "\"queries\":1201"), "1201");
}

TEST(MomentsMerge, B6HalvesGiveTheWhole) {
  const Activations a = activations();
  const ModelMoments whole = model_of(a, 0, 600, "book");
  ModelMoments merged = model_of(a, 0, 320, "first");
  const ModelMoments second = model_of(a, 320, 280, "second");
  const MatrixD sst = merged.layers[0][0].sst_moment + second.layers[0][0].sst_moment;
  merge(merged, second);
  const HeadMoments& x = merged.layers[0][0];
  const HeadMoments& y = whole.layers[0][0];
  // One rounding per entry and block: sums agree to a few units in the last place of the largest entry.
  const auto close = [](const auto& p, const auto& q) {
    return (p - q).cwiseAbs().maxCoeff() <= 1e-13 * q.cwiseAbs().maxCoeff();
  };
  EXPECT_TRUE(close(x.q_moment, y.q_moment));
  EXPECT_TRUE(close(x.k_moment, y.k_moment));
  EXPECT_TRUE(close(x.v_moment, y.v_moment));
  EXPECT_TRUE(close(x.o_moment, y.o_moment));
  EXPECT_TRUE(close(x.v_sum, y.v_sum));
  EXPECT_LT((x.k_pre_sum - y.k_pre_sum).norm(), 1e-10);
  EXPECT_EQ(x.sst_moment, sst);  // each half weighs by its own pilot's covariance
  EXPECT_EQ(x.tokens, 600);
  EXPECT_EQ(x.queries, 1200);
  ASSERT_EQ(merged.sources.size(), 2U);
  EXPECT_EQ(merged.sources[1].name, "second");
}

TEST(MomentsMerge, SamplesStandForEqualNumbersOfTokens) {
  const Activations a = activations();
  ModelMoments merged = model_of(a, 0, 400, "first");  // 400 samples of 400 tokens
  merge(merged, model_of(a, 400, 200, "second"));
  const HeadMoments& head = merged.layers[0][0];
  const auto from_second =
      std::count_if(head.sample_positions.begin(), head.sample_positions.end(), [](int p) { return p >= 404; });
  EXPECT_NEAR(static_cast<double>(head.sample_positions.size()), 400.0, 2.0);
  EXPECT_NEAR(static_cast<double>(from_second), 133.0, 2.0);
  EXPECT_EQ(head.k_samples.rows(), static_cast<Eigen::Index>(head.sample_positions.size()));
  EXPECT_EQ(head.v_samples.rows(), head.k_samples.rows());
  for (std::size_t i = 0; i < head.sample_positions.size(); ++i) {
    const std::int64_t token = head.sample_positions[i] - 4;
    EXPECT_EQ(head.k_samples(static_cast<Eigen::Index>(i), 2),
              half_to_float(float_to_half(a.k[static_cast<std::size_t>(token * 2 * 16 + 2)])));
  }
}

TEST(MomentsMerge, RefusesOtherModels) {
  const Activations a = activations();
  ModelMoments first = model_of(a, 0, 64, "x");
  ModelMoments other = first;
  other.model_fingerprint = "def";
  EXPECT_THROW(merge(first, other), Error);
  other = first;
  other.shapes[0].rope.base = 5e5F;
  EXPECT_THROW(merge(first, other), Error);
  other = first;
  other.layers[0].clear();
  EXPECT_THROW(merge(first, other), Error);
  EXPECT_EQ(first.layers[0][0].tokens, 64);
}

}  // namespace
}  // namespace oscar
