#include "rivals/simulated_codec.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "codec/row_mean.h"
#include "oscar/base/error.h"
#include "rivals/token_groups.h"

namespace oscar::rival {
namespace {

constexpr float kMaxInput = 0x1p60F;  // sums of squares over a head stay finite

class SimulatedCodec final : public Codec {
 public:
  SimulatedCodec(std::string name, bool is_k, RivalLayer layer, double bits, Simulation simulation)
      : name_(std::move(name)), is_k_(is_k), layer_(std::move(layer)), bits_(bits), simulation_(std::move(simulation)) {
    const bool has_rope = layer_.rope.params().pairing != RopePairing::none;
    if (has_rope && layer_.rope.head_dim() != layer_.head_dim) {
      fail("its RoPE is for heads of {}, its heads are of {}", layer_.rope.head_dim(), layer_.head_dim);
    }
    if (layer_.mean_pre_rope.size() != 0) {
      // Without a rotary embedding the row before it is the row itself.
      mean_ = has_rope ? RowMean(name_, {}, layer_.mean_pre_rope, layer_.rope, layer_.n_head_kv, layer_.head_dim)
                       : RowMean(name_, layer_.mean_pre_rope, {}, {}, layer_.n_head_kv, layer_.head_dim);
      has_mean_ = true;
    }
    undo_rope_ = is_k_ && simulation_.pre_rope && has_rope;
    if (simulation_.tokens > 1) {
      groups_ = std::make_unique<TokenGroups>(simulation_.tokens, values(),
                                              [this](std::int64_t first, MatrixF& rows) { simulate(first, rows); });
    }
  }

  [[nodiscard]] std::string_view name() const override { return name_; }
  [[nodiscard]] int n_head_kv() const override { return layer_.n_head_kv; }
  [[nodiscard]] int head_dim() const override { return layer_.head_dim; }
  [[nodiscard]] std::size_t row_bytes() const override { return values() * sizeof(float); }
  [[nodiscard]] double bits_per_element() const override { return bits_; }
  [[nodiscard]] bool simulated() const override { return true; }

  void encode(std::span<const float> row, std::int64_t position, std::span<std::uint8_t> out,
              EncodeStats& stats) const override {
    check_row(row.size(), out.size());
    MatrixF rows(1, static_cast<Eigen::Index>(values()));
    bool finite = true;
    for (std::size_t i = 0; i < row.size(); ++i) {
      finite = finite && std::isfinite(row[i]);
      rows.data()[i] = std::isfinite(row[i]) ? std::clamp(row[i], -kMaxInput, kMaxInput) : 0.0F;
    }
    ++stats.rows;
    if (!finite) ++stats.sanitised;
    if (groups_ != nullptr) {
      groups_->add(position, {rows.data(), values()}, out);
    } else {
      simulate(position, rows);
      std::memcpy(out.data(), rows.data(), out.size());
    }
  }

  void decode(std::span<const std::uint8_t> code, std::int64_t /*position*/, std::span<float> row) const override {
    check_row(row.size(), code.size());
    std::memcpy(row.data(), code.data(), code.size());
  }

  void decode_inner(int kv_head, std::span<const std::uint8_t> code, std::span<float> out) const override {
    const std::size_t bytes = static_cast<std::size_t>(layer_.head_dim) * sizeof(float);
    std::memcpy(out.data(), code.data() + static_cast<std::size_t>(kv_head) * bytes, bytes);
  }
  void query_to_inner(int /*kv_head*/, std::span<const float> q, std::span<float> inner) const override {
    std::copy(q.begin(), q.end(), inner.begin());
  }
  void inner_to_output(int /*kv_head*/, std::span<const float> inner, double /*weight*/, std::span<float> out) const override {
    for (std::size_t d = 0; d < out.size(); ++d) out[d] += inner[d];
  }
  [[nodiscard]] KeyMean key_mean(int /*kv_head*/) const override { return {}; }  // decoded rows have their mean

 private:
  [[nodiscard]] std::size_t values() const {
    return static_cast<std::size_t>(layer_.n_head_kv) * static_cast<std::size_t>(layer_.head_dim);
  }

  void check_row(std::size_t values_given, std::size_t bytes) const {
    if (values_given != values() || bytes != row_bytes()) {
      fail("{}: row of {} values and {} code bytes; expected {} and {}", name_, values_given, bytes, values(), row_bytes());
    }
  }

  // Into what the method sees (sign -1) or back (+1).
  void change_basis(std::int64_t first, float sign, MatrixF& rows) const {
    if (!has_mean_ && !undo_rope_) return;
    const auto dim = static_cast<std::size_t>(layer_.head_dim);
    HeadBuffer turn, x;
    for (Eigen::Index t = 0; t < rows.rows(); ++t) {
      const std::int64_t position = first + t;
      mean_.turn(position, turn);
      for (int h = 0; h < layer_.n_head_kv; ++h) {
        const std::span<float> head(rows.data() + static_cast<std::size_t>(t) * values() + static_cast<std::size_t>(h) * dim,
                                    dim);
        if (undo_rope_ && sign > 0) layer_.rope.apply(head, position);
        if (has_mean_) {
          std::copy(head.begin(), head.end(), x.begin());
          mean_.add(h, turn, sign, x);
          std::copy_n(x.begin(), dim, head.begin());
        }
        if (undo_rope_ && sign < 0) layer_.rope.undo(head, position);
      }
    }
  }

  void simulate(std::int64_t first, MatrixF& rows) const {
    change_basis(first, -1.0F, rows);
    simulation_.quantize(rows);
    change_basis(first, 1.0F, rows);
  }

  std::string name_;
  bool is_k_;
  RivalLayer layer_;
  double bits_;
  Simulation simulation_;
  RowMean mean_;
  bool has_mean_ = false, undo_rope_ = false;
  std::unique_ptr<TokenGroups> groups_;  // its own lock
};

}  // namespace

std::shared_ptr<const Codec> make_simulated_codec(std::string name, bool is_k, RivalLayer layer, double bits,
                                                  Simulation simulation) {
  if (layer.head_dim > kMaxHeadDim) fail("its heads of {} are larger than {}", layer.head_dim, kMaxHeadDim);
  return std::make_shared<SimulatedCodec>(std::move(name), is_k, std::move(layer), bits, std::move(simulation));
}

}  // namespace oscar::rival
