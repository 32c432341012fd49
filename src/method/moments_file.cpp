// Moments file: safetensors, per layer N with statistics (Hk = n_head_kv)
//   layers.N.q_moment, k_moment [Hk, D, D]  v_moment, o_moment, sst_moment [Hk, Dv, Dv]           F64, sums, not means
//   layers.N.k_sum, k_pre_sum [Hk, D]  layers.N.v_sum [Hk, Dv]  layers.N.sst_weight [Hk]          F64
//   layers.N.k_samples [Hk, n, D]  layers.N.v_samples [Hk, n, Dv]  F16 (lossless: rows were rounded when sampled)
//   layers.N.sample_positions [n] I32
// and, where importance was collected (importance.h; E = D + n_rot + 1), for `m` samples
//   layers.N.importance.metric [Hk, D, D]  layers.N.importance.joint [Hk, E, E]  layers.N.importance.pair_weight, output_energy
//   [Hk]   F64 layers.N.importance.keys [Hk, m, D] F16  layers.N.importance.weights [Hk, m] F32  layers.N.importance.positions
//   [m] I32
// `__metadata__` "oscar": JSON text with format "oscar-moments", format_version, model, sources, layers, counts, date, tool.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <filesystem>

#include "oscar/base/error.h"
#include "oscar/base/half.h"
#include "oscar/io/json.h"
#include "oscar/io/safetensors.h"
#include "oscar/method/moments.h"
#include "oscar/method/moments_json.h"

namespace oscar {
namespace {

constexpr const char* kFormat = "oscar-moments";
constexpr int kVersion = 1;
using Heads = std::vector<HeadMoments>;

// One entry per tensor of a layer's head; `visit(name, member, rows, cols)` is the single place that knows names and shapes.
// rows 0: a vector.
template <class Head, class Visit>
void for_each_sum(Head& head, const LayerShape& s, Visit visit) {
  visit("q_moment", head.q_moment, s.k_dim, s.k_dim);
  visit("k_moment", head.k_moment, s.k_dim, s.k_dim);
  visit("v_moment", head.v_moment, s.v_dim, s.v_dim);
  visit("o_moment", head.o_moment, s.v_dim, s.v_dim);
  visit("sst_moment", head.sst_moment, s.v_dim, s.v_dim);
  visit("k_sum", head.k_sum, 0, s.k_dim);
  visit("k_pre_sum", head.k_pre_sum, 0, s.k_dim);
  visit("v_sum", head.v_sum, 0, s.v_dim);
}

std::string tensor_name(int layer, std::string_view name) { return fmt::format("layers.{}.{}", layer, name); }

template <class T>
void give(const ByteSink& sink, const T* values, std::size_t count) {
  sink(std::as_bytes(std::span(values, count)));
}

void give_halves(const ByteSink& sink, const MatrixF& rows) {
  std::vector<std::uint16_t> halves(static_cast<std::size_t>(rows.size()));
  std::transform(rows.data(), rows.data() + rows.size(), halves.begin(), float_to_half);
  give(sink, halves.data(), halves.size());
}

Eigen::Index joint_size(const LayerShape& shape) {
  const Eigen::Index turned = shape.rope.pairing == RopePairing::none ? 0 : shape.rope.n_rot;
  return shape.k_dim + turned + 1;
}

// Tensors of a layer, written head after head straight from `heads`, which must stay.
class LayerTensors {
 public:
  LayerTensors(const LayerShape& shape, const Heads& heads, std::vector<TensorSource>& out)
      : shape_(shape), heads_(heads), n_heads_(static_cast<std::int64_t>(heads.size())), out_(out) {}

  void moments() {
    const auto& positions = heads_.front().sample_positions;
    const auto n = static_cast<std::int64_t>(positions.size());
    for (const HeadMoments& head : heads_) {
      if (head.sample_positions != positions || head.tokens != heads_.front().tokens ||
          head.queries != heads_.front().queries) {
        fail("layer {}: its heads saw different tokens, so its moments cannot be saved", shape_.layer);
      }
      for_each_sum(head, shape_, [&](const char* name, const auto& member, int rows, int cols) {
        if (member.size() != static_cast<Eigen::Index>(std::max(rows, 1)) * cols) {
          fail("layer {}: its {} does not have the layer's shape", shape_.layer, name);
        }
      });
    }
    for_each_sum(heads_.front(), shape_, [&](const char* name, const auto& first, int rows, int cols) {
      using Member = std::remove_cvref_t<decltype(first)>;
      const auto shape =
          rows == 0 ? std::vector<std::int64_t>{n_heads_, cols} : std::vector<std::int64_t>{n_heads_, rows, cols};
      add(name, "F64", shape, [name, this_shape = &shape_](const ByteSink& sink, const HeadMoments& head) {
        for_each_sum(head, *this_shape, [&](const char* other, const auto& member, int, int) {
          if constexpr (std::is_same_v<std::remove_cvref_t<decltype(member)>, Member>) {
            if (std::string_view(other) == name) give(sink, member.data(), static_cast<std::size_t>(member.size()));
          }
        });
      });
    });
    add("sst_weight", "F64", {n_heads_},
        [](const ByteSink& sink, const HeadMoments& head) { give(sink, &head.sst_weight, 1); });
    add("k_samples", "F16", {n_heads_, n, shape_.k_dim},
        [](const ByteSink& sink, const HeadMoments& head) { give_halves(sink, head.k_samples); });
    add("v_samples", "F16", {n_heads_, n, shape_.v_dim},
        [](const ByteSink& sink, const HeadMoments& head) { give_halves(sink, head.v_samples); });
    add_once("sample_positions", positions);
  }

  void importance() {
    const HeadImportance& first = heads_.front().importance;
    const auto n = static_cast<std::int64_t>(first.sample_positions.size());
    const Eigen::Index joint = joint_size(shape_);
    for (const HeadMoments& head : heads_) {
      const HeadImportance& i = head.importance;
      if (i.metric.rows() != shape_.k_dim || i.joint.rows() != joint || i.sample_positions != first.sample_positions ||
          i.tokens != first.tokens) {
        fail("layer {}: the importance of its heads does not fit together, so it cannot be saved", shape_.layer);
      }
    }
    const auto matrix = [](MatrixD HeadImportance::*member) {
      return [member](const ByteSink& sink, const HeadMoments& head) {
        const MatrixD& m = head.importance.*member;
        give(sink, m.data(), static_cast<std::size_t>(m.size()));
      };
    };
    add("importance.metric", "F64", {n_heads_, shape_.k_dim, shape_.k_dim}, matrix(&HeadImportance::metric));
    add("importance.joint", "F64", {n_heads_, joint, joint}, matrix(&HeadImportance::joint));
    add("importance.pair_weight", "F64", {n_heads_},
        [](const ByteSink& sink, const HeadMoments& head) { give(sink, &head.importance.pair_weight, 1); });
    add("importance.output_energy", "F64", {n_heads_},
        [](const ByteSink& sink, const HeadMoments& head) { give(sink, &head.importance.output_energy, 1); });
    add("importance.keys", "F16", {n_heads_, n, shape_.k_dim}, [](const ByteSink& sink, const HeadMoments& head) {
      give(sink, head.importance.sample_keys.data(), head.importance.sample_keys.size());
    });
    add("importance.weights", "F32", {n_heads_, n}, [](const ByteSink& sink, const HeadMoments& head) {
      give(sink, head.importance.sample_weights.data(), head.importance.sample_weights.size());
    });
    add_once("importance.positions", first.sample_positions);
  }

 private:
  using WriteHead = std::function<void(const ByteSink&, const HeadMoments&)>;
  void add(std::string_view name, const char* dtype, std::vector<std::int64_t> shape, WriteHead write) {
    out_.push_back({tensor_name(shape_.layer, name), dtype, std::move(shape),
                    [heads = &heads_, write = std::move(write)](const ByteSink& sink) {
                      for (const HeadMoments& head : *heads) write(sink, head);
                    }});
  }
  void add_once(std::string_view name, const std::vector<std::int32_t>& values) {
    out_.push_back(
        {tensor_name(shape_.layer, name), "I32", {static_cast<std::int64_t>(values.size())}, [&values](const ByteSink& sink) {
           give(sink, values.data(), values.size());
         }});
  }

  const LayerShape& shape_;
  const Heads& heads_;
  std::int64_t n_heads_;
  std::vector<TensorSource>& out_;
};

// Tensors of a file under their expected dtype and shape; every one must be asked for in the end.
class Reader {
 public:
  explicit Reader(const std::string& path) : path_(path), file_(read_safetensors(path)), count_(file_.tensors.size()) {}

  const std::string& metadata() const {
    const auto found = file_.metadata.find("oscar");
    if (found == file_.metadata.end()) fail("'{}' is not a moments file: it has no 'oscar' metadata", path_);
    return found->second;
  }

  // first: false when the tensor was asked for before.
  const SafeTensor& tensor(const std::string& name, const char* dtype, const std::vector<std::int64_t>& shape,
                           bool first = true) {
    const auto found = file_.tensors.find(name);
    if (found == file_.tensors.end()) fail("'{}' has no tensor '{}'", path_, name);
    if (found->second.dtype != dtype || found->second.shape != shape) {
      fail("tensor '{}' of '{}' has the wrong dtype ({}, expected {}) or shape", name, path_, found->second.dtype, dtype);
    }
    used_ += first ? 1U : 0U;
    return found->second;
  }

  std::vector<double> doubles(const std::string& name, const std::vector<std::int64_t>& shape) {
    std::vector<double> values = to_doubles(tensor(name, "F64", shape), name);
    for (const double value : values) {
      if (!std::isfinite(value)) fail("tensor '{}' of '{}' contains NaN or infinite values", name, path_);
    }
    return values;
  }

  std::vector<float> halves(const std::string& name, const std::vector<std::int64_t>& shape) {
    std::vector<float> values = to_floats(tensor(name, "F16", shape), name);
    for (const float value : values) {
      if (!std::isfinite(value)) fail("tensor '{}' of '{}' contains NaN or infinite values", name, path_);
    }
    return values;
  }

  std::int64_t samples(const std::string& name) const {
    const auto found = file_.tensors.find(name);
    if (found == file_.tensors.end() || found->second.shape.size() != 1) fail("'{}' has no list '{}'", path_, name);
    return found->second.shape[0];
  }

  // What has been read of a layer is not needed any more.
  void forget(int layer) {
    const std::string prefix = tensor_name(layer, "");
    std::erase_if(file_.tensors, [&](const auto& entry) { return entry.first.starts_with(prefix); });
  }

  void require_all_used() const {
    if (used_ != count_) fail("'{}' has {} tensors, but {} belong there", path_, count_, used_);
  }

 private:
  std::string path_;
  SafeTensors file_;
  std::size_t count_, used_ = 0;
};

void load_importance(const LayerShape& shape, std::int64_t tokens, Reader& reader, Heads& heads) {
  const std::int64_t n_heads = shape.n_head_kv;
  const Eigen::Index joint = joint_size(shape);
  const auto named = [&](std::string_view name) { return tensor_name(shape.layer, fmt::format("importance.{}", name)); };
  const std::vector<double> metrics = reader.doubles(named("metric"), {n_heads, shape.k_dim, shape.k_dim});
  const std::vector<double> joints = reader.doubles(named("joint"), {n_heads, joint, joint});
  const std::vector<double> pair_weights = reader.doubles(named("pair_weight"), {n_heads});
  const std::vector<double> output_energies = reader.doubles(named("output_energy"), {n_heads});
  const std::int64_t n = reader.samples(named("positions"));
  std::vector<std::int32_t> positions(static_cast<std::size_t>(n));
  const SafeTensor& packed = reader.tensor(named("positions"), "I32", {n});
  if (n > 0) std::memcpy(positions.data(), packed.bytes.data(), packed.bytes.size());
  reader.halves(named("keys"), {n_heads, n, shape.k_dim});  // refuses what is not finite
  const SafeTensor& keys = reader.tensor(named("keys"), "F16", {n_heads, n, shape.k_dim}, false);
  const std::vector<float> weights = to_floats(reader.tensor(named("weights"), "F32", {n_heads, n}), named("weights"));
  for (const float w : weights) {
    if (!(w >= 0.0F) || !std::isfinite(w)) fail("layer {}: a weight of its importance is negative or not finite", shape.layer);
  }
  const auto row = static_cast<std::size_t>(n * shape.k_dim);
  for (std::size_t h = 0; h < heads.size(); ++h) {
    HeadImportance& i = heads[h].importance;
    i.metric = Eigen::Map<const MatrixD>(metrics.data() + h * static_cast<std::size_t>(shape.k_dim * shape.k_dim), shape.k_dim,
                                         shape.k_dim);
    i.joint = Eigen::Map<const MatrixD>(joints.data() + h * static_cast<std::size_t>(joint * joint), joint, joint);
    i.pair_weight = pair_weights[h];
    i.output_energy = output_energies[h];
    i.tokens = tokens;
    i.sample_positions = positions;
    i.sample_keys.resize(row);
    if (row > 0) std::memcpy(i.sample_keys.data(), keys.bytes.data() + 2 * h * row, 2 * row);
    i.sample_weights.assign(weights.begin() + static_cast<std::ptrdiff_t>(h) * n,
                            weights.begin() + static_cast<std::ptrdiff_t>(h + 1) * n);
  }
}

Heads load_layer(const LayerShape& shape, const nlohmann::json& counts, const std::string& what, Reader& reader) {
  const std::int64_t n_heads = shape.n_head_kv;
  const auto named = [&](std::string_view name) { return tensor_name(shape.layer, name); };
  const std::int64_t tokens = json_integer(counts, "tokens", what, 0);
  const std::int64_t queries = json_integer(counts, "queries", what, 0);
  const std::int64_t group = shape.n_head / shape.n_head_kv;
  if (queries % group != 0 || queries / group != tokens) fail("{} counts {} queries of {} tokens", what, queries, tokens);

  // The file's own size has capped this shape, so only now may the number of heads decide how much is allocated.
  const std::vector<double> weights = reader.doubles(named("sst_weight"), {n_heads});
  Heads heads(static_cast<std::size_t>(n_heads));
  for_each_sum(heads.front(), shape, [&](const char* name, auto& first, int rows, int cols) {
    using Member = std::remove_reference_t<decltype(first)>;
    const auto shape_of = rows == 0 ? std::vector<std::int64_t>{n_heads, cols} : std::vector<std::int64_t>{n_heads, rows, cols};
    const std::vector<double> values = reader.doubles(named(name), shape_of);
    const double* from = values.data();
    for (HeadMoments& head : heads) {
      for_each_sum(head, shape, [&](const char* other, auto& member, int, int) {
        if constexpr (std::is_same_v<std::remove_reference_t<decltype(member)>, Member>) {
          if (std::string_view(other) != name) return;
          member.resize(std::max(rows, 1), cols);
          std::memcpy(member.data(), from, static_cast<std::size_t>(member.size()) * sizeof(double));
          from += member.size();
        }
      });
    }
  });

  const std::int64_t n = reader.samples(named("sample_positions"));
  const SafeTensor& packed = reader.tensor(named("sample_positions"), "I32", {n});
  std::vector<std::int32_t> positions(static_cast<std::size_t>(n));
  if (n > 0) std::memcpy(positions.data(), packed.bytes.data(), packed.bytes.size());
  const std::vector<float> k = reader.halves(named("k_samples"), {n_heads, n, shape.k_dim});
  const std::vector<float> v = reader.halves(named("v_samples"), {n_heads, n, shape.v_dim});
  for (std::size_t h = 0; h < heads.size(); ++h) {
    HeadMoments& head = heads[h];
    head.tokens = tokens;
    head.queries = queries;
    head.sst_weight = weights[h];
    head.sample_positions = positions;
    head.k_samples = Eigen::Map<const MatrixF>(k.data() + h * static_cast<std::size_t>(n * shape.k_dim), n, shape.k_dim);
    head.v_samples = Eigen::Map<const MatrixF>(v.data() + h * static_cast<std::size_t>(n * shape.v_dim), n, shape.v_dim);
  }
  return heads;
}

}  // namespace

void save_moments(const ModelMoments& moments, const std::string& path) {
  if (moments.shapes.size() != moments.layers.size()) {
    fail("cannot save moments of {} layers with {} shapes", moments.layers.size(), moments.shapes.size());
  }
  nlohmann::json meta = {
      {"format", kFormat},
      {"format_version", kVersion},
      {"model",
       {{"fingerprint", moments.model_fingerprint},
        {"architecture", moments.architecture},
        {"name", moments.model_name},
        {"n_layer", moments.n_layer}}},
      {"date", moments.date},
      {"tool_version", moments.tool_version},
      {"sources", nlohmann::json::array()},
      {"layers", nlohmann::json::array()},
  };
  for (const TextSource& source : moments.sources) meta["sources"].push_back(to_json(source));
  std::vector<TensorSource> tensors;
  for (std::size_t i = 0; i < moments.shapes.size(); ++i) {
    const LayerShape& shape = moments.shapes[i];
    const Heads& heads = moments.layers[i];
    nlohmann::json layer = {{"shape", to_json(shape)}, {"tokens", 0}, {"queries", 0}, {"has_moments", !heads.empty()}};
    if (!heads.empty()) {
      if (heads.size() != static_cast<std::size_t>(shape.n_head_kv)) {
        fail("layer {}: {} heads were collected of {}", shape.layer, heads.size(), shape.n_head_kv);
      }
      layer["tokens"] = heads.front().tokens;
      layer["queries"] = heads.front().queries;
      LayerTensors of_layer(shape, heads, tensors);
      of_layer.moments();
      if (!heads.front().importance.empty()) {
        layer["importance_tokens"] = heads.front().importance.tokens;
        of_layer.importance();
      }
    }
    meta["layers"].push_back(layer);
  }
  write_safetensors(std::move(tensors), {{"oscar", meta.dump()}}, path);
}

ModelMoments load_moments(const std::string& path) {
  Reader reader(path);
  const std::string file = fmt::format("moments file '{}'", path);
  const nlohmann::json meta = parse_json(reader.metadata(), "the metadata of " + file);
  if (json_text(meta, "format", file) != kFormat) {
    fail("'{}' is not a moments file: its format is '{}'", path, json_text(meta, "format", file));
  }
  const std::int64_t version = json_integer(meta, "format_version", file);
  if (version != kVersion) fail("{} has format version {}, this program reads {}", file, version, kVersion);

  ModelMoments moments;
  const nlohmann::json& model = json_field(meta, "model", file);
  moments.model_fingerprint = json_text(model, "fingerprint", file);
  moments.architecture = json_text(model, "architecture", file);
  moments.model_name = json_text(model, "name", file);
  moments.n_layer = json_count(model, "n_layer", file);
  moments.date = json_text(meta, "date", file);
  moments.tool_version = json_text(meta, "tool_version", file);
  for (const nlohmann::json& source : json_array(meta, "sources", file)) {
    moments.sources.push_back(text_source_from_json(source, "a source of " + file));
  }
  for (const nlohmann::json& layer : json_array(meta, "layers", file)) {
    const LayerShape shape = layer_shape_from_json(json_field(layer, "shape", "a layer of " + file), file);
    if (!moments.shapes.empty() && shape.layer <= moments.shapes.back().layer) {
      fail("{} lists layer {} out of order", file, shape.layer);
    }
    const std::string what = fmt::format("layer {} of {}", shape.layer, file);
    moments.shapes.push_back(shape);
    moments.layers.push_back(json_bool(layer, "has_moments", what) ? load_layer(shape, layer, what, reader) : Heads{});
    if (layer.contains("importance_tokens") && !moments.layers.back().empty()) {
      load_importance(shape, json_integer(layer, "importance_tokens", what, 0), reader, moments.layers.back());
    }
    reader.forget(shape.layer);
  }
  reader.require_all_used();
  return moments;
}

}  // namespace oscar
