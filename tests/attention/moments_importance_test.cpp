// Importance statistics in moments files and in merges of models.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "attention/attended_layer.h"
#include "io/scratch.h"
#include "method/same_importance.h"
#include "oscar/io/safetensors.h"

namespace oscar {
namespace {

using test::AttendedLayer;
using test::error_of;
using test::Scratch;
using testing::HasSubstr;

LayerShape shape() {
  LayerShape s = test::layer_shape(1, 4, 2, 16, RopePairing::neox);
  s.v_dim = 8;
  s.rope.n_rot = 12;
  return s;
}

// Moments of any rows, importance of an attended sequence. Layer 2 has a window and nothing else.
ModelMoments model(std::int64_t tokens, unsigned seed, bool importance = true) {
  test::Activations a(shape(), 200, 4);
  a.fill_normal(seed);
  const MomentCollector collector = test::collect(a, 64);
  ModelMoments m;
  m.model_fingerprint = "abc";
  m.architecture = "llama";
  m.model_name = "test";
  m.n_layer = 3;
  m.sources = {{"text", "00ff", 200}};
  LayerShape window = shape();
  window.layer = 2;
  window.sliding_window = true;
  m.shapes = {shape(), window};
  m.layers = {{collector.heads().begin(), collector.heads().end()}, {}};
  m.date = "2026-01-02";
  m.tool_version = "0.1.0";
  if (!importance) return m;
  AttendedLayer attended(shape(), tokens, seed);
  attended.attend();
  ImportanceCollector statistics(shape(), {4, 24, 100}, nullptr);
  attended.feed(statistics, 64);
  for (std::size_t h = 0; h < 2; ++h) m.layers[0][h].importance = statistics.heads()[h];
  return m;
}

TEST(MomentsImportance, RoundTripIsExact) {
  const Scratch scratch;
  for (const std::int64_t tokens : {180, 10}) {  // 10: collected, but no key was read as a code
    const ModelMoments saved = model(tokens, 1);
    save_moments(saved, scratch.path("a"));
    const ModelMoments loaded = load_moments(scratch.path("a"));
    ASSERT_EQ(loaded.layers.size(), 2U);
    for (std::size_t h = 0; h < 2; ++h) test::expect_identical(loaded.layers[0][h].importance, saved.layers[0][h].importance);
    EXPECT_EQ(loaded.layers[0][0].importance.tokens, std::max<std::int64_t>(0, tokens - 28));
    save_moments(loaded, scratch.path("b"));
    EXPECT_EQ(test::slurp(scratch.path("a")), test::slurp(scratch.path("b")));
  }
}

TEST(MomentsImportance, FilesOfBeforeItExistedAreRead) {
  const Scratch scratch;
  save_moments(model(180, 1, false), scratch.path("a"));
  EXPECT_EQ(test::slurp(scratch.path("a")).find("importance"), std::string::npos);
  const ModelMoments loaded = load_moments(scratch.path("a"));
  for (const HeadMoments& head : loaded.layers[0]) EXPECT_TRUE(head.importance.empty());
}

TEST(MomentsImportance, BrokenFilesAreRefusedByName) {
  const Scratch scratch;
  save_moments(model(180, 1), scratch.path("good"));
  const SafeTensors good = read_safetensors(scratch.path("good"));
  const auto error_after = [&](const std::function<void(SafeTensors&)>& change) {
    SafeTensors broken = good;
    change(broken);
    write_safetensors(broken, scratch.path("bad"));
    return error_of([&] { load_moments(scratch.path("bad")); });
  };
  for (const std::string name : {"metric", "joint", "pair_weight", "output_energy", "keys", "weights", "positions"}) {
    SCOPED_TRACE(name);
    const std::string tensor = "layers.1.importance." + name;
    EXPECT_THAT(error_after([&](SafeTensors& f) { f.tensors.erase(tensor); }), HasSubstr(tensor));
    EXPECT_THAT(error_after([&](SafeTensors& f) {
                  SafeTensor& t = f.tensors.at(tensor);
                  t.shape.insert(t.shape.begin(), 1);
                }),
                HasSubstr("layers.1.importance."));
    EXPECT_THAT(error_after([&](SafeTensors& f) {
                  SafeTensor& t = f.tensors.at(tensor);
                  t.shape.front() /= 2;
                  t.bytes.resize(t.bytes.size() / 2);
                }),
                HasSubstr("layers.1.importance."));
  }
  const auto with_first = [](const char* tensor, std::size_t bytes, std::byte value) {
    return [=](SafeTensors& f) { std::fill_n(f.tensors.at(tensor).bytes.begin(), bytes, value); };
  };
  EXPECT_THAT(error_after(with_first("layers.1.importance.metric", 8, std::byte{0xFF})), HasSubstr("importance.metric"));
  EXPECT_THAT(error_after(with_first("layers.1.importance.joint", 8, std::byte{0xFF})), HasSubstr("importance.joint"));
  EXPECT_THAT(error_after(with_first("layers.1.importance.keys", 2, std::byte{0xFF})), HasSubstr("importance.keys"));
  EXPECT_THAT(error_after(with_first("layers.1.importance.weights", 4, std::byte{0xFF})), HasSubstr("layer 1: a weight"));
  EXPECT_THAT(error_after(with_first("layers.1.importance.weights", 4, std::byte{0xBF})), HasSubstr("layer 1: a weight"));
  const auto edited = [](const std::string& from, const std::string& to) {
    return [from, to](SafeTensors& f) {
      std::string& text = f.metadata["oscar"];
      text.replace(text.find(from), from.size(), to);
    };
  };
  EXPECT_THAT(error_after(edited("\"importance_tokens\":152", "\"importance_tokens\":-1")), HasSubstr("importance_tokens"));
  EXPECT_THAT(error_after(edited("\"importance_tokens\"", "\"something_else\"")), HasSubstr("tensors"));
  EXPECT_THAT(error_after(edited("\"n_rot\":12", "\"n_rot\":2147483646")), HasSubstr("importance.joint"));
}

TEST(MomentsImportance, HeadsThatDoNotFitTogetherAreNotSaved) {
  const Scratch scratch;
  const auto refused = [&](const std::function<void(HeadImportance&)>& spoil) {
    ModelMoments m = model(180, 1);
    spoil(m.layers[0][1].importance);
    EXPECT_THAT(error_of([&] { save_moments(m, scratch.path("x")); }), HasSubstr("layer 1"));
    EXPECT_FALSE(std::filesystem::exists(scratch.path("x")));
  };
  refused([](HeadImportance& i) { i = {}; });
  refused([](HeadImportance& i) { i.sample_positions.pop_back(); });
  refused([](HeadImportance& i) { ++i.tokens; });
  refused([](HeadImportance& i) { i.joint = MatrixD::Zero(3, 3); });
}

TEST(MomentsImportance, MergesWithTheRest) {
  ModelMoments merged = model(180, 1);
  const ModelMoments second = model(120, 2);
  HeadImportance expected = merged.layers[0][1].importance;
  merge(expected, second.layers[0][1].importance);
  merge(merged, second);
  test::expect_identical(merged.layers[0][1].importance, expected);
  EXPECT_EQ(merged.layers[0][1].importance.tokens, 180 + 120 - 2 * 28);
}

// Half a calibration must not pass for a whole one.
TEST(MomentsImportance, IsDroppedWhereOneSideHasNone) {
  const ModelMoments with = model(180, 1);
  const ModelMoments without = model(180, 2, false);
  for (const bool swapped : {false, true}) {
    ModelMoments merged = swapped ? without : with;
    merge(merged, swapped ? with : without);
    for (const HeadMoments& head : merged.layers[0]) {
      EXPECT_TRUE(head.importance.empty());
      EXPECT_EQ(head.tokens, 2 * with.layers[0][0].tokens);
    }
  }
}

}  // namespace
}  // namespace oscar
